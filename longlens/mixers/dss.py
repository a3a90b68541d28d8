"""DSS (Gupta, Gu & Berant 2022, Diagonal State Spaces are as Effective as Structured State Spaces). All channels have
the same Λ (N complex numbers), each has weights w and a step size Δ; with λ = Δ·Λ

    exp:      k[l] = Re Σ_n w_n·(exp(λ_n) - 1)/Λ_n·exp(λ_n·l),           Λ = -exp(a) + i·ω
    softmax:  k[l] = Re Σ_n w_n/Λ_n·exp(λ_n·l) / Σ_{m < M} exp(λ_n·m),   Λ = a + i·ω

and y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. Λ begins as the eigenvalues of the HiPPO-LegS matrix of size
2N without its part of rank one, those with a positive imaginary part.

In the paper M is the length L of the batch, so that the outputs of a sequence would change with the padding around it.
Here M is fixed, by default as the longest length that the layer is built for: inputs of that length get the paper's
kernel. A softmax also allows Re Λ > 0, exponentials that grow with distance: they are computed from the far end, where
they are 1.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import StateSpace
from longlens.ops.exponentials import as_complex, exact, log_uniform_, step_exponentials, sum_of_exponentials
from longlens.ops.hippo import dplr_legs

_EPSILON = 1e-7  # of the official code, against a division by 0


def dss_exp_modes(weights: Tensor, poles: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (channels, N) and rates (D, N) of the exponentials that make the kernel of DSS-exp, of w (channels,
    N), Λ (N,) and λ (D, N)."""
    inputs = torch.expm1(scaled) * poles.conj() / poles.abs().square().clamp(_EPSILON)
    return weights * _for_channels(inputs, weights), scaled


def dss_exp_kernel(weights: Tensor, poles: Tensor, scaled: Tensor, length: int) -> Tensor:
    """The kernels (channels, length) of DSS-exp."""
    return sum_of_exponentials(*dss_exp_modes(weights, poles, scaled), length)


def dss_softmax_modes(
    weights: Tensor, poles: Tensor, scaled: Tensor, softmax_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights (channels, N) of the exponentials of DSS-softmax, their rates (D, N), and which of them grow (N,). A
    rate that grows is returned with the other sign, for exponentials from the far end: exp(rate·(M - 1 - l))."""
    grows = poles.real > 0
    rates = torch.where(grows, -scaled, scaled)
    total = torch.expm1(rates * softmax_length) * poles  # Σ_{m < M} exp(rate·m) = (exp(rate·M) - 1)/(exp(rate) - 1)
    inputs = torch.expm1(rates) * total.conj() / (total.abs().square() + _EPSILON)
    return weights * _for_channels(inputs, weights), rates, grows


def dss_softmax_kernel(weights: Tensor, poles: Tensor, scaled: Tensor, length: int, softmax_length: int) -> Tensor:
    """The kernels (channels, length) of DSS-softmax."""
    weights, rates, grows = dss_softmax_modes(weights, poles, scaled, softmax_length)
    end = _for_channels(torch.exp(torch.where(grows, rates, 0) * (softmax_length - length)), weights)
    parts = torch.cat([weights.masked_fill(grows, 0), (weights * end).masked_fill(~grows, 0)])
    near, far = sum_of_exponentials(parts, rates, length).chunk(2)
    return near + far.flip(1)


def _for_channels(x: Tensor, weights: Tensor) -> Tensor:
    """(D, N) -> (channels, N), once more for those that look ahead."""
    return x.repeat(weights.shape[0] // x.shape[0], 1)


class DSS(StateSpace):
    """(B, L, D) -> (B, L, D); the options are described in ``DSSConfig``. With ``bidirectional``, the kernel of what is
    ahead has weights of its own, and the same Λ and Δ."""

    special_parameters: ClassVar[tuple[str, ...]] = ("log_dt", "real", "imag", "weights")

    def __init__(
        self,
        d_model: int,
        *,
        variant: str = "softmax",
        state_size: int = 64,
        softmax_length: int = MAX_LENGTH,
        separate_dt: bool = True,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        bidirectional: bool = False,
        output: str = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        if variant not in ("softmax", "exp"):
            raise ValueError(f"variant must be softmax or exp, got {variant!r}")
        if state_size < 1:
            raise ValueError(f"state_size must be at least 1, got {state_size}")
        if softmax_length < 1:
            raise ValueError(f"softmax_length must be at least 1, got {softmax_length}")
        self.variant, self.state_size = variant, state_size
        self.softmax_length = softmax_length
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

    def kernel(self, length: int) -> Tensor:
        if self.variant == "exp":
            return dss_exp_kernel(*self._parameters_of_kernel(), length)
        return dss_softmax_kernel(*self._parameters_of_kernel(), length, self.softmax_length)

    def recur(self, x: Tensor, state: tuple[Tensor, int] | None) -> tuple[Tensor, tuple[Tensor, int]]:
        """The state is (B, D, N) and the number of steps so far."""
        past, t = (None, 0) if state is None else state
        if self.variant == "exp":
            y, past = step_exponentials(*dss_exp_modes(*self._parameters_of_kernel()), x, past)
            return y, (past, t + 1)
        # What grows is summed as exp(rate·j)·u_j for step j and read with exp(rate·(M - 1 - t)): neither overflows.
        weights, rates, grows = dss_softmax_modes(*self._parameters_of_kernel(), self.softmax_length)
        growing, decaying = torch.where(grows, rates, 0), torch.where(grows, 0, rates)
        inputs = torch.exp(growing * t) * exact(x).unsqueeze(-1)
        past = inputs if past is None else torch.exp(decaying) * past + inputs
        read = torch.exp(growing * (self.softmax_length - 1 - t))
        return (weights * read * past).real.sum(dim=-1).to(x.dtype), (past, t + 1)

    def _parameters_of_kernel(self) -> tuple[Tensor, Tensor, Tensor]:
        """w (channels, N), Λ (N,) and λ (D, N)"""
        real, imag, dt = exact(self.real), exact(self.imag), exact(self.log_dt).exp()
        if self.variant == "exp":
            real = -real.exp()
        return as_complex(self.weights), torch.complex(real, imag), torch.complex(dt[:, :1] * real, dt[:, -1:] * imag)

    def extra_repr(self) -> str:
        length = f", softmax_length={self.softmax_length}" if self.variant == "softmax" else ""
        return f"{super().extra_repr()}, variant={self.variant!r}, state_size={self.state_size}{length}"


@register("dss")
@dataclass(frozen=True, kw_only=True)
class DSSConfig(Config):
    """Diagonal state spaces. The defaults are those of the authors' configs for the Long Range Arena, but for the
    output, which is linear there; with glu, as in their later configs, it has about the parameters of attention.

    Args:
        variant: softmax, or exp, which needs no length.
        state_size: N, complex numbers for each channel.
        softmax_length: M, over which the softmax is; none for the longest length of the task.
        separate_dt: a step size for the real part of Λ, another for the imaginary part.
        dt_min: smallest step size at the start.
        dt_max: largest step size at the start.
        bidirectional: see both sides, with another kernel for what is ahead.
        output: the last part, glu or a linear projection alone.
    """

    variant: Literal["softmax", "exp"] = "softmax"
    state_size: int = 64
    softmax_length: int | None = None
    separate_dt: bool = True
    dt_min: float = 0.001
    dt_max: float = 0.1
    bidirectional: bool = False
    output: Literal["glu", "linear"] = "glu"

    summary: ClassVar[str] = "diagonal state space with a softmax"
    # Table 10 has no special initialization for it, though its text names DSS among those that begin with HiPPO. It is
    # stable as there, though a softmax can learn Re Λ > 0, with which outputs grow beyond its length.
    traits: ClassVar[Traits] = Traits(decays=True, stable=True, complex=True, cost="L log L", state="2·D·state_size")

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> DSS:
        options = asdict(self)
        if self.softmax_length is None:
            options["softmax_length"] = max_length
        return DSS(d_model, **options, device=device, dtype=dtype)
