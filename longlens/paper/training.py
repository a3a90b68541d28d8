"""What the paper leaves out: whether the lead of LaS over a Transformer grows with training."""

from longlens.paper.study import PLAIN_AND_LAS, Cell, Scale, Study, growing_lead, sweep_task
from longlens.training.config import load_recipe

FACTORS = {"smoke": (1.0, 2.0), "mini": (1.0, 4.0), "paper": (0.25, 1.0)}  # of the recipe's training


def _cell(row: str, factor: float, scale: Scale) -> Cell:
    """All lengths share the learning rate of the recipe's, and are evaluated as often."""
    whole = Cell(row, sweep_task(scale), PLAIN_AND_LAS[row], column="×1")
    if factor == 1:
        return whole
    options = load_recipe(scale, whole.task).resolve(whole.task, whole.mixer).training
    names = ("epochs", "steps", "evaluate_every" if options.evaluate_every else "patience")  # what grows with it
    known = {name: getattr(options, name) for name in names}
    changes = {f"training.{name}": round(factor * value) for name, value in known.items() if value is not None}
    return Cell(row, whole.task, whole.mixer, changes, like=whole, column=f"×{factor:g}")


STUDY = Study(
    name="training",
    title="Length of training: accuracy",
    place="Section 5.1 and Table 9, which has one length for each task",
    claim="The lead of LaS over a Transformer grows with training.",
    ours=True,
    axis="steps of the recipe",
    **growing_lead(_cell, FACTORS.__getitem__, "after {:g}× the recipe's steps", "after {:g}×"),
)
