"""What diagonal state spaces share: kernels that are sums of exponentials, those of S4D, which H3 has as well, and the
recurrence of S5 and LRU.

Shapes: B sequences, L steps, D channels, N complex states (of conjugate pairs one each), K kernels: D, or 2D for both
sides.
"""

import math
from abc import abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.mixers.common import StateSpace, check_causal, check_inputs, hide_padding
from longlens.ops.checks import at_least_float32
from longlens.ops.exponentials import as_complex, decay_factors, step_exponentials, sum_of_exponentials
from longlens.ops.hippo import dplr_legs
from longlens.ops.scan import linear_scan

Discretization = Literal["zoh", "bilinear"]


class DiagonalSpace(StateSpace):
    """A state space for each channel, whose kernel is a sum of exponentials. A layer derives from it and writes
    ``modes``."""

    @abstractmethod
    def modes(self) -> tuple[Tensor, Tensor]:
        """The weights (K, N) and rates (D or 1, N) of the exponentials."""

    def kernel(self, length: int) -> Tensor:
        return sum_of_exponentials(*self.modes(), length)

    def constants(self) -> tuple[Any, ...]:
        """The weights (D, N), and what is left of each exponential after a step, (D or 1, N)."""
        weights, rates = self.modes()
        return weights, decay_factors(rates)

    def recur(self, x: Tensor, past: Any, *constants: Any) -> tuple[Tensor, Any]:
        """The past is (B, D, N)."""
        weights, decay = constants
        return step_exponentials(weights, decay, x, past)


def s4d_frequencies(init: Literal["lin", "inv", "legs"], state_size: int) -> Tensor:
    """The imaginary parts ω (N,) of A at initialization, in float64; ``state_size`` counts both of a pair."""
    n = torch.arange(state_size // 2, dtype=torch.float64, device="cpu")
    if init == "lin":
        return math.pi * n
    if init == "inv":
        return state_size / math.pi * (state_size / (2 * n + 1) - 1)
    return dplr_legs(state_size)[0].imag


def s4d_system(c: Tensor, a_real: Tensor, a_imag: Tensor, log_dt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """C (K, N), A (D or 1, N) and Δ (D, 1) of the parameters C (K, N, 2), log(-Re A), Im A and log Δ, in float32 at the
    least."""
    a = torch.complex(-at_least_float32(a_real).exp(), at_least_float32(a_imag))
    return as_complex(c), a, at_least_float32(log_dt).exp()


def s4d_modes(c: Tensor, a: Tensor, dt: Tensor, discretization: Discretization = "zoh") -> tuple[Tensor, Tensor]:
    """The weights 2·C·B̄ (K, N) and rates log Ā (D, N) of the exponentials that the kernel is a sum of."""
    scaled = dt * a
    if discretization == "zoh":
        rates, inputs = scaled, torch.expm1(scaled) / a
    else:
        rates, inputs = torch.log((1 + scaled / 2) / (1 - scaled / 2)), dt / (1 - scaled / 2)
    return 2 * c * inputs.repeat(c.shape[0] // inputs.shape[0], 1), rates


class DiagonalRecurrence(StateSpace):
    """h_t = a ⊙ h_{t-1} + B x_t, y_t = Re(C h_t): a diagonal recurrence that all channels write to and read from. A
    layer derives from it and writes ``recurrence``."""

    @abstractmethod
    def recurrence(self) -> tuple[Tensor, Tensor, Tensor]:
        """log a (N,), B (N, D) and C (D, N), for both sides (D, 2N), all complex."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        decay, into, out = self.constants()
        inputs = _to_complex(x, into)
        states = linear_scan(decay, inputs)
        if self.bidirectional:
            states = torch.cat([states, linear_scan(decay, inputs, reverse=True)], dim=-1)
        return self._out(_to_real(states, out).to(x.dtype) + self.skip * x)

    def kernel(self, length: int) -> Tensor:
        """k[d, l] = Re Σ_n C[d, n]·a[n]^l·B[n, d], the response of a channel to itself; those to others are sums of the
        same exponentials with other weights."""
        rates, into, out = self.recurrence()
        past, *later = (
            sum_of_exponentials(side * into.T, rates.unsqueeze(0), length + start)
            for start, side in enumerate(out.split(len(rates), dim=1))
        )
        if not later:
            return past
        past = torch.cat([past[:, :1] + later[0][:, :1], past[:, 1:]], dim=1)  # both scans see the present
        return torch.cat([past, later[0][:, 1:]])

    def constants(self) -> tuple[Tensor, Tensor, Tensor]:
        """a, B and C."""
        rates, into, out = self.recurrence()
        return torch.exp(rates), into, out

    def recur(self, x: Tensor, past: Tensor | None, *constants: Tensor) -> tuple[Tensor, Tensor]:
        """The past is h, (B, N)."""
        decay, into, out = constants
        inputs = _to_complex(x, into)
        past = inputs if past is None else decay * past + inputs
        return _to_real(past, out).to(x.dtype), past

    def prefill(self, x: Tensor) -> tuple[Tensor, Any]:
        check_causal("prefill", not self.bidirectional)
        check_inputs(x, None, self.d_model)
        if x.shape[1] == 0:
            return self(x), None
        constants = decay, into, out = self.constants()
        states = linear_scan(decay, _to_complex(x, into))
        return self._out(_to_real(states, out).to(x.dtype) + self.skip * x), (constants, states[:, -1])


def diagonal_recurrence_reference(decay: Tensor, into: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """Re(C h_t) for h_t = decay ⊙ h_{t-1} + B x_t, step by step; with a C for both sides, plus the same from the end.
    (B, L, D) -> (B, L, D)."""
    sides = []
    for c, inputs in zip(out.split(len(decay), dim=1), (x, x.flip(1)), strict=False):
        state, outputs = torch.zeros_like(decay), []
        for x_t in inputs.unbind(1):
            state = decay * state + x_t.to(decay.dtype) @ into.T
            outputs.append((state @ c.T).real)
        sides.append(torch.stack(outputs, dim=1))
    return sides[0] if len(sides) == 1 else sides[0] + sides[1].flip(1)


def _to_complex(x: Tensor, matrix: Tensor) -> Tensor:
    """A complex matrix (N, D) times real x (..., D), as one real product."""
    weight = torch.view_as_real(matrix).transpose(1, 2).flatten(0, 1)  # (2N, D)
    parts = F.linear(x.to(weight.dtype), weight).to(weight.dtype)  # autocast has no complex numbers of half precision
    return torch.view_as_complex(parts.unflatten(-1, (-1, 2)))


def _to_real(states: Tensor, matrix: Tensor) -> Tensor:
    """The real part of a complex matrix (D, N) times complex states (..., N), as one real product."""
    weight = torch.view_as_real(matrix.conj().resolve_conj()).flatten(1)  # (D, 2N)
    return F.linear(torch.view_as_real(states).flatten(-2), weight)
