"""Long convolutions whose kernels are learned weight by weight (Fu et al. 2023, "Simple Hardware-Efficient Long
Convolutions for Sequence Modeling"; Table 10 of the LaS paper calls them FlashButterfly, after their GPU kernel).

    k = sign(a) ⊙ max(|a| - λ, 0),   a = AP(w),   w (D, L), AP a moving average,   y = out(gelu(k * x + skip ⊙ x))

What keeps them smooth is the squashing, by λ, and a moving average if one is chosen.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import Convolution
from longlens.ops.checks import check_share


def squashed_kernel(weights: Tensor, length: int, *, squash: float, smooth: int = 1) -> Tensor:
    """The kernels (C, length) of ``weights`` (C, K): a moving average over ``smooth`` steps, moved toward 0 by
    ``squash``; 0 past the last weight."""
    weights = weights[:, : length + smooth // 2]
    if smooth > 1:
        weights = F.avg_pool1d(weights, smooth, stride=1, padding=smooth // 2)
    kernel = F.softshrink(weights, squash)
    return F.pad(kernel, (0, length - kernel.shape[-1]))  # which cuts what is too much


class LongConv(Convolution):
    """A convolution with one learned weight for each channel and distance.

    Args:
        d_model: D.
        squash: λ; weights below it count as 0.
        smooth: odd length of the moving average over a kernel; 1 is none.
        kernel_dropout: share of the kernel's weights that is dropped in training.
        init: ``"double-exponential"``, normal numbers that decay, at rates that grow exponentially with the channel, or
            ``"random"``, small ones that do not.
        max_length: weights of a kernel, which ends there.
        bidirectional: see both sides.
        output: ``"glu"`` or ``"linear"``.
    """

    special_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        d_model: int,
        *,
        squash: float = 0.003,
        smooth: int = 1,
        kernel_dropout: float = 0.0,
        init: str = "double-exponential",
        max_length: int = MAX_LENGTH,
        bidirectional: bool = False,
        output: str = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, device=device, dtype=dtype)
        if not squash >= 0:
            raise ValueError(f"squash must be at least 0, got {squash}")
        if smooth < 1 or smooth % 2 == 0:
            raise ValueError(f"smooth must be an odd number of at least 1, got {smooth}")
        check_share("kernel_dropout", kernel_dropout)
        if init not in ("random", "double-exponential"):
            raise ValueError(f"init must be random or double-exponential, got {init!r}")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.squash, self.smooth, self.kernel_dropout, self.init = squash, smooth, kernel_dropout, init
        self.weight = nn.Parameter(torch.empty(self.kernels, max_length, device=device, dtype=dtype))
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

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, max_length={self.weight.shape[1]}, squash={self.squash}, smooth={self.smooth}, "
            f"kernel_dropout={self.kernel_dropout}, init={self.init!r}"
        )


@register("long-conv")
@dataclass(frozen=True, kw_only=True)
class LongConvConfig(Config):
    """A convolution with one learned weight for each channel and distance, up to max_length.

    Defaults as in the authors' configuration of the layer, with one kernel instead of two for each channel and without
    its kernel_dropout of .2. Their arena recipes see both sides for Pathfinder only, and have squash from .001 there to
    .004 for Retrieval. Their code can also start at random, where most weights are below squash and do not learn.

    Args:
        squash: how far each weight is moved toward 0; smaller ones are 0.
        smooth: odd length of a moving average over the kernel; 1 is none, 7 what the authors have when they smooth.
        kernel_dropout: of the kernel's weights, in training.
        init: double-exponential (decaying, at rates that grow with the channel) or random.
        bidirectional: see both sides.
        output: the last part, glu or linear.
    """

    squash: float = 0.003
    smooth: int = 1
    kernel_dropout: float = 0.0
    init: Literal["double-exponential", "random"] = "double-exponential"
    bidirectional: bool = False
    output: Literal["glu", "linear"] = "glu"

    summary: ClassVar[str] = "long convolution of free, squashed weights"
    traits: ClassVar[Traits] = Traits(decays=True, regularized=True, special_init=True, cost="L log L")
    size_note: ClassVar[str] = "it has a weight for each channel and each position up to the longest sequence"

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> LongConv:
        return LongConv(d_model, max_length=max_length, device=device, dtype=dtype, **asdict(self))
