"""S5 (Smith, Warrington & Linderman 2023, Simplified State Space Layers for Sequence Modeling): one state space for all
channels together, discretized by zero-order hold and run by a parallel scan.

    h_t = ā ⊙ h_{t-1} + B̄ x_t,   y_t = 2·Re(C h_t) + skip ⊙ x_t,   out = u ⊙ σ(W u + b)  for  u = gelu(y)
    ā = exp(λ ⊙ Δ),   B̄ = (ā - 1)/λ ⊙ B

with P states in conjugate pairs, of which one each is kept: λ, Δ (P/2,), B (P/2, D), C (D, P/2), complex but for Δ. For
both sides a second scan runs from the end, with the same λ, Δ, B and a C of its own.
"""

import math
from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import StateSpace, check_inputs, hide_padding
from longlens.ops.exponentials import as_complex, exact, log_uniform_, sum_of_exponentials
from longlens.ops.hippo import dplr_legs
from longlens.ops.scan import linear_scan


class DiagonalRecurrence(StateSpace):
    """h_t = a ⊙ h_{t-1} + B x_t, y_t = Re(C h_t): a diagonal recurrence that all channels write to and read from. A
    layer derives from it and writes ``recurrence``."""

    @abstractmethod
    def recurrence(self) -> tuple[Tensor, Tensor, Tensor]:
        """log a (N,), B (N, D) and C (D, N), for both sides (D, 2N), all complex."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        rates, into, out = self.recurrence()
        decay, inputs = torch.exp(rates), _to_complex(x, into)
        states = linear_scan(decay, inputs)
        if self.bidirectional:
            states = torch.cat([states, linear_scan(decay, inputs, reverse=True)], dim=-1)
        return self._out(_to_real(states, out).to(x.dtype) + self.skip * x)

    def kernel(self, length: int) -> Tensor:
        """(D, length): what a channel makes of its own inputs 0, 1, … steps back; for both sides (2D, length), of which
        the last D rows are for 1, 2, … steps ahead. What it makes of other channels are sums of the same exponentials,
        with other weights."""
        return diagonal_kernel(*self.recurrence(), length)

    def recur(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state is h, (B, N)."""
        rates, into, out = self.recurrence()
        inputs = _to_complex(x, into)
        state = inputs if state is None else torch.exp(rates) * state + inputs
        return _to_real(state, out).to(x.dtype), state


def diagonal_kernel(rates: Tensor, into: Tensor, out: Tensor, length: int) -> Tensor:
    """k[d, l] = Re Σ_n C[d, n]·exp(l·rates[n])·B[n, d], the response (D, length) of each channel to an impulse in it.
    With a C (D, 2N) for both sides the response (2D, length), of which the last D rows are for 1, 2, … steps ahead."""
    states = into.shape[0]
    weights = out[:, :states] * into.T
    back = sum_of_exponentials(weights, rates.unsqueeze(0), length)
    if out.shape[1] == states:
        return back
    weights = out[:, states:] * into.T
    ahead = sum_of_exponentials(weights, rates.unsqueeze(0), length + 1)
    back = torch.cat([back[:, :1] + ahead[:, :1], back[:, 1:]], dim=1)  # both scans see the present
    return torch.cat([back, ahead[:, 1:]])


def _to_complex(x: Tensor, matrix: Tensor) -> Tensor:
    """A complex matrix (N, D) times real x (..., D), as one real product."""
    weight = torch.view_as_real(matrix).transpose(1, 2).flatten(0, 1)  # (2N, D)
    parts = F.linear(x.to(weight.dtype), weight).to(weight.dtype)  # autocast has no complex numbers of half precision
    return torch.view_as_complex(parts.unflatten(-1, (-1, 2)))


def _to_real(states: Tensor, matrix: Tensor) -> Tensor:
    """The real part of a complex matrix (D, N) times complex states (..., N), as one real product."""
    weight = torch.view_as_real(matrix.conj().resolve_conj()).flatten(1)  # (D, 2N)
    return F.linear(torch.view_as_real(states).flatten(-2), weight)


class S5(DiagonalRecurrence):
    """The layer above.

    Args:
        d_model: D.
        state_size: P, even.
        blocks: equal HiPPO-N blocks of the initial state matrix; None for 8, or fewer if those do not divide P/2.
        dt_min: the smallest step Δ at the start.
        dt_max: the largest.
        clip: keep the real part of λ below 0, so that the layer is stable whatever it learns.
        bidirectional: see both sides.
    """

    special_parameters: ClassVar[tuple[str, ...]] = ("eigenvalues", "log_dt", "into")

    def __init__(
        self,
        d_model: int,
        state_size: int,
        *,
        blocks: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        clip: bool = False,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output="linear", device=device, dtype=dtype)
        if state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be even, for conjugate pairs, and at least 2, got {state_size}")
        blocks = math.gcd(8, state_size // 2) if blocks is None else blocks
        if blocks < 1 or state_size // 2 % blocks:
            raise ValueError(f"blocks must divide state_size / 2 = {state_size // 2}, got {blocks}")
        self.state_size, self.blocks, self.dt_min, self.dt_max, self.clip = state_size, blocks, dt_min, dt_max, clip
        pairs = state_size // 2

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.eigenvalues = empty(pairs, 2)  # λ
        self.log_dt = empty(pairs)
        self.into = empty(pairs, d_model, 2)  # B
        self.out = empty(d_model, pairs * (2 if bidirectional else 1), 2)  # C
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
        for out in self.out.chunk(2 if self.bidirectional else 1, dim=1):
            real, imaginary = (_lecun_normal(self.state_size, self.d_model, self.state_size) for _ in range(2))
            out.copy_(torch.view_as_real(torch.complex(real, imaginary) @ vectors))

    def recurrence(self) -> tuple[Tensor, Tensor, Tensor]:
        eigenvalues = as_complex(self.eigenvalues)
        if self.clip:
            eigenvalues = torch.complex(eigenvalues.real.clamp(max=-1e-4), eigenvalues.imag)
        rates = eigenvalues * torch.exp(exact(self.log_dt))
        held = torch.expm1(rates) / eigenvalues  # what an input held for Δ adds to a state
        return rates, held.unsqueeze(-1) * as_complex(self.into), 2 * as_complex(self.out)

    def _out(self, y: Tensor) -> Tensor:
        y = F.gelu(y)
        return y * torch.sigmoid(self.out_proj(y))

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, state_size={self.state_size}, blocks={self.blocks}, dt_min={self.dt_min}, "
            f"dt_max={self.dt_max}, clip={self.clip}, bidirectional={self.bidirectional}"
        )


def _lecun_normal(fan_in: int, *shape: int) -> Tensor:
    """Variance 1/fan_in, from a normal distribution that is cut off at two of its standard deviations."""
    std = fan_in**-0.5 / 0.87962566103423978  # what the cut takes away
    return nn.init.trunc_normal_(torch.empty(*shape, dtype=torch.float64, device="cpu"), std=std, a=-2 * std, b=2 * std)


@register("s5")
@dataclass(frozen=True, kw_only=True)
class S5Config(Config):
    """S5, with the defaults of the official code.

    Args:
        state_size: P, even; None for about the width (published are 1/8 to 2 of it).
        blocks: HiPPO-N blocks of the initial state matrix; None for 8, or fewer if those do not divide state_size / 2.
        dt_min: smallest step at the start.
        dt_max: largest step at the start.
        clip: keep the real part of the eigenvalues negative.
        bidirectional: see both sides.
    """

    state_size: int | None = None
    blocks: int | None = None
    dt_min: float = 1e-3
    dt_max: float = 0.1
    clip: bool = False
    bidirectional: bool = False

    summary: ClassVar[str] = "one state space for all channels, by parallel scan"
    # As the paper has it; its eigenvalues do begin as those of HiPPO-N. It is stable as there,
    # though without clip it can learn eigenvalues with a positive real part.
    traits: ClassVar[Traits] = Traits(
        decays=True, stable=True, complex=True, recurrent=True, cost="L", state="state_size"
    )

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> S5:
        options = asdict(self)
        if self.state_size is None:
            unit = 2 * max(self.blocks or 1, 1)
            options["state_size"] = -(-d_model // unit) * unit  # the next multiple
        return S5(d_model, **options, device=device, dtype=dtype)
