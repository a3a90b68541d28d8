"""Section 3: a Transformer that is also trained on the validation set fits it, so that it does not lack capacity."""

from longlens.paper.study import Cell, Claim, Scale, Study

FITTED = 0.95  # "near 100 %"
# A small set, many passes, and no fall of the learning rate: can a model of this size learn it by heart?
CHANGES = {
    "smoke": {"training.train_samples": 16},
    "mini": {
        "task.valid_size": 500,
        "training.train_samples": 500,
        "training.valid_samples": None,
        "training.steps": 2000,
        "training.evaluate_every": 200,
        "training.schedule": "constant",
    },
    "paper": {},
}


def _cell(scale: Scale, on_valid: bool) -> Cell:
    task = "listops" if scale == "smoke" else "image"
    row = "trained on the validation set as well" if on_valid else "trained on the training set"
    return Cell(row, task, "transformer", CHANGES[scale] | {"training.train_on_valid": on_valid})


def cells(scale: Scale) -> list[Cell]:
    return [_cell(scale, True), _cell(scale, False)]


def claims(scale: Scale) -> list[Claim]:
    text = f"a Transformer that is trained on the validation set as well fits at least {100 * FITTED:g} % of it"
    return [Claim(text, [(1.0, _cell(scale, True))], least=FITTED)]


STUDY = Study(
    name="shatter",
    title="Fitting the validation set: accuracy on it",
    place="Section 3",
    claim="Transformers do not lack capacity: trained on the validation set as well, they fit nearly all of it.",
    cells=cells,
    claims=claims,
    score="valid",
    note="At mini, 500 images of training and 500 of validation, seen 100 times; the paper has the whole benchmark.",
)
