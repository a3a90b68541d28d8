"""What the paper leaves out: the window P of the smoothing, from none to 65, four rows of an image of 16×16 pixels."""

from longlens.paper.study import Cell, Claim, Scale, Study, better, las, option, sweep_task

WINDOWS = (3, 5, 9, 17, 33, 65)


def _window(size: int, scale: Scale) -> Cell:
    base = las(scale, "LaS", str(size))
    if size == option(scale, base.task, "window"):
        return base
    return Cell("LaS", base.task, "las", {"mixer.window": size}, like=las(scale), column=str(size))


def _unsmoothed(scale: Scale) -> Cell:
    return Cell("LaS", sweep_task(scale), "l-attention", column="1")


def cells(scale: Scale) -> list[Cell]:
    return [_unsmoothed(scale), *(_window(size, scale) for size in WINDOWS)]


def claims(scale: Scale) -> list[Claim]:
    paper = _window(3, scale)
    return [
        better("a window of 3 is better than none", paper, _unsmoothed(scale)),
        better("a window of 3 is better than one of 17", paper, _window(17, scale)),
    ]


STUDY = Study(
    name="window-sweep",
    title="Window P of the smoothing: accuracy",
    place="Section 4.1; Appendix A searches 3 and 5",
    claim="A short moving average is better than none, and than a long one.",
    ours=True,
    cells=cells,
    claims=claims,
    axis="P",
)
