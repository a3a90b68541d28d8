"""What the paper leaves out: whether the lead of LaS over a Transformer hangs on the rates that are offered.

Most models take the largest of them; here is a larger one.
"""

from longlens.paper.study import PLAIN_AND_LAS, Cell, Scale, Study, growing_lead, sweep_task

LARGER = {"smoke": 3e-2, "mini": 1e-2, "paper": 3e-3}  # about three times the largest on offer


def _rates(scale: Scale) -> tuple[float | None, float]:
    """None for the one that is chosen."""
    return None, LARGER[scale]


def _cell(row: str, rate: float | None, scale: Scale) -> Cell:
    changes = {} if rate is None else {"training.lr": rate}
    return Cell(row, sweep_task(scale), PLAIN_AND_LAS[row], changes, column="chosen" if rate is None else f"{rate:g}")


STUDY = Study(
    name="learning-rate",
    title="A larger learning rate: accuracy",
    place="Appendix A, which searches 0.001, 0.0001 and the rate of S4",
    claim="The lead of LaS over a Transformer grows with a learning rate beyond those that are offered.",
    ours=True,
    **growing_lead(_cell, _rates, "with a learning rate of {:g}", "with the one that was chosen"),
)
