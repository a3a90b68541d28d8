"""Appendix C (Figure 3): perplexity of language models by words, of four variants."""

from longlens.paper.study import Cell, Claim, Scale, Study, better

ROWS = {"Transformer": "transformer", "L-attention": "l-attention", "S-attention": "s-attention", "LaS": "las"}
PAPER = {"Transformer": 20.20, "L-attention": 20.34, "S-attention": 21.69, "LaS": 21.87}


def task(scale: Scale) -> str:
    return "wikitext-103" if scale == "paper" else "wikitext-2"


def _cell(row: str, scale: Scale) -> Cell:
    return Cell(row, task(scale), ROWS[row], seeds=2 if scale == "paper" else None)


def cells(scale: Scale) -> list[Cell]:
    return [_cell(row, scale) for row in ROWS]


def claims(scale: Scale) -> list[Claim]:
    plain, found = _cell("Transformer", scale), []
    for row in ("L-attention", "S-attention", "LaS"):
        margin = PAPER[row] - PAPER["Transformer"]
        found.append(better(f"a Transformer is better than {row}", plain, _cell(row, scale), margin))
    return found


STUDY = Study(
    name="appendix-c",
    title="Language by words: perplexity",
    place="Figure 3, Appendix C",
    claim="On a larger set of text a Transformer is best; smoothing costs more than decay.",
    cells=cells,
    claims=claims,
    curves=True,
    paper={(row, "wikitext-103"): value for row, value in PAPER.items()},
)
