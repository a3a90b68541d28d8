"""Figure 5 (the text calls it Table 5): what LaS loses when each layer sees a smaller window."""

from longlens.paper.study import Cell, Claim, Scale, Study, better
from longlens.training.config import load_recipe

PARTS = (32, 8, 2, 1)  # of the sequence: the smallest window is a 32nd


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
    return [
        better(
            f"the whole sequence is better than windows of a {PARTS[0]}nd on {task}",
            cell(task, 1, scale),
            cell(task, PARTS[0], scale),
        )
        for task in tasks(scale)
    ]


STUDY = Study(
    name="figure5",
    title="Context window: accuracy",
    place="Figure 5 (printed as Table 5), Section 5.3",
    claim="Accuracy falls as the context window of each layer narrows.",
    cells=cells,
    claims=claims,
    axis="window of a layer, as a part of the sequence",
)
