"""Figure 5 (the text calls it Table 5): what LaS loses when each layer sees a smaller window."""

import itertools

from longlens.paper.study import Cell, Claim, Scale, Study, better
from longlens.training.config import load_recipe

WINDOWS = {32: "a 32nd", 8: "an eighth", 2: "a half", 1: "the whole sequence"}  # the parts of a sequence, in words
PARTS = (*WINDOWS,)


def tasks(scale: Scale) -> tuple[str, ...]:
    return {
        "smoke": ("listops",),
        "mini": ("image", "listops", "text"),
        "paper": ("image", "text", "listops", "pathfinder"),
    }[scale]


def length(scale: Scale, task: str) -> int:
    found = load_recipe(scale, task).resolve(task, "las").task
    return getattr(found, "max_length", None) or getattr(found, "size", 0) ** 2


def cell(task: str, part: int, scale: Scale) -> Cell:
    """All windows share the learning rate of the whole sequence."""
    whole = Cell(f"LaS on {task}", task, "las", column="1")
    if part == 1:
        return whole
    size = max(4, length(scale, task) // part)
    return Cell(whole.row, task, "las", {"mixer.chunk_size": size}, like=whole, column=f"1/{part}")


def cells(scale: Scale) -> list[Cell]:
    return [cell(task, part, scale) for task in tasks(scale) for part in PARTS]


def claims(scale: Scale) -> list[Claim]:
    """Each window beside the next, and the widest beside the narrowest."""
    pairs = (*itertools.pairwise(PARTS), (PARTS[0], PARTS[-1]))
    return [_claim(task, narrow, wide, scale) for task in tasks(scale) for narrow, wide in pairs]


def _claim(task: str, narrow: int, wide: int, scale: Scale) -> Claim:
    text = f"{WINDOWS[wide]} is better than {WINDOWS[narrow]} on {task}"
    return better(text, cell(task, wide, scale), cell(task, narrow, scale))


STUDY = Study(
    name="figure5",
    title="Context window: accuracy",
    place="Figure 5 (printed as Table 5), Section 5.3",
    claim="Accuracy falls as the context window of each layer narrows.",
    cells=cells,
    claims=claims,
    axis="window of a layer, as a part of the sequence",
)
