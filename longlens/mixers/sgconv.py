"""SGConv (Li et al. 2023, "What Makes Convolutional Models Great on Long Sequence Modeling?"): a long kernel of few
parameters, coarser and weaker with distance.

    k = [w_0, α⁻¹·w_1, α⁻²·stretch(w_2, 2), α⁻³·stretch(w_3, 4), …] / Z,   w_i (D, d),   y = out(gelu(k * x + skip ⊙ x))

S sub-kernels of d weights each reach d·2^(S-1) steps: linear interpolation stretches each to twice the length of the
one before it. Z (D, 1) is the norm of the kernel at initialization, and stays what it was.
"""

import math
from typing import ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import Convolution, check_order
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.options import Positive, Size


def multiscale_kernel(weights: Tensor, decay: Tensor, length: int) -> Tensor:
    """The kernels (C, length) of sub-kernels ``weights`` (S, C, d) with the decay α (C,) from each to the next; 0 past
    the last of them."""
    width, end = weights.shape[-1], 0
    parts = []
    for scale, weight in enumerate(weights):
        if end < max(length, 1):
            part = weight * decay.pow(-scale).unsqueeze(-1)
            if scale > 1:
                part = F.interpolate(part.unsqueeze(0), scale_factor=2 ** (scale - 1), mode="linear").squeeze(0)
            parts.append(part)
            end = width << scale
    return F.pad(torch.cat(parts, dim=-1), (0, length - end))  # a negative pad crops


def multiscale_kernel_reference(weights: Tensor, decay: Tensor, length: int) -> Tensor:
    """The same tap by tap: which sub-kernel it belongs to, and which two of its weights it lies between."""
    scales, channels, size = weights.shape
    kernel = weights.new_zeros(channels, length)
    for tap in range(min(length, size * 2 ** (scales - 1))):
        scale = 0 if tap < size else (tap // size).bit_length()
        start, stretch = (0, 1) if scale == 0 else (size * 2 ** (scale - 1), 2 ** (scale - 1))
        place = min(max((tap - start + 0.5) / stretch - 0.5, 0.0), size - 1.0)
        left = int(place)
        right, rest = min(left + 1, size - 1), place - left
        kernel[:, tap] = ((1 - rest) * weights[scale, :, left] + rest * weights[scale, :, right]) * decay**-scale
    return kernel


@register(
    "sgconv",
    "long convolution, coarser and weaker with distance",
    # Table 10 calls it recurrent, though it is trained as a convolution like the others.
    traits=Traits(decays=True, regularized=True, special_init=True, recurrent=True, cost="L log L"),
)
class SGConv(Convolution):
    """A long convolution with sub-kernels of growing length. (B, L, D) -> (B, L, D). Defaults as in the authors'
    recipes for ListOps, Text, Retrieval and Pathfinder, except ``kernel_dim``, which is 1, 2, 1 and 32 there.

    Args:
        kernel_dim: Weights d of a sub-kernel.
        decay_min: Factor α by which a sub-kernel is weaker than the one before it, in the first channel.
        decay_max: Factor α of the last channel; those between are evenly spaced.
        max_length: Minimum reach of the kernel, which has 1 + ⌈log₂(max_length / d)⌉ sub-kernels and is 0 after them.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        d_model: Size,
        *,
        kernel_dim: Size = 16,
        decay_min: Positive = 2.0,
        decay_max: Positive = 2.0,
        bidirectional: bool = True,
        output: Literal["glu", "linear"] = "glu",
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        check_order(decay_min=decay_min, decay_max=decay_max)
        self.kernel_dim = kernel_dim
        self.decay_min, self.decay_max = decay_min, decay_max
        scales = 1 + math.ceil(math.log2(max(max_length / kernel_dim, 1)))
        self.weight = nn.Parameter(torch.empty(scales, self.kernels, kernel_dim, **factory))
        self.norm = nn.Buffer(torch.empty(self.kernels, 1, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.weight)
        nn.init.ones_(self.norm)
        reach = self.kernel_dim << (self.weight.shape[0] - 1)  # the whole kernel
        self.norm.copy_(self.kernel(reach).norm(dim=-1, keepdim=True))

    def kernel(self, length: int) -> Tensor:
        weight = self.weight / self.norm
        decay = torch.linspace(self.decay_min, self.decay_max, self.d_model, device=weight.device, dtype=weight.dtype)
        return multiscale_kernel(weight, decay.repeat(self.kernels // self.d_model), length)
