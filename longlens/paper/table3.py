"""Table 3: digits, pixel by pixel, in order and permuted."""

from longlens.paper.study import Study, las_beside_transformer

PAPER = {"smnist": (98.90, 99.18), "pmnist": (97.90, 98.05)}

STUDY = Study(
    name="table3",
    title="Sequential and permuted MNIST: accuracy",
    place="Table 3, Section 5.1",
    claim="LaS is better than a Transformer on digits, also where the order of the pixels is permuted.",
    note="The paper quotes Gu et al. (2021) for the Transformer.",
    **las_beside_transformer(PAPER, las_is_better=True),
)
