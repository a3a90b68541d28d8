"""Table 3: digits, pixel by pixel, in order and permuted."""

from longlens.paper.study import Cell, Claim, Scale, Study, better

PAPER = {"smnist": (98.90, 99.18), "pmnist": (97.90, 98.05)}


def _row(task: str) -> tuple[Cell, Cell]:
    return Cell("Transformer", task, "transformer"), Cell("LaS", task, "las")


def cells(scale: Scale) -> list[Cell]:
    return [cell for task in PAPER for cell in _row(task)]


def claims(scale: Scale) -> list[Claim]:
    found = []
    for task, (plain, ours) in PAPER.items():
        transformer, las = _row(task)
        found.append(better(f"LaS is better than a Transformer on {task}", las, transformer, ours - plain))
    return found


STUDY = Study(
    name="table3",
    title="Sequential and permuted MNIST: accuracy",
    place="Table 3, Section 5.1",
    claim="LaS is better than a Transformer on digits, also where the order of the pixels is permuted.",
    cells=cells,
    claims=claims,
    paper={
        **{("Transformer", task): values[0] for task, values in PAPER.items()},
        **{("LaS", task): values[1] for task, values in PAPER.items()},
    },
)
