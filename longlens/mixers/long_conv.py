"""Long convolutions whose kernels are learned weight by weight (Fu et al. 2023, "Simple Hardware-Efficient Long
Convolutions for Sequence Modeling"; Table 10 of the LaS paper calls them FlashButterfly, after their GPU kernel).

    k = sign(a) ⊙ max(|a| - λ, 0),   a = AP(w),   w (D, L), AP a moving average,   y = out(gelu(k * x + skip ⊙ x))

What keeps them smooth is the squashing, by λ, and a moving average if one is chosen. With C kernels for each channel, w
is (C·D, L), and the output projection is of all C·D results.
"""

from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import Convolution
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.options import NonNegative, Odd, Probability, Size


def squashed_kernel(weights: Tensor, length: int, *, squash: float, smooth: int = 1) -> Tensor:
    """The kernels (C, length) of ``weights`` (C, K): a moving average over ``smooth`` steps, moved toward 0 by
    ``squash``; 0 past the last weight."""
    weights = weights[:, : length + smooth // 2]
    if smooth > 1:
        weights = F.avg_pool1d(weights, smooth, stride=1, padding=smooth // 2)
    kernel = F.softshrink(weights, squash)
    return F.pad(kernel, (0, length - kernel.shape[-1]))  # a negative pad crops


def squashed_kernel_reference(weights: Tensor, length: int, *, squash: float, smooth: int = 1) -> Tensor:
    """The same tap by tap: the mean of the weights around it, of which those outside are 0, moved toward 0."""
    channels, taps = weights.shape
    kernel = weights.new_zeros(channels, length)
    for tap in range(min(length, taps)):
        mean = weights[:, max(tap - smooth // 2, 0) : tap + smooth // 2 + 1].sum(dim=-1) / smooth
        kernel[:, tap] = mean.sign() * torch.relu(mean.abs() - squash)
    return kernel


@register(
    "long-conv",
    "long convolution of free, squashed weights",
    Traits(decays=True, regularized=True, special_init=True, cost="L log L"),
    size_note="it has a weight for each channel and each position up to the longest sequence",
)
class LongConv(Convolution):
    """A convolution with one learned weight for each channel and distance. (B, L, D) -> (B, L, D). It starts as in the
    authors' arena recipes, which have two kernels for each channel, a ``kernel_dropout`` from .1 to .3, and from .001
    (Pathfinder, Path-X, which are bidirectional) to .004 (Retrieval) as ``squash``.

    Args:
        channels: Number of kernels of each channel; the authors' recipes have 2.
        squash: Distance λ by which each weight is moved toward 0; smaller ones are 0.
        smooth: Odd window of a moving average over the kernel; 1 is none, 7 what the authors have when they smooth.
        kernel_dropout: Dropout of the kernel's weights.
        init: Initialization: random (all weights alike), or double-exponential, their other choice (decaying, at rates
            that grow exponentially with the channel).
        dropout: Dropout of what the output projection gets, the same channels at all positions of a sequence.
        max_length: Length of the kernel.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("weight",)
    groups: ClassVar[dict[str, tuple[str, ...]]] = {"kernel": ("weight",)}

    def __init__(
        self,
        d_model: Size,
        *,
        channels: Size = 1,
        squash: NonNegative = 0.003,
        smooth: Odd = 1,
        kernel_dropout: Probability = 0.0,
        init: Literal["random", "double-exponential"] = "random",
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        dropout: Probability = 0.0,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        how: dict[str, Any] = {"output": output, "channels": channels, "dropout": dropout}
        super().__init__(d_model, bidirectional=bidirectional, **how, **factory)
        self.squash, self.smooth = squash, smooth
        self.kernel_dropout, self.init = kernel_dropout, init
        self.weight = nn.Parameter(torch.empty(self.kernels, max_length, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.init == "random":
            nn.init.normal_(self.weight, std=0.002)
            return
        nn.init.normal_(self.weight, std=0.02)
        channel = torch.arange(self.d_model, device=self.weight.device) / self.d_model
        time = torch.arange(self.weight.shape[1], device=self.weight.device) / self.weight.shape[1]
        rates = (self.d_model // 2) ** channel  # from 1 to D / 2 over the whole kernel
        self.weight.mul_(torch.exp(-rates[:, None] * time).repeat(self.kernels // self.d_model, 1))

    def kernel(self, length: int) -> Tensor:
        kernel = squashed_kernel(self.weight, length, squash=self.squash, smooth=self.smooth)
        return F.dropout(kernel, self.kernel_dropout, self.training)
