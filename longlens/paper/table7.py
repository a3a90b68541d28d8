"""Table 7: operations on numbers that are neither local nor smooth, on which LaS is expected to fall behind."""

from longlens.paper.study import Cell, Claim, Scale, Study, better

PAPER = {"atomic-select": (0.971, 0.783), "atomic-cummax": (1.0, 0.995), "atomic-cumsum": (1.0, 0.997)}
SEEDS = 5


def _row(task: str) -> tuple[Cell, Cell]:
    return Cell("Transformer", task, "transformer", seeds=SEEDS), Cell("LaS", task, "las", seeds=SEEDS)


def cells(scale: Scale) -> list[Cell]:
    return [cell for task in PAPER for cell in _row(task)]


def claims(scale: Scale) -> list[Claim]:
    found = []
    for task, (plain, ours) in PAPER.items():
        transformer, las = _row(task)
        found.append(better(f"a Transformer is better than LaS on {task}", transformer, las, plain - ours))
    return found


STUDY = Study(
    name="table7",
    title="Atomic tasks: R²",
    place="Table 7, Section 5.4",
    claim="LaS falls behind a Transformer on tasks that are neither local nor smooth.",
    cells=cells,
    claims=claims,
    paper={
        **{("Transformer", task): values[0] for task, values in PAPER.items()},
        **{("LaS", task): values[1] for task, values in PAPER.items()},
    },
)
