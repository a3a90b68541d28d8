"""Batches of a split: in any order that a seed and an epoch fix, from any batch on, for any number of processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from longlens.data.datasets import Split
from longlens.data.stream import Stream
from longlens.errors import BadInput
from longlens.options import Option, Size

POOL = 32  # batches whose samples are sorted together when grouping by length


@dataclass(frozen=True)
class Batch:
    """B samples, right-padded."""

    inputs: Tensor  # (B, L) int64 tokens or (B, L, C) float32; pairs: (B, 2, L)
    lengths: Tensor  # (B,) int64; pairs: (B, 2)
    targets: Tensor  # (B,) int64 classes, (B, L) int64 tokens or -100, (B,) or (B, M) float32 numbers
    indices: Tensor  # (B,) int64, which samples of the split these are
    total: int  # targets of this step in all processes: samples, or tokens of a language
    offset: int = 0  # samples of this step in processes of lower rank

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

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(value) for name, value in values.items() if isinstance(value, Tensor)})


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
        rank: This process. Each takes a run of every step's samples, so that all make the same number of steps and
            every sample belongs to one of them. Where fewer samples than processes are left, some get an empty batch:
            average a loss as its sum over the batch, divided by ``batch.total``, and the sum over the processes is
            right.
        world_size: Number of processes.
        start: First batch; those before cost nothing.
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
        Option("batch_size", Size).check(batch_size)
        if not 0 <= rank < world_size:
            raise BadInput(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        count = -(-len(split) // batch_size)
        if not 0 <= start <= count:
            raise BadInput(f"start must be from 0 to {count}, the batches of this epoch, got {start}")
        self.split = split
        self.batch_size = batch_size
        self.count = count
        self.start = start
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = epoch
        self.group_by_length = group_by_length
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return self.count - self.start

    def __iter__(self) -> Iterator[Batch]:
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
