"""Splits in memory or memory-mapped, which give any of their samples as padded arrays. numpy only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np

SplitName = Literal["train", "valid", "test"]
Metric = Literal["accuracy", "r2", "bits_per_byte", "perplexity"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
IGNORE = -100  # a target that does not count, as in torch's cross entropy

Transform = Callable[[np.ndarray], np.ndarray]


class Samples(NamedTuple):
    """B samples, right-padded with zeros."""

    inputs: np.ndarray  # (B, L) int64 tokens or (B, L, C) float32; pairs: (B, 2, L)
    lengths: np.ndarray  # (B,) int64; pairs: (B, 2)
    targets: np.ndarray  # (B,) int64 classes, (B, L) int64 tokens, (B,) or (B, M) float32 numbers


class Split(Protocol):
    """What a task has of each of train, valid and test."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """(N,) the length of each sample, to group similar ones."""
        ...

    def take(self, indices: np.ndarray) -> Samples: ...

    def count_targets(self, indices: np.ndarray) -> int:
        """How many predictions these samples ask for: what a loss is averaged over."""
        ...


def as_tokens(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64)


def as_shades(pixels: np.ndarray) -> np.ndarray:
    """Bytes (B, L) to one channel (B, L, 1) from 0 to 1."""
    return (pixels.astype(np.float32) / np.float32(255))[..., None]


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """(N + 1,) where each of N sequences begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True)
class Sequences:
    """Sequences stored one after another: sample i is ``values[offsets[i] : offsets[i + 1]]``.

    ``transform`` turns stored values (bytes, say) into inputs, after padding. Longer sequences are cut to
    ``max_length``, and then get ``end`` as their last value, if there is one.
    """

    values: np.ndarray  # (total, …)
    offsets: np.ndarray  # (N + 1,)
    targets: np.ndarray  # (N, …)
    transform: Transform = as_tokens
    max_length: int | None = None
    end: int | None = None
    pairs: bool = False  # samples 2i and 2i + 1 belong together, and ``targets`` has one entry for both

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> np.ndarray:
        each = self._lengths_of(np.arange(len(self.offsets) - 1))
        return each.reshape(-1, 2).max(axis=1) if self.pairs else each

    def take(self, indices: np.ndarray) -> Samples:
        rows = (2 * indices[:, None] + np.arange(2)).ravel() if self.pairs else indices
        lengths = self._lengths_of(rows)
        starts = np.asarray(self.offsets[rows])
        padded = np.zeros((len(rows), max(lengths, default=1), *self.values.shape[1:]), self.values.dtype)
        ended = 0 if self.end is None else 1
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            padded[row, : length - ended] = self.values[start : start + length - ended]
            if self.end is not None:
                padded[row, length - 1] = self.end
        inputs = self.transform(padded)
        if self.pairs:
            inputs, lengths = inputs.reshape(len(indices), 2, *inputs.shape[1:]), lengths.reshape(-1, 2)
        return Samples(inputs, lengths, np.asarray(self.targets[indices]))

    def count_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    def _lengths_of(self, rows: np.ndarray) -> np.ndarray:
        lengths = np.asarray(self.offsets[rows + 1] - self.offsets[rows], dtype=np.int64)
        lengths += 0 if self.end is None else 1
        return lengths if self.max_length is None else np.minimum(lengths, self.max_length)


@dataclass(frozen=True)
class Images:
    """Pictures of equal size as sequences of pixels, one row after another, or in the order of ``order``."""

    values: np.ndarray  # (N, L) or (N, L, C)
    targets: np.ndarray  # (N,)
    transform: Transform
    order: np.ndarray | None = None  # (L,)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> np.ndarray:
        return np.full(len(self), self.values.shape[1])

    def take(self, indices: np.ndarray) -> Samples:
        values = np.asarray(self.values[indices])
        values = values if self.order is None else values[:, self.order]
        inputs = self.transform(values)
        lengths = np.full(len(indices), values.shape[1], dtype=np.int64)
        return Samples(inputs, lengths, np.asarray(self.targets[indices], dtype=np.int64))

    def count_targets(self, indices: np.ndarray) -> int:
        return len(indices)


@dataclass(frozen=True)
class Windows:
    """A text cut into windows of L = ``max_length`` tokens: sample i predicts tokens i·L + 1 … (i + 1)·L.

    Each token but the first is predicted once; the last window may be short.
    """

    tokens: np.ndarray  # (total,)
    max_length: int

    def __len__(self) -> int:
        return -(-max(len(self.tokens) - 1, 0) // self.max_length)

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths_of(np.arange(len(self)))

    def take(self, indices: np.ndarray) -> Samples:
        windows = [self.tokens[i * self.max_length : (i + 1) * self.max_length + 1] for i in indices.tolist()]
        lengths = np.array([len(window) - 1 for window in windows], dtype=np.int64)
        inputs = np.zeros((len(windows), lengths.max(initial=1)), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        for row, window in enumerate(windows):
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        return Samples(inputs, lengths, targets)

    def count_targets(self, indices: np.ndarray) -> int:
        return int(self._lengths_of(indices).sum())

    def _lengths_of(self, indices: np.ndarray) -> np.ndarray:
        return np.minimum(self.max_length, len(self.tokens) - 1 - self.max_length * indices)


@dataclass(frozen=True)
class Subset:
    """Some samples of a split."""

    whole: Split
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def lengths(self) -> np.ndarray:
        return self.whole.lengths[self.indices]

    def take(self, indices: np.ndarray) -> Samples:
        return self.whole.take(self.indices[indices])

    def count_targets(self, indices: np.ndarray) -> int:
        return self.whole.count_targets(self.indices[indices])
