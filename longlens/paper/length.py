"""What the paper leaves out: whether the lead of LaS over a Transformer grows with the length of the sequence."""

from longlens.paper.study import Cell, Claim, Scale, Study, growing_lead, option

MIXERS = {"Transformer": "transformer", "LaS": "las"}


def _lengths(scale: Scale) -> tuple[int, ...]:
    """The last is that of the recipe."""
    return {"smoke": (16, 32), "mini": (64, 256, 1024), "paper": (256, 1024, 4096)}[scale]


def _cell(row: str, length: int, scale: Scale) -> Cell:
    """The first tokens of each sample; B as many times larger as they are fewer, so that B·L stays."""
    task, whole = "listops" if scale == "smoke" else "text", _lengths(scale)[-1]
    if length == whole:
        return Cell(row, task, MIXERS[row], column=f"{length:,}")
    changes = {"task.max_length": length}
    if row == "LaS":
        changes["mixer.max_rate"] = option(scale, task, "max_rate") * whole / length
    return Cell(row, task, MIXERS[row], changes, column=f"{length:,}")


def cells(scale: Scale) -> list[Cell]:
    return [_cell(row, length, scale) for row in MIXERS for length in _lengths(scale)]


def claims(scale: Scale) -> list[Claim]:
    few, *_, many = _lengths(scale)
    both = [(_cell("LaS", length, scale), _cell("Transformer", length, scale)) for length in (few, many)]
    return growing_lead(f"on {many:,} tokens", f"on {few:,}", both[1], both[0])


STUDY = Study(
    name="length",
    title="Length of a text: accuracy",
    place="Sections 1 and 5.1, whose tasks have one length each",
    claim="The lead of LaS over a Transformer grows with the length of the sequence.",
    ours=True,
    cells=cells,
    claims=claims,
    axis="tokens",
)
