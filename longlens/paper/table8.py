"""Table 8 and Figure 2: bits per byte of language models of text8 and enwik8, and their learning curves."""

from longlens.paper.study import Scale, Study, las_beside_transformer

PAPER = {"text8": (1.3557, 1.3332), "enwik8": (1.2885, 1.2826)}


def _prefixes(scale: Scale) -> dict[str, bool]:
    return {} if scale == "paper" else {"stand_in": True}


STUDY = Study(
    name="table8",
    title="Language by bytes: bits per byte",
    place="Table 8 and Figure 2, Section 5.5",
    claim="LaS is better than a Transformer on small sets of text.",
    curves=True,
    note="At mini, prefixes of the sets, of which a run sees each part about once: small by the paper's measure, but "
    "seen too little to be learned by heart.",
    **las_beside_transformer(PAPER, las_is_better=True, changes=_prefixes),
)
