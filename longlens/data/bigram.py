"""The model that every language model must beat: each token from the one before it, by counting."""

import numpy as np

from longlens.data.datasets import IGNORE, Split

LARGEST = 1024  # symbols of a vocabulary whose pairs are counted
AT_ONCE = 256  # samples


def bigram_bits(train: Split, other: Split, symbols: int) -> float | None:
    """Bits for each token of a split, by the counts of pairs in the training set plus one.

    None where there are too many symbols to count their pairs.
    """
    if symbols > LARGEST:
        return None
    counts = _pairs(train, symbols) + 1.0
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    seen = _pairs(other, symbols)
    return float((seen * bits).sum() / seen.sum())


def _pairs(split: Split, symbols: int) -> np.ndarray:
    """(symbols, symbols): how often each token follows each other."""
    counts = np.zeros(symbols * symbols, dtype=np.int64)
    for first in range(0, len(split), AT_ONCE):
        samples = split.take(np.arange(first, min(first + AT_ONCE, len(split))))
        real = samples.targets != IGNORE
        counts += np.bincount(samples.inputs[real] * symbols + samples.targets[real], minlength=symbols * symbols)
    return counts.reshape(symbols, symbols)
