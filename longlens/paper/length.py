"""What the paper leaves out: whether the lead of LaS over a Transformer grows with the length of the sequence."""

from longlens.paper.study import PLAIN_AND_LAS, Cell, Scale, Study, growing_lead, option


def _lengths(scale: Scale) -> tuple[int, ...]:
    """The last is that of the recipe."""
    return {"smoke": (16, 32), "mini": (64, 256, 1024), "paper": (256, 1024, 4096)}[scale]


def _cell(row: str, length: int, scale: Scale) -> Cell:
    """The first tokens of each sample; B as many times larger as they are fewer, so that B·L stays."""
    task, whole = "listops" if scale == "smoke" else "text", _lengths(scale)[-1]
    if length == whole:
        return Cell(row, task, PLAIN_AND_LAS[row], column=f"{length:,}")
    changes = {"task.max_length": length}
    if row == "LaS":
        changes["mixer.max_rate"] = option(scale, task, "max_rate") * whole / length
    return Cell(row, task, PLAIN_AND_LAS[row], changes, column=f"{length:,}")


STUDY = Study(
    name="length",
    title="Length of a text: accuracy",
    place="Sections 1 and 5.1, whose tasks have one length each",
    claim="The lead of LaS over a Transformer grows with the length of the sequence.",
    ours=True,
    axis="tokens",
    **growing_lead(_cell, _lengths, "on {:,} tokens", "on {:,}"),
)
