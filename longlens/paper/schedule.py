"""What the paper leaves out: whether the lead of LaS over a Transformer hangs on the schedule of the learning rate.

On a plateau, a short run reaches a fall of the rate or not, by chance; with a cosine, all do.
"""

from longlens.paper.study import Cell, Claim, Scale, Study, growing_lead, sweep_task

MIXERS = {"Transformer": "transformer", "LaS": "las"}


def _cell(row: str, scale: Scale, schedule: str = "recipe") -> Cell:
    changes = {} if schedule == "recipe" else {"training.schedule": schedule}
    return Cell(row, sweep_task(scale), MIXERS[row], changes, column=schedule)


def cells(scale: Scale) -> list[Cell]:
    return [_cell(row, scale, schedule) for row in MIXERS for schedule in ("recipe", "cosine")]


def claims(scale: Scale) -> list[Claim]:
    recipe, cosine = ((_cell("LaS", scale, name), _cell("Transformer", scale, name)) for name in ("recipe", "cosine"))
    return growing_lead("with a cosine schedule", "with the plateau of the recipe", cosine, recipe)


STUDY = Study(
    name="schedule",
    title="Schedule of the learning rate: accuracy",
    place="Table 9, which has a plateau for Image",
    claim="The lead of LaS over a Transformer grows where the learning rate falls in every run.",
    ours=True,
    cells=cells,
    claims=claims,
)
