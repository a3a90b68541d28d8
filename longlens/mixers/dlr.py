"""DLR: diagonal linear RNNs (Gupta, Mehta & Berant 2022, Simplifying and Understanding State Space Models with Diagonal
Linear RNNs). A state space without sampling: each channel u of the input drives N complex numbers,

    x_t = λ ⊙ x_{t-1} + 1·u_t,   y_t = Re(w·x_t),   λ_n = exp(-a_n² + i·θ_n),   k[l] = Re Σ_n w_n·λ_n^l

with λ the same in all channels, and weights w of each. Then y = out(gelu(k * x + skip ⊙ x)), see ``Convolution``. The
angles begin as those of the N-th roots of unity, θ_n = 2πn/N, with which a kernel of length N can be any; a² as Δ/2 for
a log-uniform step size Δ of each n; w as normal numbers divided by N.
"""

import math
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import log_uniform_
from longlens.mixers.diagonal import DiagonalSpace
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import at_least_float32
from longlens.ops.exponentials import as_complex
from longlens.options import Positive, Size


def dlr_reference(weights: Tensor, damping: Tensor, angles: Tensor, u: Tensor) -> Tensor:
    """The outputs y (B, L, D) of inputs u (B, L, D), for w (D, N), a (N,) and θ (N,): the recurrence above."""
    decay = torch.exp(torch.complex(-damping * damping, angles))  # λ
    state, outputs = torch.zeros_like(weights), []
    for u_t in u.unbind(1):
        state = decay * state + u_t.unsqueeze(-1)  # (B, D, N)
        outputs.append((weights * state).sum(-1).real)
    return torch.stack(outputs, dim=1)


@register(
    "dlr", "diagonal linear RNN", Traits(decays=True, stable=True, complex=True, cost="L log L", state="2·D·state_size")
)
class DLR(DiagonalSpace):
    """A diagonal linear RNN. (B, L, D) -> (B, L, D). The defaults are those of the authors' configs (the output that
    for ListOps-SubTrees), but for a smaller state: theirs has 1024 numbers, or 4096 for very long inputs.

    Args:
        state_size: State size N of each channel, in complex numbers.
        init: Angles at initialization: roots (of unity), or normal numbers.
        dt_min: Smallest step size at initialization, which is twice the decay in a step.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("damping", "angles", "weights")
    groups: ClassVar[dict[str, tuple[str, ...]]] = {"ssm": ("damping", "angles"), "c": ("weights",)}

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
            numbers = torch.arange(self.state_size, dtype=torch.float64, device="cpu")
            self.angles.copy_(2 * math.pi / self.state_size * numbers)
        nn.init.normal_(self.weights, std=1 / self.state_size)

    def modes(self) -> tuple[Tensor, Tensor]:
        rates = torch.complex(-at_least_float32(self.damping).square(), at_least_float32(self.angles))  # log λ
        return as_complex(self.weights), rates.unsqueeze(0)
