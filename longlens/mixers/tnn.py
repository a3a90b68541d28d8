"""The gated Toeplitz unit of the Toeplitz neural network, TNN (Qin et al. 2023).

    y = (silu(x·W_u) ⊙ T·silu(x·W_v))·W_o,   T[i, j] = t_{i - j} = λ^|i - j|·RPE(i - j)      one T for each channel

It has E = ``expansion``·D channels. RPE, the relative position encoder, is a small network from a distance, which is a
single number, to E numbers, with K = ``rpe_layers`` layers between its first and its last:

    h_0 = n·w + b,   h_k = relu(h_{k-1} / rms(h_{k-1}))·W_k + b_k,   RPE(n) = relu(h_K / rms(h_K))·W + b

T is a convolution, O(L log L) with an FFT. A distance goes in as it is, not divided by the length: t_n is the same in
sequences of any length.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import check_inputs, hide_padding
from longlens.ops.long_conv import long_conv


def toeplitz_kernel(encoder: Callable[[Tensor], Tensor], decay: float, distances: Tensor) -> Tensor:
    """The coefficients t_n = decay^|n|·encoder(n) of the distances n, (length,): (E, length).

    encoder: from distances (length, 1) to (length, E). In bfloat16 it could not count to 257, so that autocast is off.
    """
    distances = distances.unsqueeze(1)
    with torch.autocast(distances.device.type, enabled=False):
        return (decay ** distances.abs() * encoder(distances)).T


class PositionEncoder(nn.Module):
    """RPE: distances (length, 1) -> (length, E), in the precision of the distances."""

    def __init__(self, channels: int, *, width: int, layers: int, device=None, dtype=None) -> None:
        super().__init__()
        sizes = [1, *[width] * (layers + 1), channels]
        self.layers = nn.ModuleList(
            nn.Linear(size, following, device=device, dtype=dtype) for size, following in pairwise(sizes)
        )

    def reset_parameters(self) -> None:
        for layer in self.layers:
            layer.reset_parameters()  # pyright: ignore[reportCallIssue]

    def forward(self, distances: Tensor) -> Tensor:
        parameters = [parameter.to(distances.dtype) for parameter in self.parameters()]
        hidden = F.linear(distances, *parameters[:2])
        for weight, bias in zip(parameters[2::2], parameters[3::2], strict=True):
            hidden = F.linear(F.relu(F.rms_norm(hidden, hidden.shape[-1:], eps=1e-16)), weight, bias)
        return hidden


class GatedToeplitz(nn.Module):
    """A gated Toeplitz matrix for each channel, (B, L, D) -> (B, L, D).

    Args:
        d_model: D.
        expansion: E / D, the inner width.
        decay: λ, by which a coefficient shrinks with each step of distance. 1 turns decay off.
        rpe_layers: inner layers of the position encoder.
        rpe_width: their width.
        bidirectional: see both sides.
        bias: of the three projections.
    """

    def __init__(
        self,
        d_model: int,
        *,
        expansion: float = 1.0,
        decay: float = 0.99,
        rpe_layers: int = 3,
        rpe_width: int = 32,
        bidirectional: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size, least in (("d_model", d_model, 1), ("rpe_layers", rpe_layers, 0), ("rpe_width", rpe_width, 1)):
            if size < least:
                raise ValueError(f"{name} must be at least {least}, got {size}")
        if not 0 < expansion < float("inf"):
            raise ValueError(f"expansion must be a number above 0, got {expansion}")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, got {decay}")
        self.d_model, self.decay, self.bidirectional = d_model, decay, bidirectional
        inner = max(1, round(expansion * d_model))
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(inner, d_model, bias=bias, device=device, dtype=dtype)
        self.encoder = PositionEncoder(inner, width=rpe_width, layers=rpe_layers, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All layers begin as ``nn.Linear`` does."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        self.encoder.reset_parameters()

    def kernel(self, length: int) -> Tensor:
        """(E, length): the weights of the inputs 0, 1, … steps back; for both sides (2E, length), of which the last E
        are the weights of the inputs 1, 2, … steps ahead."""
        weight = self.out_proj.weight
        steps = torch.arange(length, device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
        if not self.bidirectional:
            return toeplitz_kernel(self.encoder, self.decay, steps)
        both = toeplitz_kernel(self.encoder, self.decay, torch.cat([steps, -1 - steps]))
        return torch.cat(both.chunk(2, dim=1))

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        gate, value = F.silu(self.in_proj(x)).chunk(2, dim=-1)
        kernels = self.kernel(x.shape[1]).chunk(2 if self.bidirectional else 1)
        return self.out_proj(gate * long_conv(hide_padding(value, mask), *kernels))

    def extra_repr(self) -> str:
        return f"{self.d_model}, decay={self.decay}, bidirectional={self.bidirectional}"


@register("tnn")
@dataclass(frozen=True, kw_only=True)
class TNN(Config):
    """Toeplitz neural network. Sizes as in the official code for ListOps and Text of the Long Range Arena, where decay
    was chosen for each task; its default is that of the language models.

    Args:
        expansion: inner width, as a multiple of the width; up to 3 in the paper.
        decay: by which a weight shrinks with each step of distance.
        rpe_layers: inner layers of the network that makes weights of distances.
        rpe_width: their width.
        bidirectional: see both sides.
        bias: of the projections.
    """

    expansion: float = 1.0
    decay: float = 0.99
    rpe_layers: int = 3
    rpe_width: int = 32
    bidirectional: bool = True
    bias: bool = True

    summary: ClassVar[str] = "gated Toeplitz matrices"
    # Table 10 has no gate for it, though its unit has one (u above).
    traits: ClassVar[Traits] = Traits(decays=True, cost="L log L")

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> GatedToeplitz:
        return GatedToeplitz(d_model, **asdict(self), device=device, dtype=dtype)
