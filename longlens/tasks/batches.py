"""Batches of a split: in any order that a seed and an epoch fix, from any batch on, for any number of processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from longlens.tasks.datasets import Split
from longlens.tasks.stream import Stream

POOL = 32  # batches whose samples are sorted together when grouping by length


@dataclass(frozen=True)
class Batch:
    """B samples, right-padded."""

    inputs: Tensor  # (B, L) int64 tokens or (B, L, C) float32; pairs: (B, 2, L)
    lengths: Tensor  # (B,) int64; pairs: (B, 2)
    targets: Tensor  # (B,) int64 classes, (B, L) int64 tokens or -100, (B,) or (B, M) float32 numbers
    indices: Tensor  # (B,) int64, which samples of the split these are
    total: int  # targets of this step in all processes: samples, or tokens of a language

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def mask(self) -> Tensor:
        """(B, L) bool, True for tokens and False for padding; pairs: (B, 2, L)."""
        length = self.inputs.shape[self.lengths.ndim]
        return torch.arange(length, device=self.lengths.device) < self.lengths.unsqueeze(-1)

    @property
    def is_padded(self) -> bool:
        return bool((self.lengths < self.inputs.shape[self.lengths.ndim]).any())

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def part(self, index: int, count: int) -> "Batch":
        """One of ``count`` parts, which may be empty; ``total`` stays that of the whole."""
        return self if count == 1 else self._map(lambda tensor: tensor[index::count])

    def nothing(self) -> "Batch":
        """One sample that is all padding."""
        return self._map(lambda tensor: tensor.new_zeros((1, *tensor.shape[1:])))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "total"}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items()})


class Batches:
    """The batches of one epoch, an iterable.

    Args:
        split: the samples.
        batch_size: samples a step, in all processes together. The last batch may be smaller; none is dropped.
        shuffle: in an order that ``seed`` and ``epoch`` fix, instead of the stored one.
        group_by_length: put samples of similar length together, so that little is padding. Shuffled batches are drawn
            from pools of 32 batches; otherwise all samples are sorted by length.
        rank, world_size: this process and how many there are. Each step's samples are dealt out in turn, so that every
            process makes the same number of steps and every sample belongs to one process. Where fewer samples than
            processes are left, some get an empty batch: average a loss as its sum over the batch, divided by
            ``batch.total``, and the sum over the processes is right.
        start: begin at this batch; those before cost nothing.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        group_by_length: bool = False,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} processes: ranks go from 0 to world_size - 1")
        count = -(-len(split) // batch_size)
        if not 0 <= start <= count:
            raise ValueError(f"start is {start}, but this epoch has {count} batches")
        self.split, self.batch_size, self.count, self.start = split, batch_size, count, start
        self.shuffle, self.seed, self.epoch, self.group_by_length = shuffle, seed, epoch, group_by_length
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return self.count - self.start

    def __iter__(self) -> Iterator[Batch]:
        steps = self._steps()
        for step in steps[self.start :]:
            mine = step[self.rank :: self.world_size]
            samples = self.split.take(mine)
            arrays = (torch.from_numpy(np.ascontiguousarray(array)) for array in samples)
            total = self.split.count_targets(step)
            yield Batch(*arrays, indices=torch.from_numpy(mine.copy()), total=total)

    def _steps(self) -> list[np.ndarray]:
        """The samples of each step of the epoch."""
        stream = Stream("order", self.seed, self.epoch)
        order = stream.permutation(len(self.split)) if self.shuffle else np.arange(len(self.split))
        if not self.group_by_length:
            return self._cut(order)
        lengths = self.split.lengths
        pool = POOL * self.batch_size if self.shuffle else len(order)
        for first in range(0, len(order), max(pool, 1)):
            part = order[first : first + pool]
            order[first : first + pool] = part[np.argsort(lengths[part], kind="stable")]
        steps = self._cut(order)
        return [steps[i] for i in stream.permutation(len(steps))] if self.shuffle else steps

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
