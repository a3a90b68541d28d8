"""The model that every language model must beat: each token from the one before it, by counting."""

import numpy as np

from longlens.tasks.base import SplitName, Task
from longlens.tasks.datasets import IGNORE, Split

LARGEST = 1024  # symbols of a vocabulary whose pairs are counted
AT_ONCE = 256  # samples


def bigram_bits(task: Task, split: SplitName) -> float | None:
    """Bits for each token of a split, by the counts of pairs in the training set plus one.

    None where there are too many symbols to count their pairs.
    """
    size = task.spec.outputs
    if size > LARGEST:
        return None
    counts = _pairs(task.split("train"), size) + 1.0
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    seen = _pairs(task.split(split), size)
    return float((seen * bits).sum() / seen.sum())


def _pairs(split: Split, size: int) -> np.ndarray:
    """(size, size): how often each token follows each other."""
    counts = np.zeros(size * size, dtype=np.int64)
    for first in range(0, len(split), AT_ONCE):
        samples = split.take(np.arange(first, min(first + AT_ONCE, len(split))))
        real = samples.targets != IGNORE
        counts += np.bincount(samples.inputs[real] * size + samples.targets[real], minlength=size * size)
    return counts.reshape(size, size)
