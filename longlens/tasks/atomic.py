"""Three atomic tasks on real numbers (Gupta et al. 2022b, section 3.1).

Values are normal, divided by the largest magnitude of their sequence; positions come along as a point on a circle.

- cumsum: y_i = (x_1 + … + x_i) / √i
- cummax: y_i = max(x_1, …, x_i)
- select: among the first L + M values, M marked ones at random places; then M empty slots, in which they are to be
  repeated in order.

New samples in each epoch of training; sample i of an epoch depends on nothing but the options, the epoch and i.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from longlens.data.datasets import SPLITS, Metric, Samples, Split, SplitName, Stream
from longlens.options import Seed
from longlens.tasks.base import Head, Length, Sizes, Spec, Task, register


@dataclass(frozen=True, kw_only=True)
class Atomic(Task):
    """An operation on a sequence of real numbers.

    Args:
        max_length: Numbers in a sequence.
        sizes: Samples of an epoch of training, of validation and of test.
        seed: Seed of the generated samples.
    """

    max_length: Length = 512
    sizes: Sizes = (16_000, 2_000, 2_000)
    seed: Seed = 0

    aliases: ClassVar[Mapping[str, str]] = {"length": "max_length"}
    origin: ClassVar[str] = "generated"
    head: ClassVar[Head] = "regress"
    metric: ClassVar[Metric] = "r2"

    @property
    def spec(self) -> Spec:
        return Spec("real", 3, self.max_length, self.head, 1, self.metric, positions=self.max_length)

    def load(self, name: SplitName, epoch: int) -> "AtomicSplit":
        return AtomicSplit(self, self.sizes[SPLITS.index(name)], (name, epoch if name == "train" else 0))

    def bits(self) -> int:
        """Random numbers that a sample is made of."""
        return self.max_length

    def sample(self, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (B, L, channels) and targets (B, positions) from random bits (B, n)."""
        values = _values(bits)
        return _with_positions(values), self.running(values)

    def running(self, values: np.ndarray) -> np.ndarray:
        """(B, L) to (B, L): a number for each number, of it and those before it."""
        raise NotImplementedError

    def render(self, samples: Samples, row: int) -> str:
        with np.printoptions(precision=3, suppress=True, threshold=20, edgeitems=8, linewidth=110):
            return f"values {samples.inputs[row, :, 0]}\ntarget {samples.targets[row]}"


@register("atomic-cumsum")
class CumSum(Atomic):
    summary: ClassVar[str] = "running sums of real numbers"

    def running(self, values: np.ndarray) -> np.ndarray:
        return np.cumsum(values, axis=1) / np.sqrt(np.arange(1, values.shape[1] + 1))


@register("atomic-cummax")
class CumMax(Atomic):
    summary: ClassVar[str] = "running maxima of real numbers"

    def running(self, values: np.ndarray) -> np.ndarray:
        return np.maximum.accumulate(values, axis=1)


@register("atomic-select")
@dataclass(frozen=True, kw_only=True)
class Select(Atomic):
    """Repeat the marked numbers of a sequence, in order.

    Args:
        max_length: Numbers that are not marked; a sequence has twice the marked ones besides.
        marked: Numbers that are marked.
    """

    marked: Length = 32

    summary: ClassVar[str] = "repeat the marked ones of many real numbers"

    @property
    def spec(self) -> Spec:
        return Spec("real", 4, self.max_length + 2 * self.marked, self.head, 1, self.metric, positions=self.marked)

    def bits(self) -> int:
        return 2 * (self.max_length + self.marked)

    def sample(self, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for_values, for_places = np.split(bits, 2, axis=1)
        places = np.sort(np.argsort(for_places, axis=1, kind="stable")[:, : self.marked], axis=1)
        values = np.pad(_values(for_values), ((0, 0), (0, self.marked)))
        mark = np.zeros_like(values)
        np.put_along_axis(mark, places, 1, axis=1)
        return _with_positions(values, mark), np.take_along_axis(values, places, axis=1)


@dataclass(frozen=True)
class AtomicSplit(Split):
    """Samples that are made when they are taken."""

    task: Atomic
    size: int
    key: tuple[str, int]

    def __len__(self) -> int:
        return self.size

    @property
    def lengths(self) -> np.ndarray:
        return np.full(self.size, self.task.spec.max_length)

    def take(self, indices: np.ndarray) -> Samples:
        count = self.task.bits()
        streams = (Stream("atomic", self.task.seed, *self.key, index) for index in indices.tolist())
        bits = np.stack([stream.raw(count) for stream in streams]) if len(indices) else np.empty((0, count), np.uint64)
        inputs, targets = self.task.sample(bits)
        lengths = np.full(len(indices), inputs.shape[1], dtype=np.int64)
        return Samples(inputs.astype(np.float32), lengths, targets.astype(np.float32))


def _values(bits: np.ndarray) -> np.ndarray:
    """(B, L) normal numbers, divided by the largest magnitude of their row."""
    values = normal_of_bits(bits)
    return values / np.abs(values).max(axis=1, keepdims=True)


def _with_positions(*channels: np.ndarray) -> np.ndarray:
    """(B, L) channels and the positions on a circle: (B, L, C + 2)."""
    count, length = channels[0].shape
    angle = 2 * np.pi * np.arange(length) / length
    # Rounded, as the last bit of a cosine is not the same on all machines.
    circle = (np.broadcast_to(np.round(wave, 9), (count, length)) for wave in (np.cos(angle), np.sin(angle)))
    return np.stack([*channels, *circle], axis=2)


def normal_of_bits(bits: np.ndarray) -> np.ndarray:
    """Standard normal numbers from 64 random bits each: Φ⁻¹ of the uniform number in the middle of its cell.

    Φ⁻¹ is Acklam's rational approximation, relative error 1.2e-9: one function of p − ½ in the middle, one of
    √(−2 log p) in the tails.
    """
    p = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52  # never 0, never 1
    q = p - 0.5
    r = q * q
    result = q * np.polyval(_MIDDLE, r) / np.polyval(_MIDDLE_BELOW, r)
    for tail, sign in ((p < _TAIL, 1.0), (p > 1 - _TAIL, -1.0)):
        t = np.sqrt(-2 * _log(p[tail] if sign > 0 else 1 - p[tail]))
        result[tail] = sign * np.polyval(_TAILS, t) / np.polyval(_TAILS_BELOW, t)
    return result


_TAIL = 0.02425
_MIDDLE = (-3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02, 1.383577518672690e02,
           -3.066479806614716e01, 2.506628277459239e00)  # fmt: skip
_MIDDLE_BELOW = (-5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01,
                 -1.328068155288572e01, 1.0)  # fmt: skip
_TAILS = (-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00, -2.549732539343734e00,
          4.374664141464968e00, 2.938163982698783e00)  # fmt: skip
_TAILS_BELOW = (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0)


def _log(x: np.ndarray) -> np.ndarray:
    """The logarithm of positive numbers in exact operations: x = m·2ᵉ, log m = 2·artanh((m − 1) / (m + 1))."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, 2 * mantissa, mantissa)  # in [√½, √2), so |s| < 0.172
    exponent = exponent - small
    s = (mantissa - 1) / (mantissa + 1)
    series = np.polyval([1.0 / power for power in range(23, 0, -2)], s * s)
    return exponent * 0.6931471805599453 + 2 * s * series
