"""What the paper leaves for later: attention to both sides."""

from longlens.paper.study import Cell, Claim, Scale, Study, better, las, sweep_task, transformer


def _both(mixer: str, scale: Scale) -> Cell:
    if mixer == "las":
        return Cell("LaS, both sides", sweep_task(scale), "las-bidirectional")
    return Cell("Transformer, both sides", sweep_task(scale), "transformer", {"mixer.bidirectional": True})


def cells(scale: Scale) -> list[Cell]:
    return [las(scale), _both("las", scale), transformer(scale), _both("transformer", scale)]


def claims(scale: Scale) -> list[Claim]:
    return [
        better("LaS to both sides is better than causal LaS", _both("las", scale), las(scale)),
        better("to both sides LaS is better than a Transformer", _both("las", scale), _both("transformer", scale)),
    ]


STUDY = Study(
    name="bidirectional",
    title="Attention to both sides: accuracy",
    place="Section 5.1: attention to both sides could decrease the performance gap",
    claim="LaS gains by seeing both sides.",
    ours=True,
    cells=cells,
    claims=claims,
)
