"""What the paper leaves out: the decay rate B over decades, in both readings of its schedule."""

from longlens.paper.study import Cell, Claim, Scale, Study, better, las, option, sweep_task

FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0)  # of the recipe's B
ROWS = {"exp-uniform": "exp(-α) evenly from 1 to exp(-B)", "literal": "exp(-α) evenly from 0 to B, as printed"}


def _rate(factor: float, schedule: str, scale: Scale) -> Cell:
    base, rate = las(scale), option(scale, sweep_task(scale), "max_rate") * factor
    if schedule == "exp-uniform" and factor == 1:
        return las(scale, ROWS[schedule], f"{rate:g}")
    changes = {"mixer.max_rate": rate, "mixer.schedule": schedule}
    return Cell(ROWS[schedule], base.task, "las", changes, like=base, column=f"{rate:g}")


def cells(scale: Scale) -> list[Cell]:
    both = [_rate(factor, "exp-uniform", scale) for factor in FACTORS]
    return both + [_rate(factor, "literal", scale) for factor in (1.0, 10.0, 100.0)]


def claims(scale: Scale) -> list[Claim]:
    ours = _rate(1.0, "exp-uniform", scale)
    return [
        better("the evenly spaced reading is better than the printed one", ours, _rate(1.0, "literal", scale)),
        better("the paper's B is better than a hundredth of it", ours, _rate(0.01, "exp-uniform", scale)),
        better("the paper's B is better than a hundred times of it", ours, _rate(100.0, "exp-uniform", scale)),
    ]


STUDY = Study(
    name="alpha-sweep",
    title="Decay rate B, in both readings of the schedule: accuracy",
    place="Section 4.1, whose text contradicts itself; Appendix A searches two values of B",
    claim="Heads whose rates are spread from 0 to B are what helps.",
    ours=True,
    cells=cells,
    claims=claims,
    axis="B",
)
