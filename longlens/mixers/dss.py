"""DSS (Gupta, Gu & Berant 2022, Diagonal State Spaces are as Effective as Structured State Spaces). All channels have
the same Λ (N complex numbers), each has weights w and a step size Δ; with λ = Δ·Λ

    exp:      k[l] = Re Σ_n w_n·(exp(λ_n) - 1)/Λ_n·exp(λ_n·l),           Λ = -exp(a) + i·ω
    softmax:  k[l] = Re Σ_n w_n/Λ_n·exp(λ_n·l) / Σ_{m < M} exp(λ_n·m),   Λ = a + i·ω

and y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. Λ is initialized as the eigenvalues of the HiPPO-LegS matrix
of size 2N without its part of rank one, those with a positive imaginary part.

In the paper M is the length of the batch, so that outputs would change with the padding. Here it is fixed, by default
as the longest length that the layer is built for. A softmax also allows Re Λ > 0, exponentials that grow with distance:
they are computed from the far end, where they are 1.

Shapes: B sequences, D channels, N states, K kernels: D, or 2D for both sides.
"""

from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import log_uniform_
from longlens.mixers.diagonal import DiagonalSpace
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.checks import at_least_float32
from longlens.ops.exponentials import as_complex, sum_of_exponentials
from longlens.ops.hippo import dplr_legs
from longlens.options import Positive, Size

_EPSILON = 1e-7  # of the official code, against a division by 0


def dss_kernel_reference(
    weights: Tensor, poles: Tensor, scaled: Tensor, length: int, softmax_length: int | None = None
) -> Tensor:
    """The kernels (D, length) of w (D, N), Λ (N,) and λ (D, N), by the formula above: of DSS-softmax, or of DSS-exp if
    there is no ``softmax_length``."""
    steps = torch.arange(max(length, softmax_length or 0), device=scaled.device)
    powers = torch.exp(scaled.unsqueeze(-1) * steps)  # (D, N, steps)
    factor = torch.exp(scaled) - 1 if softmax_length is None else 1 / powers[..., :softmax_length].sum(-1)
    return torch.einsum("dn,dnl->dl", weights * factor / poles, powers[..., :length]).real


def dss_exp_modes(weights: Tensor, poles: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (K, N) and rates (D, N) of the exponentials of DSS-exp, of w (K, N), Λ (N,) and λ (D, N)."""
    inputs = torch.expm1(scaled) * poles.conj() / poles.abs().square().clamp(_EPSILON)
    return weights * _for_kernels(inputs, weights), scaled


def dss_softmax_modes(
    weights: Tensor, poles: Tensor, scaled: Tensor, softmax_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights (K, N) of the exponentials of DSS-softmax, their rates (D, N), and which of them grow (N,). A rate
    that grows is returned with the other sign, for exponentials from the far end: exp(rate·(M - 1 - l))."""
    grows = poles.real > 0
    rates = torch.where(grows, -scaled, scaled)
    total = torch.expm1(rates * softmax_length) * poles  # Σ_{m < M} exp(rate·m) = (exp(rate·M) - 1)/(exp(rate) - 1)
    inputs = torch.expm1(rates) * total.conj() / (total.abs().square() + _EPSILON)
    return weights * _for_kernels(inputs, weights), rates, grows


def dss_softmax_kernel(weights: Tensor, poles: Tensor, scaled: Tensor, length: int, softmax_length: int) -> Tensor:
    """The kernels (K, length) of DSS-softmax."""
    weights, rates, grows = dss_softmax_modes(weights, poles, scaled, softmax_length)
    end = _for_kernels(torch.exp(torch.where(grows, rates, 0) * (softmax_length - length)), weights)
    parts = torch.cat([weights.masked_fill(grows, 0), (weights * end).masked_fill(~grows, 0)])
    near, far = sum_of_exponentials(parts, rates, length).chunk(2)
    return near + far.flip(1)


def _for_kernels(x: Tensor, weights: Tensor) -> Tensor:
    """(D, N) -> (K, N), repeated for the kernels of later inputs."""
    return x.repeat(weights.shape[0] // x.shape[0], 1)


# Table 10 has no special initialization for it, though its text names DSS among the layers that are initialized with
# HiPPO. It is stable as there, though a softmax can learn Re Λ > 0, with which outputs grow beyond its length.
@register(
    "dss",
    "diagonal state space with a softmax",
    Traits(decays=True, stable=True, complex=True, cost="L log L", state="2·D·state_size"),
)
class DSS(DiagonalSpace):
    """Diagonal state spaces. (B, L, D) -> (B, L, D). The defaults are those of the authors' configs for the Long Range
    Arena, but for the output, which is linear there, and glu in their later configs.

    Args:
        variant: Form of the kernel: softmax, or exp, which needs no length.
        state_size: State size N of each channel, in complex numbers.
        softmax_length: Length M of the softmax; none for the longest length of the task.
        separate_dt: Use one step size for the real part of Λ and another for the imaginary part.
        max_length: Longest length of the task, for a softmax without a length of its own.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_dt", "real", "imag", "weights")
    groups: ClassVar[dict[str, tuple[str, ...]]] = {"ssm": ("real", "imag"), "c": ("weights",), "dt": ("log_dt",)}

    def __init__(
        self,
        d_model: Size,
        *,
        variant: Literal["softmax", "exp"] = "softmax",
        state_size: Size = 64,
        softmax_length: Size | None = None,
        separate_dt: bool = True,
        dt_min: Positive = 0.001,
        dt_max: Positive = 0.1,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        self.variant, self.state_size = variant, state_size
        self.softmax_length = max_length if softmax_length is None else softmax_length
        self.dt_min, self.dt_max = dt_min, dt_max
        self.log_dt = nn.Parameter(torch.empty(d_model, 2 if separate_dt else 1, **factory))
        self.real = nn.Parameter(torch.empty(state_size, **factory))  # a
        self.imag = nn.Parameter(torch.empty(state_size, **factory))  # ω
        self.weights = nn.Parameter(torch.empty(self.kernels, state_size, 2, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        poles = dplr_legs(2 * self.state_size)[0]
        with torch.no_grad():
            self.log_dt.copy_(self.log_dt[:, :1].expand_as(self.log_dt))
            self.real.copy_(poles.real if self.variant == "softmax" else (-poles.real).log())
            self.imag.copy_(poles.imag)
        nn.init.normal_(self.weights)

    def modes(self) -> tuple[Tensor, Tensor]:
        return dss_exp_modes(*self.system())

    def kernel(self, length: int) -> Tensor:
        if self.variant == "exp":
            return super().kernel(length)
        return dss_softmax_kernel(*self.system(), length, self.softmax_length)

    def constants(self) -> tuple[Any, ...]:
        """Beside the weights and factors, the rates (D, N) of the exponentials that grow, None if there are none."""
        if self.variant == "exp":
            return *super().constants(), None
        weights, rates, grows = dss_softmax_modes(*self.system(), self.softmax_length)
        decay = torch.exp(torch.where(grows, 0, rates))
        some = torch.compiler.is_compiling() or grows.any()  # a traced tensor has no values to look at
        return weights, decay, torch.where(grows, rates, 0) if some else None

    def recur(self, x: Tensor, past: Any, *constants: Any) -> tuple[Tensor, Any]:
        """The past is (B, D, N), and if some exponentials grow, the number of steps so far."""
        weights, decay, growing = constants
        if growing is None:
            return super().recur(x, past, weights, decay)
        # What grows is summed as exp(rate·j)·u_j for step j and read with exp(rate·(M - 1 - t)): neither overflows.
        states, t = (0, 0) if past is None else past
        states = decay * states + torch.exp(growing * t) * at_least_float32(x).unsqueeze(-1)
        weights = weights * torch.exp(growing * (self.softmax_length - 1 - t))
        return (weights * states).real.sum(dim=-1).to(x.dtype), (states, t + 1)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """w (K, N), Λ (N,) and λ (D, N)."""
        real, imag, dt = at_least_float32(self.real), at_least_float32(self.imag), at_least_float32(self.log_dt).exp()
        if self.variant == "exp":
            real = -real.exp()
        return as_complex(self.weights), torch.complex(real, imag), torch.complex(dt[:, :1] * real, dt[:, -1:] * imag)
