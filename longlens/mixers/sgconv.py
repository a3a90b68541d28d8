"""SGConv (Li et al. 2023, "What Makes Convolutional Models Great on Long Sequence Modeling?"): a long kernel of few
parameters, coarser and weaker with distance.

    k = [w_0, α⁻¹·w_1, α⁻²·stretch(w_2, 2), α⁻³·stretch(w_3, 4), …] / Z,   w_i (D, d),   y = out(gelu(k * x + skip ⊙ x))

S sub-kernels of d weights each reach d·2^(S-1) steps: linear interpolation stretches each to twice the length of the
one before it. Z (D, 1) is the norm of the kernel at initialization, and stays what it was.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import Convolution


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
    return F.pad(torch.cat(parts, dim=-1), (0, length - end))  # which cuts what is too much


class SGConv(Convolution):
    """A convolution with sub-kernels of growing length.

    Args:
        d_model: D.
        kernel_dim: d, the weights of a sub-kernel.
        decay_min: α of the first channel.
        decay_max: α of the last one; those between are evenly spaced.
        max_length: so far the kernel reaches at least; it has 1 + ⌈log₂(max_length / d)⌉ sub-kernels.
        bidirectional: see both sides.
        output: ``"glu"`` or ``"linear"``.
    """

    special_parameters: ClassVar[tuple[str, ...]] = ("weight",)
    norm: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        kernel_dim: int = 16,
        decay_min: float = 2.0,
        decay_max: float = 2.0,
        max_length: int = MAX_LENGTH,
        bidirectional: bool = True,
        output: str = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, device=device, dtype=dtype)
        if kernel_dim < 1:
            raise ValueError(f"kernel_dim must be at least 1, got {kernel_dim}")
        if not 0 < decay_min <= decay_max < math.inf:
            raise ValueError(
                f"decay_min and decay_max must be finite numbers above 0, and decay_max at least decay_min, "
                f"got {decay_min} and {decay_max}"
            )
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.kernel_dim, self.decay_min, self.decay_max = kernel_dim, decay_min, decay_max
        scales = 1 + math.ceil(math.log2(max(max_length / kernel_dim, 1)))
        self.weight = nn.Parameter(torch.empty(scales, self.kernels, kernel_dim, device=device, dtype=dtype))
        self.register_buffer("norm", torch.empty(self.kernels, 1, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def reach(self) -> int:
        """The steps after which the kernel ends."""
        return self.kernel_dim << (self.weight.shape[0] - 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.weight)
        nn.init.ones_(self.norm)
        self.norm.copy_(self.kernel(self.reach).norm(dim=-1, keepdim=True))

    def kernel(self, length: int) -> Tensor:
        weight = self.weight / self.norm
        decay = torch.linspace(self.decay_min, self.decay_max, self.d_model, device=weight.device, dtype=weight.dtype)
        return multiscale_kernel(weight, decay.repeat(self.kernels // self.d_model), length)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kernel_dim={self.kernel_dim}, reach={self.reach}"


@register("sgconv")
@dataclass(frozen=True, kw_only=True)
class SGConvConfig(Config):
    """A long convolution with sub-kernels of growing length.

    Defaults as in the authors' recipes for ListOps, Text, Retrieval and Pathfinder, except kernel_dim, which is 1, 2, 1
    and 32 there: 16 keeps a layer of width 64 about as large as attention. The kernel reaches max_length, rounded up to
    the end of a sub-kernel; what is further away has no weight.

    Args:
        kernel_dim: weights of a sub-kernel.
        decay_min: by how much a sub-kernel is weaker than the one before it, in the first channel.
        decay_max: the same in the last channel.
        bidirectional: see both sides.
        output: the last part, glu or linear.
    """

    kernel_dim: int = 16
    decay_min: float = 2.0
    decay_max: float = 2.0
    bidirectional: bool = True
    output: Literal["glu", "linear"] = "glu"

    summary: ClassVar[str] = "long convolution, coarser and weaker with distance"
    # Table 10 calls it recurrent, though it is trained as a convolution like the others.
    traits: ClassVar[Traits] = Traits(
        decays=True, regularized=True, special_init=True, recurrent=True, cost="L log L"
    )  # fmt: skip

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> SGConv:
        return SGConv(d_model, max_length=max_length, device=device, dtype=dtype, **asdict(self))
