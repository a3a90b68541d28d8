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
    best = "A Transformer is best by words, and smoothing costs more than decay"
    part = f"{best} (here on no larger a set than Table 8's)." if scale == "mini" else None
    pairs = [("Transformer", "L-attention"), ("Transformer", "S-attention"), ("Transformer", "LaS")]
    found = []
    for winner, loser in [*pairs, ("L-attention", "S-attention")]:
        margin = PAPER[loser] - PAPER[winner] if scale == "paper" else None  # a perplexity of other text is another one
        text = f"{winner} is better than {loser}".replace("Transformer", "a Transformer")
        found.append(better(text, _cell(winner, scale), _cell(loser, scale), margin)._replace(part=part))
    return found


STUDY = Study(
    name="appendix-c",
    title="Language by words: perplexity",
    place="Figure 3, Appendix C",
    claim="On a larger set of text a Transformer is best; smoothing costs more than decay.",
    cells=cells,
    claims=claims,
    curves=True,
    note="At mini, WikiText-2 instead of WikiText-103: 2 million words, of which a run sees a part. No larger set than "
    "those of Table 8 is tested, and no longer training: only what 1,500 steps bring. The paper, on WikiText-103: "
    f"{', '.join(f'{row} {value:.2f}' for row, value in PAPER.items())}.",
    paper={(row, "wikitext-103"): value for row, value in PAPER.items()},
)
