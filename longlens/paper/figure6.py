"""Figure 6 (the text calls it Table 6): what more training samples bring, to LaS and to a Transformer."""

from longlens.paper.study import Cell, Claim, Scale, Study, better

ROWS = {"LaS": "las", "Transformer": "transformer"}


def sizes(scale: Scale) -> tuple[int | None, ...]:
    """Training samples; None for all. All see as many steps (smoke, mini), or as many epochs (paper)."""
    return {"smoke": (32, None), "mini": (1000, 4000, 16000, None), "paper": (5000, 15000, None)}[scale]


def tasks(scale: Scale) -> tuple[str, ...]:
    return {"smoke": ("listops",), "mini": ("image", "listops"), "paper": ("image", "text", "listops", "pathfinder")}[
        scale
    ]


def cell(row: str, task: str, size: int | None) -> Cell:
    whole = Cell(f"{row} on {task}", task, ROWS[row], column="all")
    if size is None:
        return whole
    return Cell(whole.row, task, whole.mixer, {"training.train_samples": size}, like=whole, column=f"{size:,}")


def cells(scale: Scale) -> list[Cell]:
    return [cell(row, task, size) for task in tasks(scale) for row in ROWS for size in sizes(scale)]


def claims(scale: Scale) -> list[Claim]:
    found, least = [], sizes(scale)[0]
    for task in tasks(scale):
        few, many = cell("LaS", task, least), cell("LaS", task, None)
        found.append(better(f"more samples improve LaS on {task}", many, few))
        plain = [(-1.0, cell("Transformer", task, None)), (1.0, cell("Transformer", task, least))]
        text = f"more samples improve LaS more than a Transformer on {task}"
        found.append(Claim(text, [(1.0, many), (-1.0, few), *plain]))
    return found


STUDY = Study(
    name="figure6",
    title="Training samples: accuracy",
    place="Figure 6 (printed as Table 6), Sections 3 and 5.3",
    claim="Accuracy rises with the number of training samples, and more for LaS than for other Transformers.",
    cells=cells,
    claims=claims,
    note="At mini all see as many steps: 30 passes of 1,000 images, and two thirds of one of all. All sizes have the "
    "learning rate that was chosen for all samples. A larger gain is no lead: LaS can be behind at all sizes.",
    axis="training samples",
)
