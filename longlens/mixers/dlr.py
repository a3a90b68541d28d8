"""DLR: diagonal linear RNNs (Gupta, Mehta & Berant 2022, Simplifying and Understanding State Space Models with Diagonal
Linear RNNs). A state space without sampling: each channel u of the input drives N complex numbers,

    x_t = λ ⊙ x_{t-1} + 1·u_t,   y_t = Re(w·x_t),   λ_n = exp(-a_n² + i·θ_n),   k[l] = Re Σ_n w_n·λ_n^l

with λ the same in all channels, and weights w of each. Then y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. The
angles are initialized as those of the N-th roots of unity, θ_n = 2πn/N, with which a kernel of length N can be any; a²
as Δ/2 for a step size Δ of each n, log-uniform; w as normal numbers divided by N.
"""

import math
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import StateSpace
from longlens.mixers.diagonal import check_order
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.exponentials import as_complex, log_uniform_, step_exponentials, sum_of_exponentials
from longlens.ops.precision import at_least_float32
from longlens.options import Positive, Size


def dlr_reference(weights: Tensor, damping: Tensor, angles: Tensor, u: Tensor) -> Tensor:
    """The outputs y (B, L, D) of inputs u (B, L, D), for w (D, N), a (N,) and θ (N,): the recurrence above."""
    decay = torch.exp(torch.complex(-damping * damping, angles))  # λ
    state, outputs = torch.zeros_like(weights), []
    for u_t in u.unbind(1):
        state = decay * state + u_t.unsqueeze(-1)  # (B, D, N)
        outputs.append((weights * state).sum(-1).real)
    return torch.stack(outputs, dim=1)


def dlr_kernel(weights: Tensor, damping: Tensor, angles: Tensor, length: int) -> Tensor:
    """The kernels (K, length) of w (K, N), a (N,) and θ (N,), with K = D, or K = 2D for both sides."""
    return sum_of_exponentials(weights, dlr_rates(damping, angles), length)


def dlr_rates(damping: Tensor, angles: Tensor) -> Tensor:
    """log λ, (1, N)."""
    return torch.complex(-at_least_float32(damping).square(), at_least_float32(angles)).unsqueeze(0)


@register(
    "dlr", "diagonal linear RNN", Traits(decays=True, stable=True, complex=True, cost="L log L", state="2·D·state_size")
)
class DLR(StateSpace):
    """A diagonal linear RNN. (B, L, D) -> (B, L, D).

    The defaults are those of the authors' configs (the output that for ListOps-SubTrees), but for a smaller state:
    theirs has 1024 numbers, or 4096 for very long inputs, with which the weights alone are many times the parameters of
    attention.

    Args:
        d_model: Width D.
        state_size: State size N of each channel, in complex numbers.
        init: Angles at initialization: roots (of unity), or normal numbers.
        dt_min: Smallest step size at initialization, which is twice the decay in a step.
        dt_max: Largest step size at initialization.
        bidirectional: See both sides, with a second set of weights for later inputs.
        output: Output projection: glu (gated) or linear.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("damping", "angles", "weights")

    def __init__(
        self,
        d_model: Size,
        *,
        state_size: Size = 128,
        init: Literal["roots", "normal"] = "roots",
        dt_min: Positive = 0.0001,
        dt_max: Positive = 0.1,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        check_order(dt_min=dt_min, dt_max=dt_max)
        self.state_size, self.init = state_size, init
        self.dt_min, self.dt_max = dt_min, dt_max
        self.damping = nn.Parameter(torch.empty(state_size, **factory))  # a
        self.angles = nn.Parameter(torch.empty(state_size, **factory))  # θ
        self.weights = nn.Parameter(torch.empty(self.kernels, state_size, 2, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        log_uniform_(self.damping, self.dt_min, self.dt_max)
        nn.init.normal_(self.angles)
        self.damping.exp_().div_(2).sqrt_()
        if self.init == "roots":
            self.angles.copy_(2 * math.pi / self.state_size * torch.arange(self.state_size, dtype=torch.float64))
        nn.init.normal_(self.weights, std=1 / self.state_size)

    def kernel(self, length: int) -> Tensor:
        return dlr_kernel(as_complex(self.weights), self.damping, self.angles, length)

    def recur(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return step_exponentials(as_complex(self.weights), dlr_rates(self.damping, self.angles), x, state)
