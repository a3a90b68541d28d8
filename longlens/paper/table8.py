"""Table 8 and Figure 2: bits per byte of language models of text8 and enwik8, and their learning curves."""

from longlens.paper.study import Cell, Claim, Scale, Study, better

PAPER = {"text8": (1.3557, 1.3332), "enwik8": (1.2885, 1.2826)}


def _row(task: str, scale: Scale) -> tuple[Cell, Cell]:
    changes = {} if scale == "paper" else {"stand_in": True}
    return Cell("Transformer", task, "transformer", changes), Cell("LaS", task, "las", changes)


def cells(scale: Scale) -> list[Cell]:
    return [cell for task in PAPER for cell in _row(task, scale)]


def claims(scale: Scale) -> list[Claim]:
    found = []
    for task, (plain, ours) in PAPER.items():
        transformer, las = _row(task, scale)
        found.append(better(f"LaS is better than a Transformer on {task}", las, transformer, plain - ours))
    return found


STUDY = Study(
    name="table8",
    title="Language by bytes: bits per byte",
    place="Table 8 and Figure 2, Section 5.5",
    claim="LaS is better than a Transformer on small sets of text.",
    cells=cells,
    claims=claims,
    curves=True,
    paper={
        **{("Transformer", task): values[0] for task, values in PAPER.items()},
        **{("LaS", task): values[1] for task, values in PAPER.items()},
    },
)
