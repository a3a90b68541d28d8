"""Hyena (Poli et al. 2023, "Hyena Hierarchy: Towards Larger Convolutional Language Models"): long convolutions of
implicit filters between gates. For order 2, with projections q, k, v (B, L, D) that pass a short causal convolution:

    y = out(q ⊙ (h * (k ⊙ v) + skip ⊙ (k ⊙ v))),   h_c(t) = MLP([t/T, cos(2πft/T), -sin(2πft/T), …])_c · exp(-r_c·t/T)

A higher order repeats it, v ← h * (x ⊙ v) + skip ⊙ (x ⊙ v), with a projection x and filters h (D, L) of its own each
time. T is the longest length, so that a filter is the same for all; the MLP has sine activations of learned frequency.
The features of the positions up to T are learned from there, but not the t/T of the window.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import check_inputs, check_order, hide_padding
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.checks import no_autocast, working_dtype
from longlens.ops.long_conv import long_conv
from longlens.options import Positive, Several, Size


@no_autocast  # in bfloat16 neighboring positions would be the same
def implicit_filters(
    parameters: Sequence[Tensor],
    frequency: Tensor,
    features: Tensor,
    time: Tensor,
    rates: Tensor,
    shift: float = 0.0,
) -> Tensor:
    """Features of the positions (L, F) -> filters (C, L), by linear layers (weight, bias, weight, bias, …, weight) with
    sin(frequency ⊙ ·) between them, in windows exp(-r·t/T) + shift of times t/T (L,) and rates r (C,)."""
    window = torch.exp(-rates[:, None] * time) + shift
    *hidden, last = (parameter.to(features.dtype) for parameter in parameters)
    for weight, bias in zip(hidden[::2], hidden[1::2], strict=True):
        features = torch.sin(frequency.to(features.dtype) * F.linear(features, weight, bias))
    return last @ features.T * window


# The layers of the filter are named by their places in a Sequential: other names would not fit older checkpoints.
_FILTER = (
    *(f"filter.{place}.{kind}" for place in range(3) for kind in ("weight", "bias")),
    *("filter.3.weight", "frequency"),
)


@register(
    "hyena",
    "gated long convolutions of implicit filters",
    Traits(decays=True, gated=True, cost="L log L"),
    size_note="it learns the features of each position up to the longest sequence",
)
class Hyena(nn.Module):
    """Long convolutions of implicit filters between gates. (B, L, D) -> (B, L, D), causal, without a recurrence.
    Defaults as in the authors' language model on the Pile, except ``filter_width``, which is 64 there.

    Args:
        order: Order of the operator: it has order + 1 projections and order - 1 long convolutions.
        filter_width: Hidden width of the network whose outputs are the filters.
        bands: Number of waves among the features of a position, each as cosine and sine.
        learn_features: Learn the features of each position, from the waves on.
        frequency: Initial frequency of the sine activations.
        fast_decay: Fraction of ``max_length`` in which the fastest window falls to 1 %.
        slow_decay: Fraction of ``max_length`` in which the slowest window falls to 1 %; rates are evenly spaced.
        shift: Value to which windows fall, instead of 0.
        max_length: Length T, in units of which filters are functions of the position. A longer sequence continues them.
    """

    no_decay: ClassVar[tuple[str, ...]] = ("skip",)

    def __init__(
        self,
        d_model: Size,
        *,
        order: Several = 2,
        filter_width: Size = 32,
        bands: Size = 16,
        learn_features: bool = True,
        frequency: Positive = 14.0,
        fast_decay: Positive = 0.3,
        slow_decay: Positive = 1.5,
        shift: float = 0.0,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_order(fast_decay=fast_decay, slow_decay=slow_decay)
        self.d_model, self.order = d_model, order
        self.bands, self.first_frequency = bands, frequency
        self.fast_decay, self.slow_decay = fast_decay, slow_decay
        self.shift, self.max_length = shift, max_length
        width = (order + 1) * d_model
        self.in_proj = nn.Linear(d_model, width, **factory)
        # As if of a picture with one row, which torch convolves in the order (B, L, D) in which it already is.
        self.short = nn.Conv2d(width, width, (1, 3), groups=width, **factory)
        widths = (1 + 2 * bands, filter_width, filter_width, filter_width)
        layers = [nn.Linear(before, after, **factory) for before, after in pairwise(widths)]
        self.filter = nn.Sequential(*layers, nn.Linear(filter_width, (order - 1) * d_model, bias=False, **factory))
        self.frequency = nn.Parameter(torch.empty(filter_width, **factory))
        self.features = nn.Parameter(torch.empty(max_length, 1 + 2 * bands, **factory)) if learn_features else None
        self.kernel_parameters: tuple[str, ...] = (*_FILTER, *("features",) * learn_features)
        self.groups: dict[str, tuple[str, ...]] = {"filter": _FILTER, "positions": ("features",) * learn_features}
        self.skip = nn.Parameter(torch.empty(order - 1, d_model, **factory))
        self.out_proj = nn.Linear(d_model, d_model, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
        nn.init.constant_(self.frequency, self.first_frequency)
        nn.init.normal_(self.skip)
        if self.features is not None:
            with torch.no_grad():
                self.features.copy_(self.waves(self.max_length))

    def waves(self, length: int) -> Tensor:
        """The features of the positions (length, 1 + 2·bands), as they are at the start and past T."""
        factory = {"device": self.frequency.device, "dtype": working_dtype(self.frequency.dtype)}
        time = torch.arange(length, **factory)[:, None]
        angle = (2 * math.pi / self.max_length) * time * torch.linspace(1e-4, self.bands - 1, self.bands, **factory)
        return torch.cat([time / max(self.max_length - 1, 1), angle.cos(), -angle.sin()], dim=-1)

    def kernel(self, length: int) -> Tensor:
        """((order - 1)·D, length): the filters of the first convolution, then those of the next."""
        features = self.waves(length)
        time, factory = features[:, 0], {"device": features.device, "dtype": features.dtype}
        if self.features is not None:
            features = torch.cat([self.features[:length].to(features.dtype), features[self.max_length :]])
        slow, fast = math.log(100) / self.slow_decay, math.log(100) / self.fast_decay
        rates = torch.linspace(slow, fast, (self.order - 1) * self.d_model, **factory)
        rates = rates.unflatten(0, (self.d_model, -1)).T.flatten()  # each convolution has slow and fast ones
        return implicit_filters(list(self.filter.parameters()), self.frequency, features, time, rates, self.shift)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        check_inputs(x, mask, self.d_model)
        if x.shape[1] == 0:  # the short convolution refuses it
            return self.out_proj(x)
        x = hide_padding(x, mask)
        projected = F.pad(hide_padding(self.in_proj(x), mask), (0, 0, 2, 0))
        projected = self.short(projected.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2)
        query, *gates, value = projected.chunk(self.order + 1, dim=-1)
        kernels = self.kernel(x.shape[1]).chunk(self.order - 1)
        for gate, kernel, skip in zip(reversed(gates), kernels, self.skip, strict=True):
            value = hide_padding(gate * value, mask)
            value = long_conv(value, kernel) + skip * value
        return self.out_proj(query * value)


def hyena_filters_reference(layer: Hyena, length: int) -> Tensor:
    """((order - 1)·D, length), position by position from the formula above."""
    *hidden, last = layer.filter.parameters()
    period, convolutions, dtype = layer.max_length, layer.order - 1, last.dtype
    turns = [1e-4 + band * (layer.bands - 1 - 1e-4) / max(layer.bands - 1, 1) for band in range(layer.bands)]
    # Rates are evenly spaced over all filters, and the filters of one channel are neighbors.
    slow, fast = math.log(100) / layer.slow_decay, math.log(100) / layer.fast_decay
    places = [c * convolutions + n for n in range(convolutions) for c in range(layer.d_model)]
    rates = torch.tensor([slow + place * (fast - slow) / max(len(places) - 1, 1) for place in places], dtype=dtype)
    columns = []
    for t in range(length):
        waves = [2 * math.pi * turn * t / period for turn in turns]
        time = t / max(period - 1, 1)
        h = torch.tensor([time, *map(math.cos, waves), *(-math.sin(wave) for wave in waves)], dtype=dtype)
        if layer.features is not None and t < period:
            h = layer.features[t]
        for weight, bias in zip(hidden[::2], hidden[1::2], strict=True):
            h = torch.sin(layer.frequency * (weight @ h + bias))
        columns.append(last @ h * (torch.exp(-rates * time) + layer.shift))
    return torch.stack(columns, dim=-1)


def hyena_projections_reference(layer: Hyena, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """order + 1 of (B, L, D): each number from the projections of its own step and of two before it."""
    weight, bias = layer.short.parameters()  # (channels, 1, 1, 3) and (channels,)
    projected = F.pad(layer.in_proj(x) * mask[..., None], (0, 0, 2, 0))
    short = bias + sum(weight[:, 0, 0, n] * projected[:, n : n + x.shape[1]] for n in range(3))
    return short.chunk(layer.order + 1, dim=-1)


def hyena_reference(layer: Hyena, x: Tensor, mask: Tensor) -> Tensor:
    """y = out(H·v), with one matrix H = diag(q)·T₂·diag(x₁)·T₁·diag(x₂) for each sequence and channel, which the inputs
    decide. Each T is the Toeplitz matrix of a filter, plus skip on the diagonal, without the columns of padding."""
    length = x.shape[1]
    query, *gates, value = (part.transpose(1, 2) for part in hyena_projections_reference(layer, x, mask))  # (B, D, L)
    lag = torch.arange(length)[:, None] - torch.arange(length)
    matrix = torch.eye(length, dtype=x.dtype)
    filters = hyena_filters_reference(layer, length).chunk(layer.order - 1)
    for gate, kernel, skip in zip(reversed(gates), filters, layer.skip, strict=True):
        toeplitz = torch.where(lag >= 0, kernel[:, lag.clamp(min=0)], 0) + torch.where(lag == 0, skip[:, None, None], 0)
        matrix = toeplitz * mask[:, None, None] @ (gate[..., None] * matrix)  # (B, D, L, L)
    y = query * (matrix @ value[..., None]).squeeze(-1)
    return layer.out_proj(y.transpose(1, 2))
