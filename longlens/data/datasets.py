"""Splits, which give any of their samples as padded arrays, and batches of them in an order that a seed fixes.

torch is imported when the first batch is made, so that data can be prepared without it.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import numpy as np

from longlens.errors import BadInput
from longlens.options import Option, Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SplitName = Literal["train", "valid", "test"]
Metric = Literal["accuracy", "r2", "bits_per_byte", "perplexity"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
IGNORE = -100  # a target that does not count, as in torch's cross entropy
AT_ONCE = 256  # samples that are read together
POOL = 32  # batches whose samples are sorted together when grouping by length

Shape = int | tuple[int, ...]
Transform = Callable[[np.ndarray], np.ndarray]


class Stream:
    """Random numbers for a key, the same bytes on every machine: ``Stream("listops", seed, "train", block)``.

    numpy promises this of its raw bits, not of what is made from them, so everything here is made of raw bits and of
    the operations that IEEE 754 defines exactly: + − × ÷ √. Streams with different keys are independent, so that work
    can be cut into blocks and shared among processes without any effect on the result.
    """

    def __init__(self, *key: str | int):
        digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
        self._bits = np.random.Philox(key=int.from_bytes(digest, "little"))

    def raw(self, shape: Shape) -> np.ndarray:
        """64 random bits each, uint64."""
        return self._bits.random_raw(int(np.prod(shape))).reshape(shape)

    def uniform(self, shape: Shape) -> np.ndarray:
        """Real numbers in [0, 1), float64."""
        return (self.raw(shape) >> np.uint64(11)) * 2.0**-53

    def integers(self, high: int, shape: Shape) -> np.ndarray:
        """Whole numbers 0 … high − 1, int64. The bias is below high / 2³²."""
        return ((self.raw(shape) >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """0 … count − 1 in random order, int64."""
        return np.argsort(self.raw(count), kind="stable")


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
        return len(indices)


def as_tokens(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64)


def as_shades(pixels: np.ndarray) -> np.ndarray:
    """Bytes (B, L) to one channel (B, L, 1) from 0 to 1."""
    return (pixels.astype(np.float32) / np.float32(255))[..., None]


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """(N + 1,) where each of N sequences begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True)
class Sequences(Split):
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
        padded = np.zeros((len(rows), max(lengths, default=1), *self.values.shape[1:]), self.values.dtype)
        ends = self.end is not None
        for row, (start, length) in enumerate(zip(self.offsets[rows], lengths, strict=True)):
            padded[row, : length - ends] = self.values[start : start + length - ends]
            if ends:
                padded[row, length - 1] = self.end
        inputs = self.transform(padded)
        if self.pairs:
            inputs, lengths = inputs.reshape(len(indices), 2, *inputs.shape[1:]), lengths.reshape(-1, 2)
        return Samples(inputs, lengths, np.asarray(self.targets[indices]))

    def _lengths_of(self, rows: np.ndarray) -> np.ndarray:
        lengths = np.asarray(self.offsets[rows + 1] - self.offsets[rows], dtype=np.int64) + (self.end is not None)
        return lengths if self.max_length is None else np.minimum(lengths, self.max_length)


@dataclass(frozen=True)
class Images(Split):
    """Pictures of equal size as sequences of pixels, one row after another, or in the order of ``order``. With
    ``shrink``, squares of so many pixels a side become one, their mean."""

    values: np.ndarray  # (N, L) or (N, L, C)
    targets: np.ndarray  # (N,)
    transform: Transform
    order: np.ndarray | None = None  # (L,), or (L / shrink²,)
    shrink: int = 1  # for square pictures (N, L)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> np.ndarray:
        return np.full(len(self.values), self.values.shape[1] // self.shrink**2)

    def take(self, indices: np.ndarray) -> Samples:
        values = np.asarray(self.values[indices])
        if self.shrink > 1:
            size = math.isqrt(values.shape[1]) // self.shrink
            squares = values.reshape(len(values), size, self.shrink, size, self.shrink)
            values = squares.mean(axis=(2, 4), dtype=np.float32).reshape(len(values), size**2)
        values = values if self.order is None else values[:, self.order]
        lengths = np.full(len(indices), values.shape[1], dtype=np.int64)
        return Samples(self.transform(values), lengths, np.asarray(self.targets[indices], dtype=np.int64))


@dataclass(frozen=True)
class Windows(Split):
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
        lengths = self._lengths_of(indices)
        inputs = np.zeros((len(indices), lengths.max(initial=1)), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        for row, (start, length) in enumerate(zip(indices * self.max_length, lengths, strict=True)):
            inputs[row, :length] = self.tokens[start : start + length]
            targets[row, :length] = self.tokens[start + 1 : start + 1 + length]
        return Samples(inputs, lengths, targets)

    def count_targets(self, indices: np.ndarray) -> int:
        return int(self._lengths_of(indices).sum())

    def _lengths_of(self, indices: np.ndarray) -> np.ndarray:
        return np.minimum(self.max_length, len(self.tokens) - 1 - self.max_length * indices)


@dataclass(frozen=True)
class Subset(Split):
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


@dataclass(frozen=True)
class Joined(Split):
    """The samples of a split, and then those of another."""

    first: Split
    second: Split

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([self.first.lengths, self.second.lengths])

    def take(self, indices: np.ndarray) -> Samples:
        in_first = indices < len(self.first)
        parts = self.first.take(indices[in_first]), self.second.take(indices[~in_first] - len(self.first))
        joined = []
        for one, other, padding in zip(*parts, (0, 0, IGNORE), strict=True):
            array = np.full((len(indices), *np.maximum(one.shape[1:], other.shape[1:])), padding, one.dtype)
            for values, rows in ((one, in_first), (other, ~in_first)):
                array[(rows, *map(slice, values.shape[1:]))] = values
            joined.append(array)
        return Samples(*joined)

    def count_targets(self, indices: np.ndarray) -> int:
        in_first = indices < len(self.first)
        others = self.second.count_targets(indices[~in_first] - len(self.first))
        return self.first.count_targets(indices[in_first]) + others


@dataclass(frozen=True)
class Batch:
    """B samples, right-padded."""

    inputs: "Tensor"  # (B, L) int64 tokens or (B, L, C) float32; pairs: (B, 2, L)
    lengths: "Tensor"  # (B,) int64; pairs: (B, 2)
    targets: "Tensor"  # (B,) int64 classes, (B, L) int64 tokens or -100, (B,) or (B, M) float32 numbers
    indices: "Tensor"  # (B,) int64, which samples of the split these are
    total: int  # targets of this step in all processes: samples, or tokens of a language
    offset: int = 0  # samples of this step in processes of lower rank

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def mask(self) -> "Tensor":
        """(B, L) bool, True for tokens and False for padding; pairs: (B, 2, L)."""
        import torch

        length = self.inputs.shape[self.lengths.ndim]
        return torch.arange(length, device=self.lengths.device) < self.lengths.unsqueeze(-1)

    @property
    def is_padded(self) -> bool:
        return bool((self.lengths < self.inputs.shape[self.lengths.ndim]).any())

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    def to(self, device: "torch.device | str", *, non_blocking: bool = False) -> "Batch":
        """On a device; with ``non_blocking`` a pinned batch is copied while the device computes."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> "Batch":
        """In pinned memory, from which a GPU copies by itself."""
        return self._map(lambda tensor: tensor.pin_memory())

    def part(self, index: int, count: int) -> "Batch":
        """One of ``count`` micro-batches, which may be empty; ``total`` stays that of the whole step.

        Sample i of the step belongs to micro-batch i mod count, however many processes there are.
        """
        return self if count == 1 else self._map(lambda tensor: tensor[(index - self.offset) % count :: count])

    def padding_like(self) -> "Batch":
        """One sample that is all padding."""
        return self._map(lambda tensor: tensor.new_zeros((1, *tensor.shape[1:])))

    def _map(self, function: "Callable[[Tensor], Tensor]") -> "Batch":
        names = ("inputs", "lengths", "targets", "indices")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


@dataclass(eq=False)
class Batches:
    """The batches of one epoch, an iterable.

    Args:
        split: Samples of the split.
        batch_size: Samples of a step, in all processes together. The last batch may be smaller; none is dropped.
        shuffle: Use an order that ``seed`` and ``epoch`` fix, instead of the stored one.
        seed: Seed of the order.
        epoch: Number of the epoch.
        group_by_length: Put samples of similar length together, so that little is padding. Shuffled batches are drawn
            from pools of 32 batches; otherwise all samples are sorted by length.
        rank: This process. Each takes a run of every step's samples, so that all make the same number of steps. Where
            fewer samples than processes are left, some get an empty batch: average a loss as its sum over the batch,
            divided by ``batch.total``, and the sum over the processes is right.
        world_size: Number of processes.
        start: First batch; those before cost nothing.
    """

    split: Split
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    group_by_length: bool = False
    rank: int = 0
    world_size: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        Option("batch_size", Size).check(self.batch_size)
        if not 0 <= self.rank < self.world_size:
            raise BadInput(f"rank must be from 0 to world_size - 1 = {self.world_size - 1}, got {self.rank}")
        self.count = -(-len(self.split) // self.batch_size)
        if not 0 <= self.start <= self.count:
            raise BadInput(f"start must be from 0 to {self.count}, the batches of this epoch, got {self.start}")

    def __len__(self) -> int:
        return self.count - self.start

    def __iter__(self) -> Iterator[Batch]:
        import torch

        for step in self._steps()[self.start :]:
            # As np.array_split: the first processes get one more where they cannot get the same.
            each, more = divmod(len(step), self.world_size)
            offset = self.rank * each + min(self.rank, more)
            mine = step[offset : offset + each + (self.rank < more)]
            arrays = (torch.from_numpy(np.ascontiguousarray(array)) for array in self.split.take(mine))
            indices = torch.from_numpy(mine.copy())
            yield Batch(*arrays, indices=indices, total=self.split.count_targets(step), offset=offset)

    def _steps(self) -> list[np.ndarray]:
        """The samples of each step of the epoch."""
        stream = Stream("order", self.seed, self.epoch)
        order = stream.permutation(len(self.split)) if self.shuffle else np.arange(len(self.split))
        if self.group_by_length:
            lengths = self.split.lengths
            pool = POOL * self.batch_size if self.shuffle else max(len(order), 1)
            for first in range(0, len(order), pool):
                part = order[first : first + pool]
                order[first : first + pool] = part[np.argsort(lengths[part], kind="stable")]
        steps = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if self.group_by_length and self.shuffle:
            return [steps[i] for i in stream.permutation(len(steps))]
        return steps


def read_all(split: Split) -> Iterator[Samples]:
    """All samples of a split, some at a time."""
    for first in range(0, len(split), AT_ONCE):
        yield split.take(np.arange(first, min(first + AT_ONCE, len(split))))


def draw_samples(split: Split, count: int | None, key: str) -> Split:
    """So many samples of a split, the same ones whenever they are drawn for this key; None for all. Fewer are part of
    more."""
    if count is None or count >= len(split):
        return split
    return Subset(split, np.sort(Stream(key).permutation(len(split))[:count]))
