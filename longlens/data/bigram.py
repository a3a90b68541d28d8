"""The model that every language model must beat: the counts of pairs of tokens."""

import numpy as np

from longlens.data.datasets import IGNORE, Split, read_all

MOST_SYMBOLS = 1024  # of a vocabulary whose pairs are counted


def bigram_bits(train: Split, other: Split, symbols: int) -> float | None:
    """Bits for each token of a split, by the counts of pairs in the training set plus one: the model that every
    language model must beat. None where there are too many symbols to count their pairs."""
    if symbols > MOST_SYMBOLS:
        return None
    counts = _pairs(train, symbols) + 1.0
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    seen = _pairs(other, symbols)
    return float((seen * bits).sum() / seen.sum())


def _pairs(split: Split, symbols: int) -> np.ndarray:
    """(symbols, symbols): how often each token follows each other."""
    counts = np.zeros(symbols * symbols, dtype=np.int64)
    for samples in read_all(split):
        real = samples.targets != IGNORE
        counts += np.bincount(samples.inputs[real] * symbols + samples.targets[real], minlength=symbols * symbols)
    return counts.reshape(symbols, symbols)
