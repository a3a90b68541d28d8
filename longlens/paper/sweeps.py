"""What the paper leaves out: the decay rate B in both readings of its schedule, the window P, the size of chunks, the side
of the smoothing, and attention to both sides."""

from longlens.paper.study import Cell, Claim, Scale, Study, better, chunk_size, option

FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0)  # of the recipe's B
WINDOWS = (3, 5, 9, 17)


def task(scale: Scale) -> str:
    return "listops" if scale == "smoke" else "image"


def _las(scale: Scale, row: str = "LaS", column: str = "") -> Cell:
    return Cell(row, task(scale), "las", column=column)


def _transformer(scale: Scale, **options: str) -> Cell:
    return Cell("Transformer", task(scale), "transformer", **options)


def _rate(factor: float, schedule: str, scale: Scale) -> Cell:
    base, rate = _las(scale), option(scale, task(scale), "max_rate") * factor
    if schedule == "exp-uniform" and factor == 1:
        return _las(scale, "exp(-α) evenly from 1 to exp(-B)", f"{rate:g}")
    changes = {"mixer.max_rate": rate, "mixer.schedule": schedule}
    rows = {"exp-uniform": "exp(-α) evenly from 1 to exp(-B)", "literal": "exp(-α) evenly from 0 to B, as printed"}
    return Cell(rows[schedule], base.task, "las", changes, like=base, column=f"{rate:g}")


def alpha_cells(scale: Scale) -> list[Cell]:
    both = [_rate(factor, "exp-uniform", scale) for factor in FACTORS]
    return both + [_rate(factor, "literal", scale) for factor in (1.0, 10.0, 100.0)]


def alpha_claims(scale: Scale) -> list[Claim]:
    ours = _rate(1.0, "exp-uniform", scale)
    return [
        better("the evenly spaced reading is better than the printed one", ours, _rate(1.0, "literal", scale)),
        better("the paper's B is better than a hundredth of it", ours, _rate(0.01, "exp-uniform", scale)),
        better("the paper's B is better than a hundred times of it", ours, _rate(100.0, "exp-uniform", scale)),
    ]


ALPHA = Study(
    name="alpha-sweep",
    title="Decay rate B, in both readings of the schedule: accuracy",
    place="Section 4.1, whose text contradicts itself; Appendix A searches two values of B",
    claim="Heads whose rates are spread from 0 to B are what helps.",
    cells=alpha_cells,
    claims=alpha_claims,
    axis="B",
)


def _window(size: int, scale: Scale) -> Cell:
    base = _las(scale, "LaS", str(size))
    if size == option(scale, base.task, "window"):
        return base
    return Cell("LaS", base.task, "las", {"mixer.window": size}, like=_las(scale), column=str(size))


def _unsmoothed(scale: Scale) -> Cell:
    return Cell("LaS", task(scale), "l-attention", column="1")


def window_cells(scale: Scale) -> list[Cell]:
    return [_unsmoothed(scale), *(_window(size, scale) for size in WINDOWS)]


def window_claims(scale: Scale) -> list[Claim]:
    paper = _window(3, scale)
    return [
        better("a window of 3 is better than none", paper, _unsmoothed(scale)),
        better("a window of 3 is better than one of 17", paper, _window(17, scale)),
    ]


WINDOW = Study(
    name="window-sweep",
    title="Window P of the smoothing: accuracy",
    place="Section 4.2; Appendix A searches 3 and 5",
    claim="A short moving average helps.",
    cells=window_cells,
    claims=window_claims,
    axis="P",
)


def _chunk(size: int, smooth_and_local: bool, scale: Scale) -> Cell:
    name = task(scale)
    if smooth_and_local:
        return Cell("LaS", name, "las", {"mixer.chunk_size": size}, like=_las(scale), column=str(size))
    plain = {"mixer.chunk_size": size, "mixer.max_rate": 0.0}
    return Cell("plain attention", name, "l-attention", plain, like=_transformer(scale), column=str(size))


def _chunk_sizes(scale: Scale) -> list[int]:
    return [chunk_size(scale, task(scale)) * factor // 4 for factor in (1, 4, 16)]


def chunk_cells(scale: Scale) -> list[Cell]:
    return [_chunk(size, kind, scale) for kind in (True, False) for size in _chunk_sizes(scale)]


def chunk_claims(scale: Scale) -> list[Claim]:
    return [
        better(f"LaS is better than plain attention in chunks of {size}", *(_chunk(size, k, scale) for k in (True, False)))
        for size in _chunk_sizes(scale)
    ]


CHUNK = Study(
    name="chunk-sweep",
    title="Size of chunks, with and without decay and smoothing: accuracy",
    place="Section 5.1 has chunks of 128 for LaS alone",
    claim="Decay and smoothing help in chunks of any size.",
    cells=chunk_cells,
    claims=chunk_claims,
    axis="tokens of a chunk",
)


def _side(side: str, name: str, scale: Scale) -> Cell:
    base = Cell("centered", name, "las")
    return base if side == "centered" else Cell("past", name, "las", {"mixer.side": "past"}, like=base)


def _side_tasks(scale: Scale) -> tuple[str, ...]:
    return ("listops",) if scale == "smoke" else ("image", "listops")


def side_cells(scale: Scale) -> list[Cell]:
    return [_side(side, name, scale) for name in _side_tasks(scale) for side in ("centered", "past")]


def side_claims(scale: Scale) -> list[Claim]:
    return [
        better(
            f"the paper's centered window, which sees (P - 1)/2 later tokens, is better than a causal one on {name}",
            _side("centered", name, scale),
            _side("past", name, scale),
        )
        for name in _side_tasks(scale)
    ]


SIDE = Study(
    name="side",
    title="Side of the smoothing: accuracy",
    place="Eq. 4, which does not say it",
    claim="The moving average is centered, which leaks (P - 1)/2 tokens of the future.",
    cells=side_cells,
    claims=side_claims,
)


def _both(mixer: str, scale: Scale) -> Cell:
    if mixer == "las":
        return Cell("LaS, both sides", task(scale), "las-bidirectional")
    return Cell("Transformer, both sides", task(scale), "transformer", {"mixer.bidirectional": True})


def bidirectional_cells(scale: Scale) -> list[Cell]:
    return [_las(scale), _both("las", scale), _transformer(scale), _both("transformer", scale)]


def bidirectional_claims(scale: Scale) -> list[Claim]:
    return [
        better("LaS to both sides is better than causal LaS", _both("las", scale), _las(scale)),
        better("to both sides LaS is better than a Transformer", _both("las", scale), _both("transformer", scale)),
    ]


BIDIRECTIONAL = Study(
    name="bidirectional",
    title="Attention to both sides: accuracy",
    place="Section 5.1: attention to both sides could decrease the performance gap",
    claim="LaS gains by seeing both sides.",
    cells=bidirectional_cells,
    claims=bidirectional_claims,
)
