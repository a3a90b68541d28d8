"""What the paper leaves open: a moving average of the past, or a centered one, which sees later tokens."""

from longlens.paper.study import Cell, Claim, Scale, Study, better


def _side(side: str, name: str) -> Cell:
    base = Cell("centered", name, "las")
    return base if side == "centered" else Cell("past", name, "las", {"mixer.side": "past"}, like=base)


def _side_tasks(scale: Scale) -> tuple[str, ...]:
    return ("listops",) if scale == "smoke" else ("image", "listops")


def cells(scale: Scale) -> list[Cell]:
    return [_side(side, name) for name in _side_tasks(scale) for side in ("centered", "past")]


def claims(scale: Scale) -> list[Claim]:
    return [
        better(
            f"the paper's centered window, which sees (P - 1)/2 later tokens, is better than a causal one on {name}",
            _side("centered", name),
            _side("past", name),
        )
        for name in _side_tasks(scale)
    ]


STUDY = Study(
    name="side",
    title="Side of the smoothing: accuracy",
    place="Eq. 4, which does not say it",
    claim="Smoothing that sees (P - 1)/2 later tokens is better than a causal one.",
    ours=True,
    cells=cells,
    claims=claims,
)
