"""SGConv (Li et al. 2023, "What Makes Convolutional Models Great on Long Sequence Modeling?"): a long kernel of few
parameters, coarser and weaker with distance.

    k = [w_0, α⁻¹·w_1, α⁻²·stretch(w_2, 2), α⁻³·stretch(w_3, 4), …] / Z,   w_i (D, d),   y = out(gelu(k * x + skip ⊙ x))

S sub-kernels of d weights each reach d·2^(S-1) steps: linear interpolation stretches each to twice the length of the
one before it. Z (D, 1) is the norm of the kernel at initialization, and stays what it was. Instead of α⁻ⁱ, a power law
weighs distance t by 1/(t + 1). With a first scale of s, all sub-kernels are 2ˢ times as long, and there are s fewer.
"""

import math
from typing import Annotated, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from longlens.mixers.common import Convolution, check_order
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.options import Is, Positive, Probability, Size


def multiscale_kernel(weights: Tensor, decay: Tensor, length: int, first: int = 0) -> Tensor:
    """The kernels (C, length) of sub-kernels ``weights`` (S, C, d) with the decay α (C,) from each to the next; 0 past
    the last of them. ``first`` is the scale s of the first."""
    width, end = weights.shape[-1] << first, 0
    parts = []
    for scale, weight in enumerate(weights):
        if end < max(length, 1):
            part = weight * decay.pow(-scale).unsqueeze(-1)
            stretch = 1 << (max(scale - 1, 0) + first)
            if stretch > 1:
                part = F.interpolate(part.unsqueeze(0), scale_factor=stretch, mode="linear").squeeze(0)
            parts.append(part)
            end = width << scale
    return F.pad(torch.cat(parts, dim=-1), (0, length - end))  # a negative pad crops


def multiscale_kernel_reference(weights: Tensor, decay: Tensor, length: int, first: int = 0) -> Tensor:
    """The same tap by tap: which sub-kernel it belongs to, and which two of its weights it lies between."""
    scales, channels, size = weights.shape
    kernel = weights.new_zeros(channels, length)
    for tap in range(min(length, size * 2 ** (scales - 1 + first))):
        scale = (tap // (size * 2**first)).bit_length()
        stretch = 2 ** (max(scale - 1, 0) + first)
        start = 0 if scale == 0 else size * stretch
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
    recipes for ListOps, Text, Retrieval and Pathfinder, except ``kernel_dim``, which is 1, 2, 1 and 32 there. That for
    Image has a ``kernel_dim`` of 32 and a power law; that for Path-X one of 64, cosines, an ``init_scale`` of 1, and a
    decay from 1 to 3. The weights have weight decay like others.

    Args:
        kernel_dim: Weights d of a sub-kernel.
        decay: Decay of the kernel: scales (by a factor from each sub-kernel to the next), or power (as 1 / distance).
        decay_min: Factor α by which a sub-kernel is weaker than the one before it, in the first channel.
        decay_max: Factor α of the last channel; those between are evenly spaced.
        init: Sub-kernels at initialization: normal, or cosines of a frequency for each channel.
        init_scale: Scale s of the first sub-kernel, which is stretched by 2 to the power of it.
        dropout: Dropout of what the output projection gets, the same channels at all positions of a sequence.
        max_length: Minimum reach of the kernel, which has 1 + ⌈log₂(max_length / d)⌉ - s sub-kernels and then is 0.
    """

    groups: ClassVar[dict[str, tuple[str, ...]]] = {"kernel": ("weight",)}

    def __init__(
        self,
        d_model: Size,
        *,
        kernel_dim: Size = 16,
        decay: Literal["scales", "power"] = "scales",
        decay_min: Positive = 2.0,
        decay_max: Positive = 2.0,
        init: Literal["normal", "cosine"] = "normal",
        init_scale: Annotated[int, Ge(0), Le(30), Is("a whole number from 0 to 30")] = 0,
        bidirectional: bool = True,
        output: Literal["glu", "linear"] = "glu",
        dropout: Probability = 0.0,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, dropout=dropout, **factory)
        check_order(decay_min=decay_min, decay_max=decay_max)
        self.kernel_dim, self.init, self.init_scale = kernel_dim, init, init_scale
        self.decay: Literal["scales", "power"] = decay
        self.decay_min, self.decay_max = decay_min, decay_max
        scales = max(1, 1 + math.ceil(math.log2(max(max_length / kernel_dim, 1))) - init_scale)
        self.weight = nn.Parameter(torch.empty(scales, self.kernels, kernel_dim, **factory))
        self.norm = nn.Buffer(torch.empty(self.kernels, 1, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.weight)
        if self.init == "cosine":  # the same for both sides
            turns = torch.linspace(0, 2 * math.pi, self.kernel_dim, device="cpu")
            for weight in self.weight:
                waves = torch.cos(torch.randperm(self.d_model, device="cpu")[:, None] * turns)
                weight.copy_(waves.repeat(len(weight) // self.d_model, 1))
        nn.init.ones_(self.norm)
        reach = self.kernel_dim << (self.weight.shape[0] - 1 + self.init_scale)  # the whole kernel
        self.norm.copy_(self.kernel(reach).norm(dim=-1, keepdim=True))

    def kernel(self, length: int) -> Tensor:
        weight = self.weight / self.norm
        factory = {"device": weight.device, "dtype": weight.dtype}
        if self.decay == "power":
            distance = torch.arange(1, length + 1, **factory)
            return multiscale_kernel(weight, torch.ones(self.kernels, **factory), length, self.init_scale) / distance
        decay = torch.linspace(self.decay_min, self.decay_max, self.d_model, **factory)
        return multiscale_kernel(weight, decay.repeat(self.kernels // self.d_model), length, self.init_scale)
