"""Hyena (Poli et al. 2023, "Hyena Hierarchy: Towards Larger Convolutional Language Models"): long convolutions of
implicit filters between gates. For order 2, with projections q, k, v (B, L, D) that pass a short causal convolution:

    y = out(q ⊙ (h * (k ⊙ v) + skip ⊙ (k ⊙ v))),   h_c(t) = MLP([t/T, cos(2πft/T), -sin(2πft/T), …])_c · exp(-r_c·t/T)

A higher order repeats it, v ← h * (x ⊙ v) + skip ⊙ (x ⊙ v), with a projection x and filters h (D, L) of its own each
time. T is the longest length, so that a filter is the same for all; the MLP has sine activations of learned frequency.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import check_inputs, hide_padding
from longlens.ops.long_conv import long_conv


def position_features(time: Tensor, bands: int, period: int) -> Tensor:
    """(L,) -> (L, 1 + 2·bands): how much of the period has passed, and waves of 0 to bands - 1 turns in it."""
    turns = torch.linspace(1e-4, bands - 1, bands, device=time.device, dtype=time.dtype)
    angle = (2 * math.pi / period) * time[:, None] * turns
    return torch.cat([time[:, None] / max(period - 1, 1), angle.cos(), -angle.sin()], dim=-1)


def implicit_filters(
    parameters: Sequence[Tensor], frequency: Tensor, features: Tensor, rates: Tensor, shift: float = 0.0
) -> Tensor:
    """Features (L, F) of the positions -> filters (C, L), by linear layers with sin(frequency ⊙ ·) between them, whose
    ``parameters`` are weight, bias, weight, bias, …, weight; in windows that fall with the rates r (C,), to the shift.
    """
    window = torch.exp(-rates[:, None] * features[:, 0]) + shift
    *hidden, last = (parameter.to(features.dtype) for parameter in parameters)
    # Not in bfloat16, in which neighboring positions are the same.
    with torch.autocast(features.device.type, enabled=False):
        for weight, bias in zip(hidden[::2], hidden[1::2], strict=True):
            features = torch.sin(frequency.to(features.dtype) * F.linear(features, weight, bias))
        return last @ features.T * window


class Hyena(nn.Module):
    """The Hyena operator. It is causal, and has no exact recurrence.

    Args:
        d_model: D.
        order: at least 2, for order + 1 projections and order - 1 long convolutions.
        filter_width: hidden width of the MLP.
        bands: waves in the features of a position, each as cosine and sine.
        frequency: of the sine activations, at first.
        fast_decay: the share of ``max_length`` in which the fastest window falls to 1 %.
        slow_decay: the same of the slowest; the others' rates are evenly spaced.
        shift: what a window falls to instead of 0.
        max_length: T. A longer sequence continues the filters.
    """

    special_parameters: ClassVar[tuple[str, ...]] = (
        "filter.0.weight", "filter.0.bias", "filter.1.weight", "filter.1.bias", "filter.2.weight", "filter.2.bias",
        "filter.3.weight", "frequency",
    )  # fmt: skip

    def __init__(
        self,
        d_model: int,
        *,
        order: int = 2,
        filter_width: int = 32,
        bands: int = 16,
        frequency: float = 14.0,
        fast_decay: float = 0.3,
        slow_decay: float = 1.5,
        shift: float = 0.0,
        max_length: int = MAX_LENGTH,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        least = {"d_model": (d_model, 1), "order": (order, 2), "filter_width": (filter_width, 1)}
        least |= {"bands": (bands, 1), "max_length": (max_length, 1)}
        for name, (value, smallest) in least.items():
            if value < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}")
        if not 0 < fast_decay <= slow_decay:
            raise ValueError(
                f"fast_decay must be above 0 and at most slow_decay, got fast_decay={fast_decay} and "
                f"slow_decay={slow_decay}"
            )
        self.d_model, self.order, self.bands, self.max_length = d_model, order, bands, max_length
        self.first_frequency, self.fast_decay, self.slow_decay, self.shift = frequency, fast_decay, slow_decay, shift
        factory = {"device": device, "dtype": dtype}
        width = (order + 1) * d_model
        self.in_proj = nn.Linear(d_model, width, **factory)
        # As if of a picture with one row, which torch convolves in the order (B, L, D) in which it already is.
        self.short = nn.Conv2d(width, width, (1, 3), groups=width, **factory)
        widths = (1 + 2 * bands, filter_width, filter_width, filter_width)
        layers = [nn.Linear(before, after, **factory) for before, after in pairwise(widths)]
        self.filter = nn.Sequential(*layers, nn.Linear(filter_width, (order - 1) * d_model, bias=False, **factory))
        self.frequency = nn.Parameter(torch.empty(filter_width, **factory))
        self.skip = nn.Parameter(torch.empty(order - 1, d_model, **factory))
        self.out_proj = nn.Linear(d_model, d_model, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch does it; the frequencies are all the same at first."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
        nn.init.constant_(self.frequency, self.first_frequency)
        nn.init.normal_(self.skip)

    def kernel(self, length: int) -> Tensor:
        """((order - 1)·D, length): the filters of the first convolution, then those of the next."""
        dtype = torch.promote_types(self.frequency.dtype, torch.float32)
        time = torch.arange(length, device=self.frequency.device, dtype=dtype)
        features = position_features(time, self.bands, self.max_length)
        slow, fast = math.log(100) / self.slow_decay, math.log(100) / self.fast_decay
        rates = torch.linspace(slow, fast, (self.order - 1) * self.d_model, device=time.device, dtype=dtype)
        rates = rates.unflatten(0, (self.d_model, -1)).T.flatten()  # each convolution has slow and fast ones
        return implicit_filters(list(self.filter.parameters()), self.frequency, features, rates, self.shift)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        if x.shape[1] == 0:  # the short convolution refuses it
            return self.out_proj(x)
        projected = F.pad(hide_padding(self.in_proj(x), mask), (0, 0, 2, 0))
        projected = self.short(projected.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2)
        query, *gates, value = projected.chunk(self.order + 1, dim=-1)
        kernels = self.kernel(x.shape[1]).chunk(self.order - 1)
        for gate, kernel, skip in zip(reversed(gates), kernels, self.skip, strict=True):
            value = hide_padding(gate * value, mask)
            value = long_conv(value, kernel) + skip * value
        return self.out_proj(query * value)

    def extra_repr(self) -> str:
        return f"{self.d_model}, order={self.order}, max_length={self.max_length}"


@register("hyena")
@dataclass(frozen=True, kw_only=True)
class HyenaConfig(Config):
    """Long convolutions of implicit filters between gates.

    Defaults as in the authors' language model on the Pile, except filter_width, which is 64 there: 32 keeps a layer of
    width 64 about as large as attention. The features of the positions are fixed. Filters are functions of the position
    in units of max_length.

    Args:
        order: at least 2, for order + 1 projections and order - 1 long convolutions.
        filter_width: hidden width of the network whose outputs are the filters.
        bands: waves among its inputs, each as cosine and sine.
        frequency: of its sine activations, at first.
        fast_decay: the share of max_length in which the fastest window falls to 1 %.
        slow_decay: the same of the slowest window.
        shift: added to the windows, so that they do not fall to 0.
    """

    order: int = 2
    filter_width: int = 32
    bands: int = 16
    frequency: float = 14.0
    fast_decay: float = 0.3
    slow_decay: float = 1.5
    shift: float = 0.0

    summary: ClassVar[str] = "gated long convolutions of implicit filters"
    traits: ClassVar[Traits] = Traits(decays=True, gated=True, cost="L log L")

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> Hyena:
        return Hyena(d_model, max_length=max_length, device=device, dtype=dtype, **asdict(self))
