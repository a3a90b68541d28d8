"""S5 (Smith, Warrington & Linderman 2023, Simplified State Space Layers for Sequence Modeling): one state space for all
channels together, discretized by zero-order hold and run by a parallel scan.

    h_t = ā ⊙ h_{t-1} + B̄ x_t,   y_t = 2·Re(C h_t) + skip ⊙ x_t,   u = drop(gelu(y))
    out = u ⊙ σ(W u + b)  (half_glu1)  or  y ⊙ σ(W u + b)  (half_glu2)
    ā = exp(λ ⊙ Δ),   B̄ = (ā - 1)/λ ⊙ B

with P states in conjugate pairs, of which one each is kept: λ, Δ (P/2,), B (P/2, D), C (D, P/2), complex but for Δ. For
both sides a second scan runs from the end, with the same λ, Δ, B and a C of its own.
"""

import math
from typing import ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import log_uniform_
from longlens.mixers.diagonal import DiagonalRecurrence, diagonal_recurrence_reference
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import at_least_float32
from longlens.ops.exponentials import as_complex
from longlens.ops.hippo import dplr_legs
from longlens.options import Even, Positive, Probability, Size


# The traits are those of the paper's Table 10; its eigenvalues are initialized as those of HiPPO-N all the same. It is
# stable as there, though without clip it can learn eigenvalues with a positive real part.
@register(
    "s5",
    "one state space for all channels, by parallel scan",
    Traits(decays=True, stable=True, complex=True, recurrent=True, cost="L", state="state_size"),
)
class S5(DiagonalRecurrence):
    """One state space for all channels. (B, L, D) -> (B, L, D). The defaults are those of the official code.

    Args:
        state_size: State size P, even; none for about the width (published are 1/8 to 2 times the width).
        blocks: HiPPO-N blocks of the initial state matrix; none for 8, or fewer if those do not divide state_size / 2.
        activation: Gate at the output: half_glu1, or half_glu2, which multiplies the state space's own output.
        c_init: C at initialization: trunc_standard_normal or lecun_normal (smaller by the root of the width), both in
            the basis of HiPPO, or complex_normal (in that of the states, and of variance 1).
        dropout: Dropout after the GELU, of the same channels at all positions of a sequence.
        clip: Keep the real part of the eigenvalues negative, so that the layer is stable whatever it learns.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("eigenvalues", "log_dt", "into")
    groups: ClassVar[dict[str, tuple[str, ...]]] = {"ssm": ("eigenvalues",), "b": ("into",), "dt": ("log_dt",)}

    def __init__(
        self,
        d_model: Size,
        state_size: Even | None = None,
        *,
        blocks: Size | None = None,
        dt_min: Positive = 1e-3,
        dt_max: Positive = 0.1,
        activation: Literal["half_glu1", "half_glu2"] = "half_glu1",
        c_init: Literal["trunc_standard_normal", "lecun_normal", "complex_normal"] = "trunc_standard_normal",
        clip: bool = False,
        bidirectional: bool = False,
        dropout: Probability = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output="linear", dropout=dropout, **factory)
        if state_size is None:
            unit = 2 * (blocks or 1)
            state_size = -(-d_model // unit) * unit  # the next multiple
        pairs = state_size // 2
        blocks = math.gcd(8, pairs) if blocks is None else blocks
        if pairs % blocks:
            raise BadInput(f"blocks must divide state_size / 2 = {pairs}, got {blocks}")
        self.state_size, self.blocks = state_size, blocks
        self.dt_min, self.dt_max = dt_min, dt_max
        self.activation, self.c_init = activation, c_init
        self.clip = clip
        self.eigenvalues = nn.Parameter(torch.empty(pairs, 2, **factory))  # λ
        self.log_dt = nn.Parameter(torch.empty(pairs, **factory))
        self.into = nn.Parameter(torch.empty(pairs, d_model, 2, **factory))  # B
        self.out = nn.Parameter(torch.empty(d_model, pairs * (2 if bidirectional else 1), 2, **factory))  # C
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As the official code: λ and the eigenvectors V of HiPPO-N blocks; B = V⁻¹B', C = C'V for random B', C'."""
        super().reset_parameters()
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        values, _, _, vectors = dplr_legs(self.state_size // self.blocks)
        self.eigenvalues.copy_(torch.view_as_real(values.repeat(self.blocks)))
        vectors = torch.block_diag(*[vectors] * self.blocks)  # (P, P/2)
        into = _lecun_normal(self.state_size, self.state_size, self.d_model)
        self.into.copy_(torch.view_as_real((vectors.mH @ into.to(vectors.dtype)).contiguous()))
        if self.c_init == "complex_normal":
            nn.init.normal_(self.out, std=0.5**0.5)  # a variance of 1 for each complex number
            return
        fan_in = self.state_size * (self.d_model if self.c_init == "lecun_normal" else 1)
        for out in self.out.chunk(2 if self.bidirectional else 1, dim=1):
            real, imaginary = (_lecun_normal(fan_in, self.d_model, self.state_size) for _ in range(2))
            out.copy_(torch.view_as_real(torch.complex(real, imaginary) @ vectors))

    def recurrence(self) -> tuple[Tensor, Tensor, Tensor]:
        eigenvalues = as_complex(self.eigenvalues)
        if self.clip:
            eigenvalues = torch.complex(eigenvalues.real.clamp(max=-1e-4), eigenvalues.imag)
        rates = eigenvalues * torch.exp(at_least_float32(self.log_dt))
        held = torch.expm1(rates) / eigenvalues  # what an input held for Δ adds to a state
        return rates, held.unsqueeze(-1) * as_complex(self.into), 2 * as_complex(self.out)

    def _out(self, y: Tensor) -> Tensor:
        u = self.dropout(F.gelu(y))
        return (u if self.activation == "half_glu1" else y) * torch.sigmoid(self.out_proj(u))


def s5_reference(layer: S5, x: Tensor) -> Tensor:
    """(B, L, D) -> (B, L, D), by the formula above, without clip: a plain loop over the steps."""
    eigenvalues, b, c = (torch.view_as_complex(part) for part in (layer.eigenvalues, layer.into, layer.out))
    decay = torch.exp(eigenvalues * layer.log_dt.exp())  # ā
    b = ((decay - 1) / eigenvalues).unsqueeze(-1) * b  # B̄
    y = diagonal_recurrence_reference(decay, b, 2 * c, x) + layer.skip * x
    u = F.gelu(y)
    gate = torch.sigmoid(u @ layer.out_proj.weight.T + layer.out_proj.bias)
    return u * gate if layer.activation == "half_glu1" else y * gate


def _lecun_normal(fan_in: int, *shape: int) -> Tensor:
    """Variance 1/fan_in, from a normal distribution that is cut off at two of its standard deviations."""
    std = fan_in**-0.5 / 0.87962566103423978  # the standard deviation after the cut
    return nn.init.trunc_normal_(torch.empty(*shape, dtype=torch.float64, device="cpu"), std=std, a=-2 * std, b=2 * std)
