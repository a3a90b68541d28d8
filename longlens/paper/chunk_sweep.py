"""What the paper leaves out: chunks of other sizes, with and without decay and smoothing."""

from longlens.paper.study import Cell, Claim, Scale, Study, better, chunk_size, las, sweep_task, transformer


def _chunk(size: int, smooth_and_local: bool, scale: Scale) -> Cell:
    name = sweep_task(scale)
    if smooth_and_local:
        return Cell("LaS", name, "las", {"mixer.chunk_size": size}, like=las(scale), column=str(size))
    plain = {"mixer.chunk_size": size, "mixer.max_rate": 0.0}
    return Cell("plain attention", name, "l-attention", plain, like=transformer(scale), column=str(size))


def _chunk_sizes(scale: Scale) -> list[int]:
    return [chunk_size(scale, sweep_task(scale)) * factor // 4 for factor in (1, 4, 16)]


def cells(scale: Scale) -> list[Cell]:
    return [_chunk(size, kind, scale) for kind in (True, False) for size in _chunk_sizes(scale)]


def claims(scale: Scale) -> list[Claim]:
    text = "LaS is better than plain attention in chunks of"
    sizes = _chunk_sizes(scale)
    return [better(f"{text} {size}", _chunk(size, True, scale), _chunk(size, False, scale)) for size in sizes]


STUDY = Study(
    name="chunk-sweep",
    title="Size of chunks, with and without decay and smoothing: accuracy",
    place="Section 5.1 has chunks of 128 for LaS alone",
    claim="Decay and smoothing help in chunks of any size.",
    ours=True,
    cells=cells,
    claims=claims,
    axis="tokens of a chunk",
)
