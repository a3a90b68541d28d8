"""GSS (Mehta, Gupta, Cutkosky & Neyshabur 2022, Long Range Language Modeling via Gated State Spaces): a state space of
few channels, H < D, and a gate of many, F > D.

    v = gelu(x·W₁)              (B, L, F)
    u = gelu(x·W₂)              (B, L, H)
    y = DSS(LayerNorm(u))       (B, L, H)
    o = (y·W₃ ⊙ v)·W₄ + b       (B, L, D)

    DSS(u) = k * u + skip ⊙ u,   k[l] = Re Σ_n c_n·(exp(Λ_n) - 1)/Λ_n·exp(Λ_n·l),   Λ = -exp(a) + i·exp(ω)

with Λ the same in all channels, no step size, and all of a, ω, c and skip normal numbers at the start. The block of the
paper has a norm before it and a residual around it, as one here, but no feedforward part after it.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import check_inputs, check_step, hide_padding
from longlens.ops.exponentials import as_complex, exact, step_exponentials, sum_of_exponentials
from longlens.ops.long_conv import long_conv


def gss_modes(c: Tensor, real: Tensor, imag: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (H, N) and rates (1, N) of the exponentials that make the kernel, of c (H, N), a (N,) and ω (N,)."""
    rates = torch.complex(-exact(real).exp(), exact(imag).exp()).unsqueeze(0)
    return c * torch.expm1(rates) / rates, rates


def gss_kernel(c: Tensor, real: Tensor, imag: Tensor, length: int) -> Tensor:
    """The kernels (H, length)."""
    return sum_of_exponentials(*gss_modes(c, real, imag), length)


class GSS(nn.Module):
    """(B, L, D) -> (B, L, D).

    Args:
        d_model: D, a multiple of ``reduction``.
        expansion: F/D, of the gate.
        reduction: D/H, of the state space.
        state_size: N, complex numbers for each of the H channels.
    """

    special_parameters: ClassVar[tuple[str, ...]] = ("real", "imag", "c")

    def __init__(
        self,
        d_model: int,
        *,
        expansion: float = 2.0,
        reduction: int = 4,
        state_size: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if reduction < 1 or d_model < 1 or d_model % reduction:
            raise ValueError(
                f"d_model must be a multiple of reduction, got d_model={d_model} and reduction={reduction}"
            )
        if not expansion > 0:
            raise ValueError(f"expansion must be above 0, got {expansion}")
        if state_size < 1:
            raise ValueError(f"state_size must be at least 1, got {state_size}")
        factory = {"device": device, "dtype": dtype}
        self.d_model, self.state_size = d_model, state_size
        self.gates, self.channels = max(1, round(expansion * d_model)), d_model // reduction  # F, H
        self.in_proj = nn.Linear(d_model, self.gates + self.channels, bias=False, **factory)  # W₁ and W₂
        self.norm = nn.LayerNorm(self.channels, **factory)
        self.real = nn.Parameter(torch.empty(state_size, **factory))  # a
        self.imag = nn.Parameter(torch.empty(state_size, **factory))  # ω
        self.c = nn.Parameter(torch.empty(self.channels, state_size, 2, **factory))
        self.skip = nn.Parameter(torch.empty(self.channels, **factory))
        self.context_proj = nn.Linear(self.channels, self.gates, bias=False, **factory)  # W₃
        self.out_proj = nn.Linear(self.gates, d_model, **factory)  # W₄
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for part in (self.in_proj, self.norm, self.context_proj, self.out_proj):
            part.reset_parameters()
        for parameter in (self.real, self.imag, self.c, self.skip):
            nn.init.normal_(parameter)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        gate, u = self._project(x)
        u = hide_padding(u, mask)
        return self._out(long_conv(u, self.kernel(u.shape[1])) + self.skip * u, gate)

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token of each sequence, (B, D), and what came before, (B, H, N), None at the start -> (B, D) and the next
        state. Step by step, the outputs are those of ``forward``."""
        check_step(x, self.d_model, causal=True)
        gate, u = self._project(x)
        y, state = step_exponentials(*gss_modes(as_complex(self.c), self.real, self.imag), u, state)
        return self._out(y + self.skip * u, gate), state

    def kernel(self, length: int) -> Tensor:
        """(H, length): the weights of the inputs 0, 1, … steps back."""
        return gss_kernel(as_complex(self.c), self.real, self.imag, length)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, u = F.gelu(self.in_proj(x)).split([self.gates, self.channels], dim=-1)
        return gate, self.norm(u)

    def _out(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj(self.context_proj(y) * gate)

    def extra_repr(self) -> str:
        return f"{self.d_model}, gates={self.gates}, channels={self.channels}, state_size={self.state_size}"


@register("gss")
@dataclass(frozen=True, kw_only=True)
class GSSConfig(Config):
    """Gated state spaces. The paper has an expansion of 4 and a state of 512 in a block without a feedforward part; the
    smaller defaults here leave room for that part.

    Args:
        expansion: width of the gate as a multiple of D.
        reduction: channels of the state space as a fraction of D, which is 1/4 in the paper.
        state_size: N, complex numbers for each of these channels.
    """

    expansion: float = 2.0
    reduction: int = 4
    state_size: int = 128

    summary: ClassVar[str] = "gated diagonal state space"
    # As in Table 10; but its parameters are complex numbers too.
    traits: ClassVar[Traits] = Traits(
        decays=True, stable=True, gated=True, cost="L log L", state="2·D/reduction·state_size"
    )

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> GSS:
        return GSS(d_model, **asdict(self), device=device, dtype=dtype)
