"""S4D: S4 with a diagonal matrix (Gu, Gupta, Goel & Ré 2022, On the Parameterization and Initialization of Diagonal
State Space Models). Each channel u of the input drives a state of N numbers,

    x'(t) = A·x(t) + 1·u(t),   y(t) = 2·Re(C·x(t)),   A = -exp(a) + i·ω   (N/2 numbers, the other half are conjugates)

which is sampled with a step size Δ of the channel:

    k[l] = 2·Re Σ_n C_n·B̄_n·Ā_n^l,   zero-order hold:  Ā = exp(ΔA),                B̄ = (Ā - 1)/A
                                     bilinear:         Ā = (1 + ΔA/2)/(1 - ΔA/2),  B̄ = Δ/(1 - ΔA/2)

and y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. A begins as -½ + i·ω_n for n = 0 … N/2 - 1 with

    lin:   ω_n = π·n
    inv:   ω_n = N/π·(N/(2n + 1) - 1)
    legs:  the eigenvalues of the HiPPO-LegS matrix without its part of rank one
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import StateSpace
from longlens.ops.exponentials import as_complex, exact, log_uniform_, step_exponentials, sum_of_exponentials
from longlens.ops.hippo import dplr_legs


def s4d_modes(c: Tensor, a: Tensor, dt: Tensor, discretization: str = "zoh") -> tuple[Tensor, Tensor]:
    """The weights (channels, N/2) and rates (D, N/2) of the exponentials that make the kernel: 2·C·B̄ and log Ā, of C
    (channels, N/2), A (D, N/2) or (1, N/2), and Δ (D, 1)."""
    scaled = dt * a
    if discretization == "zoh":
        rates, inputs = scaled, torch.expm1(scaled) / a
    else:
        rates, inputs = torch.log((1 + scaled / 2) / (1 - scaled / 2)), dt / (1 - scaled / 2)
    return 2 * c * inputs.repeat(c.shape[0] // inputs.shape[0], 1), rates


def s4d_kernel(c: Tensor, a: Tensor, dt: Tensor, length: int, discretization: str = "zoh") -> Tensor:
    """The kernels (channels, length)."""
    return sum_of_exponentials(*s4d_modes(c, a, dt, discretization), length)


def s4d_frequencies(init: str, state_size: int) -> Tensor:
    """The imaginary parts ω (N/2,) with which A begins, in float64."""
    n = torch.arange(state_size // 2, dtype=torch.float64, device="cpu")
    if init == "lin":
        return math.pi * n
    if init == "inv":
        return state_size / math.pi * (state_size / (2 * n + 1) - 1)
    return dplr_legs(state_size)[0].imag


class S4D(StateSpace):
    """(B, L, D) -> (B, L, D); the options are described in ``S4DConfig``. With ``bidirectional``, the kernel of what is
    ahead has a C of its own, and the same A and Δ."""

    special_parameters: ClassVar[tuple[str, ...]] = ("log_dt", "a_real", "a_imag")

    def __init__(
        self,
        d_model: int,
        *,
        state_size: int = 64,
        init: str = "lin",
        discretization: str = "zoh",
        tied_a: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        bidirectional: bool = False,
        output: str = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        if state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be even, for conjugate pairs, and at least 2, got {state_size}")
        if init not in ("lin", "inv", "legs"):
            raise ValueError(f"init must be lin, inv or legs, got {init!r}")
        if discretization not in ("zoh", "bilinear"):
            raise ValueError(f"discretization must be zoh or bilinear, got {discretization!r}")
        self.state_size, self.init, self.discretization = state_size, init, discretization
        self.dt_min, self.dt_max = dt_min, dt_max
        pairs = state_size // 2
        self.log_dt = nn.Parameter(torch.empty(d_model, 1, **factory))
        self.a_real = nn.Parameter(torch.empty(1 if tied_a else d_model, pairs, **factory))  # a: the logarithm of -Re A
        self.a_imag = nn.Parameter(torch.empty(1 if tied_a else d_model, pairs, **factory))
        self.c = nn.Parameter(torch.empty(self.kernels, pairs, 2, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        nn.init.constant_(self.a_real, math.log(0.5))
        with torch.no_grad():
            self.a_imag.copy_(s4d_frequencies(self.init, self.state_size).expand_as(self.a_imag))
        nn.init.normal_(self.c, std=0.5**0.5)  # a variance of 1 for each complex number

    def kernel(self, length: int) -> Tensor:
        return s4d_kernel(*self._system(), length, self.discretization)

    def recur(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return step_exponentials(*s4d_modes(*self._system(), self.discretization), x, state)

    def _system(self) -> tuple[Tensor, Tensor, Tensor]:
        """C (channels, N/2), A (D or 1, N/2) and Δ (D, 1)."""
        a = torch.complex(-exact(self.a_real).exp(), exact(self.a_imag))
        return as_complex(self.c), a, exact(self.log_dt).exp()

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, state_size={self.state_size}, init={self.init!r}, "
            f"discretization={self.discretization!r}"
        )


@register("s4d")
@dataclass(frozen=True, kw_only=True)
class S4DConfig(Config):
    """A diagonal state space for each channel. The defaults are those of the authors' own s4d.py.

    Args:
        state_size: N of each channel, in conjugate pairs.
        init: the frequencies at the start: lin, inv or legs.
        discretization: zoh (zero-order hold) or bilinear.
        tied_a: one A for all channels instead of one for each.
        dt_min: smallest step size at the start.
        dt_max: largest step size at the start.
        bidirectional: see both sides, with another kernel for what is ahead.
        output: the last part, glu or a linear projection alone.
    """

    state_size: int = 64
    init: Literal["lin", "inv", "legs"] = "lin"
    discretization: Literal["zoh", "bilinear"] = "zoh"
    tied_a: bool = False
    dt_min: float = 0.001
    dt_max: float = 0.1
    bidirectional: bool = False
    output: Literal["glu", "linear"] = "glu"

    summary: ClassVar[str] = "diagonal state space"
    traits: ClassVar[Traits] = Traits(
        decays=True, special_init=True, stable=True, complex=True, cost="L log L", state="D·state_size"
    )

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> S4D:
        return S4D(d_model, **asdict(self), device=device, dtype=dtype)
