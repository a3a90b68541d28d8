"""From the vectors of all tokens to the answer of a task: one head for each kind."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.data.datasets import IGNORE, Metric
from longlens.ops.precision import at_least_float32
from longlens.tasks.base import Spec


def pool(x: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """(B, L, D) -> (B, D): the mean of the tokens, or the last token."""
    if how == "mean":
        if mask is None:
            return x.mean(dim=1)
        weights = mask.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    return _last(x, mask, 1).squeeze(1)


def _last(x: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """(B, L, D) -> (B, count, D): the last tokens before the padding."""
    if mask is None:
        return x[:, -count:]
    first = mask.sum(dim=1) - count  # (B,)
    places = (first[:, None] + torch.arange(count, device=x.device)).clamp(min=0)
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class Classify(nn.Module):
    """(B, L, D) -> (B, classes)."""

    def __init__(self, spec: Spec, width: int, pooling: str):
        super().__init__()
        self.pooling = pooling
        self.linear = nn.Linear(width, spec.outputs)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.linear(pool(x, mask, self.pooling))


class Match(nn.Module):
    """Pairs, one after the other, (2B, L, D) -> (B, classes): an MLP on [x1, x2, x1 - x2, x1·x2], as LRA and S4."""

    def __init__(self, spec: Spec, width: int, pooling: str):
        super().__init__()
        self.pooling = pooling
        self.mlp = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, spec.outputs))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        first, second = pool(x, mask, self.pooling).unflatten(0, (-1, 2)).unbind(dim=1)
        return self.mlp(torch.cat([first, second, first - second, first * second], dim=-1))


class Regress(nn.Module):
    """(B, L, D) -> (B, M) numbers at the last M tokens, or (B,) one for the sequence."""

    def __init__(self, spec: Spec, width: int, pooling: str):
        super().__init__()
        self.pooling = pooling
        self.positions = spec.positions
        self.linear = nn.Linear(width, 1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = pool(x, mask, self.pooling) if self.positions is None else _last(x, mask, self.positions)
        return self.linear(x).squeeze(-1)


class Language(nn.Module):
    """(B, L, D) -> (B, L, vocabulary), with weights of its own or those of the embedding.

    The latter's logits are divided by √D, as in T5: a model would start sure that each token follows itself otherwise.
    """

    def __init__(self, spec: Spec, width: int, embedding: nn.Embedding | nn.Linear | None):
        super().__init__()
        self.linear = nn.Linear(width, spec.outputs, bias=False)
        self.scale = 1.0 if embedding is None else width**-0.5
        if embedding is not None:
            self.linear.weight = embedding.weight

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.linear(x if self.scale == 1 else x * self.scale)


def loss_sum(spec: Spec, outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of all targets: divided by ``batch.total``, it is the loss of a step."""
    outputs = at_least_float32(outputs)
    if spec.head == "regress":  # a sample counts once, however many numbers it has
        return (outputs - targets).square().unsqueeze(-1).flatten(1).mean(dim=1).sum()
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


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
