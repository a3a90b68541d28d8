"""The four metrics, as sums that can be added up over batches and processes before the value is taken."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.data.datasets import IGNORE, Metric


class _Definition(NamedTuple):
    sums: Callable[[Tensor, Tensor, torch.dtype], list[Tensor]]
    value: Callable[..., float]
    higher_is_better: bool


def metric_sums(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """Sums over a batch; those of several batches or processes can be added.

    Args:
        metric: accuracy, r2, bits_per_byte or perplexity.
        outputs: (B, classes) for accuracy, (B, L, vocabulary) for languages, numbers like the targets for r2.
        targets: as in a Batch.
    """
    wide = torch.float32 if outputs.device.type == "mps" else torch.float64  # which that device has not
    return torch.stack([part.to(wide) for part in _METRICS[metric].sums(outputs, targets, wide)])


def metric_value(metric: Metric, sums: Tensor) -> float:
    """The metric of all samples whose sums were added up."""
    return _METRICS[metric].value(*sums.tolist())


def higher_is_better(metric: Metric) -> bool:
    return _METRICS[metric].higher_is_better


def _hits(outputs: Tensor, targets: Tensor, wide: torch.dtype) -> list[Tensor]:
    """A row that is not finite is no hit, whatever its largest entry."""
    hits = ((outputs.argmax(dim=-1) == targets) & outputs.isfinite().all(dim=-1)).sum()
    return [hits, torch.full_like(hits, targets.numel())]


def _errors(outputs: Tensor, targets: Tensor, wide: torch.dtype) -> list[Tensor]:
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs are {tuple(outputs.shape)}, targets {tuple(targets.shape)}; they must be alike")
    outputs, targets = outputs.to(wide), targets.to(wide)
    return [(outputs - targets).square().sum(), targets.sum(), targets.square().sum(), torch.ones_like(targets).sum()]


def _r2(errors: float, total: float, squares: float, count: float) -> float:
    """1 − MSE / variance."""
    spread = squares - total * _ratio(total, count)
    return 1 - errors / spread if spread > 0 else math.nan


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


def _surprise(outputs: Tensor, targets: Tensor, wide: torch.dtype) -> list[Tensor]:
    losses = F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return [losses.sum(dtype=wide), (targets != IGNORE).sum()]


_METRICS: dict[Metric, _Definition] = {
    "accuracy": _Definition(_hits, lambda hits, count: _ratio(hits, count), True),
    "r2": _Definition(_errors, _r2, True),
    "bits_per_byte": _Definition(_surprise, lambda loss, count: _ratio(loss, count) / math.log(2), False),
    "perplexity": _Definition(_surprise, lambda loss, count: math.exp(min(_ratio(loss, count), 700)), False),
}
