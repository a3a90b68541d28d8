"""Table 7: operations on numbers that are neither local nor smooth, on which LaS is expected to fall behind."""

from longlens.paper.study import Study, las_beside_transformer

PAPER = {"atomic-select": (0.971, 0.783), "atomic-cummax": (1.0, 0.995), "atomic-cumsum": (1.0, 0.997)}

STUDY = Study(
    name="table7",
    title="Atomic tasks: R²",
    place="Table 7, Section 5.4",
    claim="LaS falls behind a Transformer on tasks that are neither local nor smooth.",
    **las_beside_transformer(PAPER, las_is_better=False, seeds=5),
)
