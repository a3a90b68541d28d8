"""S4D: S4 with a diagonal matrix (Gu, Gupta, Goel & Ré 2022, On the Parameterization and Initialization of Diagonal
State Space Models). Each channel u of the input drives a state of N numbers,

    x'(t) = A·x(t) + B·u(t),   y(t) = 2·Re(C·x(t)),   A = -exp(a) + i·ω   (N/2 numbers, the other half are conjugates)

which is sampled with a step size Δ of the channel:

    k[l] = 2·Re Σ_n C_n·B̄_n·Ā_n^l,   zero-order hold:  Ā = exp(ΔA),                B̄ = (Ā - 1)/A·B
                                     bilinear:         Ā = (1 + ΔA/2)/(1 - ΔA/2),  B̄ = Δ/(1 - ΔA/2)·B

and y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. A is initialized as -½ + i·ω_n for n = 0 … N/2 - 1 with

    lin:   ω_n = π·n
    inv:   ω_n = N/π·(N/(2n + 1) - 1)
    legs:  the eigenvalues of the HiPPO-LegS matrix without its part of rank one

and B as 1, for legs as that of HiPPO in the basis of the eigenvectors, with an imaginary part of at most 2.
"""

import math
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import log_uniform_
from longlens.mixers.diagonal import DiagonalSpace, Discretization, s4d_frequencies, s4d_modes, s4d_system
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.exponentials import as_complex
from longlens.ops.hippo import clip_inputs, dplr_legs
from longlens.options import Even, Positive, Probability, Size


def s4d_kernel_reference(
    c: Tensor, a: Tensor, dt: Tensor, length: int, discretization: Discretization = "zoh"
) -> Tensor:
    """The kernels (D, length) of C·B (D, N/2), A (D or 1, N/2) and Δ (D, 1), by the formula above."""
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
    """A diagonal state space for each channel. (B, L, D) -> (B, L, D). The defaults are those of the authors' s4d.py;
    their experiments have the bilinear rule, and learn B.

    Args:
        init: Frequencies at initialization: lin, inv or legs, which also decides B.
        discretization: Discretization rule: zoh (zero-order hold) or bilinear.
        tied_a: Share one A, and B, among all channels.
        learn_b: Learn B; otherwise it stays what it is at initialization.
        dropout: Dropout of what the output projection gets, the same channels at all positions of a sequence.
    """

    def __init__(
        self,
        d_model: Size,
        *,
        state_size: Even = 64,
        init: Literal["lin", "inv", "legs"] = "lin",
        discretization: Literal["zoh", "bilinear"] = "zoh",
        tied_a: bool = False,
        learn_b: bool = False,
        dt_min: Positive = 0.001,
        dt_max: Positive = 0.1,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        dropout: Probability = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, dropout=dropout, **factory)
        self.state_size = state_size
        self.init: Literal["lin", "inv", "legs"] = init
        self.discretization: Discretization = discretization
        self.dt_min, self.dt_max = dt_min, dt_max
        pairs = state_size // 2
        self.log_dt = nn.Parameter(torch.empty(d_model, 1, **factory))
        self.a_real = nn.Parameter(torch.empty(1 if tied_a else d_model, pairs, **factory))  # a: the logarithm of -Re A
        self.a_imag = nn.Parameter(torch.empty(1 if tied_a else d_model, pairs, **factory))  # ω
        self.c = nn.Parameter(torch.empty(self.kernels, pairs, 2, **factory))
        self.b = nn.Buffer(torch.empty(1, pairs, 2, **factory)) if init == "legs" else None  # None for 1
        if learn_b:
            self.b = nn.Parameter(torch.empty(*self.a_real.shape, 2, **factory))
        learned = ("a_real", "a_imag") + ("b",) * learn_b
        self.kernel_parameters: tuple[str, ...] = ("log_dt", *learned)
        self.groups: dict[str, tuple[str, ...]] = {"ssm": learned, "dt": ("log_dt",)}
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        nn.init.constant_(self.a_real, math.log(0.5))
        self.a_imag.copy_(s4d_frequencies(self.init, self.state_size).expand_as(self.a_imag))
        nn.init.normal_(self.c, std=0.5**0.5)  # a variance of 1 for each complex number
        if self.b is not None:
            _, _, b, vectors = dplr_legs(self.state_size)
            b = clip_inputs(b, vectors) if self.init == "legs" else torch.ones_like(b)
            self.b.copy_(torch.view_as_real(b))

    def modes(self) -> tuple[Tensor, Tensor]:
        return s4d_modes(*self.system(), self.discretization)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """C·B (D or 2D, N/2), A (D or 1, N/2) and Δ (D, 1)."""
        c, a, dt = s4d_system(self.c, self.a_real, self.a_imag, self.log_dt)
        return c if self.b is None else c * as_complex(self.b).repeat(len(c) // len(self.b), 1), a, dt
