"""What the paper leaves out: whether the lead of LaS over a Transformer hangs on the schedule of the learning rate.

On a plateau, a short run reaches a fall of the rate or not, by chance; with a cosine, all do.
"""

from longlens.paper.study import PLAIN_AND_LAS, Cell, Scale, Study, growing_lead, sweep_task


def _cell(row: str, schedule: str, scale: Scale) -> Cell:
    changes = {} if schedule == "recipe" else {"training.schedule": schedule}
    return Cell(row, sweep_task(scale), PLAIN_AND_LAS[row], changes, column=schedule)


STUDY = Study(
    name="schedule",
    title="Schedule of the learning rate: accuracy",
    place="Appendix A, whose schedules are those of S4's recipes: a plateau for Image",
    claim="The lead of LaS over a Transformer grows where the learning rate falls in every run.",
    ours=True,
    **growing_lead(
        _cell, lambda scale: ("recipe", "cosine"), "with a cosine schedule", "with the plateau of the recipe"
    ),
)
