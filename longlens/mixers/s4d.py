"""S4D: S4 with a diagonal matrix (Gu, Gupta, Goel & Ré 2022, On the Parameterization and Initialization of Diagonal
State Space Models). Each channel u of the input drives a state of N numbers,

    x'(t) = A·x(t) + 1·u(t),   y(t) = 2·Re(C·x(t)),   A = -exp(a) + i·ω   (N/2 numbers, the other half are conjugates)

which is sampled with a step size Δ of the channel:

    k[l] = 2·Re Σ_n C_n·B̄_n·Ā_n^l,   zero-order hold:  Ā = exp(ΔA),                B̄ = (Ā - 1)/A
                                     bilinear:         Ā = (1 + ΔA/2)/(1 - ΔA/2),  B̄ = Δ/(1 - ΔA/2)

and y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. A is initialized as -½ + i·ω_n for n = 0 … N/2 - 1 with

    lin:   ω_n = π·n
    inv:   ω_n = N/π·(N/(2n + 1) - 1)
    legs:  the eigenvalues of the HiPPO-LegS matrix without its part of rank one
"""

import math
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import log_uniform_
from longlens.mixers.diagonal import DiagonalSpace, Discretization, s4d_frequencies, s4d_modes, s4d_system
from longlens.mixers.registry import Factory, Traits, register
from longlens.options import Even, Positive, Size


def s4d_kernel_reference(
    c: Tensor, a: Tensor, dt: Tensor, length: int, discretization: Discretization = "zoh"
) -> Tensor:
    """The kernels (D, length) of C (D, N/2), A (D or 1, N/2) and Δ (D, 1), by the formula above."""
    if discretization == "zoh":
        step, inputs = torch.exp(dt * a), (torch.exp(dt * a) - 1) / a
    else:
        step, inputs = (1 + dt * a / 2) / (1 - dt * a / 2), dt / (1 - dt * a / 2)
    powers = step.unsqueeze(-1) ** torch.arange(length, device=a.device)  # (D, N/2, length)
    return 2 * torch.einsum("dn,dnl->dl", c * inputs, powers).real


@register(
    "s4d",
    "diagonal state space",
    Traits(decays=True, special_init=True, stable=True, complex=True, cost="L log L", state="D·state_size"),
)
class S4D(DiagonalSpace):
    """A diagonal state space for each channel. (B, L, D) -> (B, L, D). The defaults are those of the authors' s4d.py.

    Args:
        init: Frequencies at initialization: lin, inv or legs.
        discretization: Discretization rule: zoh (zero-order hold) or bilinear.
        tied_a: Share one A among all channels.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_dt", "a_real", "a_imag")

    def __init__(
        self,
        d_model: Size,
        *,
        state_size: Even = 64,
        init: Literal["lin", "inv", "legs"] = "lin",
        discretization: Literal["zoh", "bilinear"] = "zoh",
        tied_a: bool = False,
        dt_min: Positive = 0.001,
        dt_max: Positive = 0.1,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        self.state_size = state_size
        self.init: Literal["lin", "inv", "legs"] = init
        self.discretization: Discretization = discretization
        self.dt_min, self.dt_max = dt_min, dt_max
        pairs = state_size // 2
        self.log_dt = nn.Parameter(torch.empty(d_model, 1, **factory))
        self.a_real = nn.Parameter(torch.empty(1 if tied_a else d_model, pairs, **factory))  # a: the logarithm of -Re A
        self.a_imag = nn.Parameter(torch.empty(1 if tied_a else d_model, pairs, **factory))  # ω
        self.c = nn.Parameter(torch.empty(self.kernels, pairs, 2, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        nn.init.constant_(self.a_real, math.log(0.5))
        self.a_imag.copy_(s4d_frequencies(self.init, self.state_size).expand_as(self.a_imag))
        nn.init.normal_(self.c, std=0.5**0.5)  # a variance of 1 for each complex number

    def modes(self) -> tuple[Tensor, Tensor]:
        return s4d_modes(*self.system(), self.discretization)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """C (D or 2D, N/2), A (D or 1, N/2) and Δ (D, 1)."""
        return s4d_system(self.c, self.a_real, self.a_imag, self.log_dt)
