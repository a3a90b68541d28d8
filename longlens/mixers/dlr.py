"""DLR: diagonal linear RNNs (Gupta, Mehta & Berant 2022, Simplifying and Understanding State Space Models with Diagonal
Linear RNNs). A state space without sampling: each channel u of the input drives N complex numbers,

    x_t = λ ⊙ x_{t-1} + 1·u_t,   y_t = Re(w·x_t),   λ_n = exp(-a_n² + i·θ_n),   k[l] = Re Σ_n w_n·λ_n^l

with λ the same in all channels, and weights w of each. Then y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. The
angles begin as those of the N-th roots of unity, θ_n = 2πn/N, with which a kernel of length N can be any; a² as Δ/2 for
a step size Δ of each n, log-uniform; w as normal numbers divided by N.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import StateSpace
from longlens.ops.exponentials import as_complex, exact, log_uniform_, step_exponentials, sum_of_exponentials


def dlr_kernel(weights: Tensor, damping: Tensor, angles: Tensor, length: int) -> Tensor:
    """The kernels (channels, length) of w (channels, N), a (N,) and θ (N,)."""
    return sum_of_exponentials(weights, dlr_rates(damping, angles), length)


def dlr_rates(damping: Tensor, angles: Tensor) -> Tensor:
    """log λ, (1, N)."""
    return torch.complex(-exact(damping).square(), exact(angles)).unsqueeze(0)


class DLR(StateSpace):
    """(B, L, D) -> (B, L, D); the options are described in ``DLRConfig``. With ``bidirectional``, the kernel of what is
    ahead has weights of its own, and the same λ."""

    special_parameters: ClassVar[tuple[str, ...]] = ("damping", "angles", "weights")

    def __init__(
        self,
        d_model: int,
        *,
        state_size: int = 128,
        init: str = "roots",
        dt_min: float = 0.0001,
        dt_max: float = 0.1,
        bidirectional: bool = False,
        output: str = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        if state_size < 1:
            raise ValueError(f"state_size must be at least 1, got {state_size}")
        if init not in ("roots", "normal"):
            raise ValueError(f"init must be roots or normal, got {init!r}")
        self.state_size, self.init, self.dt_min, self.dt_max = state_size, init, dt_min, dt_max
        self.damping = nn.Parameter(torch.empty(state_size, **factory))  # a
        self.angles = nn.Parameter(torch.empty(state_size, **factory))  # θ
        self.weights = nn.Parameter(torch.empty(self.kernels, state_size, 2, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        log_uniform_(self.damping, self.dt_min, self.dt_max)
        nn.init.normal_(self.angles)
        with torch.no_grad():
            self.damping.exp_().div_(2).sqrt_()
            if self.init == "roots":
                self.angles.copy_(2 * math.pi / self.state_size * torch.arange(self.state_size, dtype=torch.float64))
        nn.init.normal_(self.weights, std=1 / self.state_size)

    def kernel(self, length: int) -> Tensor:
        return dlr_kernel(as_complex(self.weights), self.damping, self.angles, length)

    def recur(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return step_exponentials(as_complex(self.weights), dlr_rates(self.damping, self.angles), x, state)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, state_size={self.state_size}, init={self.init!r}"


@register("dlr")
@dataclass(frozen=True, kw_only=True)
class DLRConfig(Config):
    """A diagonal linear RNN. The defaults are those of the authors' configs (the output that for ListOps-SubTrees), but
    for a smaller state: theirs has 1024 numbers, or 4096 for very long inputs, with which the weights alone are many
    times the parameters of attention.

    Args:
        state_size: N, complex numbers for each channel.
        init: the angles at the start: the roots of unity, or normal numbers.
        dt_min: smallest step size at the start, which is twice the decay in a step.
        dt_max: largest step size at the start.
        bidirectional: see both sides, with another kernel for what is ahead.
        output: the last part, glu or a linear projection alone.
    """

    state_size: int = 128
    init: Literal["roots", "normal"] = "roots"
    dt_min: float = 0.0001
    dt_max: float = 0.1
    bidirectional: bool = False
    output: Literal["glu", "linear"] = "glu"

    summary: ClassVar[str] = "diagonal linear RNN"
    traits: ClassVar[Traits] = Traits(decays=True, stable=True, complex=True, cost="L log L", state="2·D·state_size")

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> DLR:
        return DLR(d_model, **asdict(self), device=device, dtype=dtype)
