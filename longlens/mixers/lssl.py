"""LSSL, the linear state-space layer (Gu et al., NeurIPS 2021, "Combining recurrent, convolutional, and continuous-time
models with linear state-space layers"). Each channel is a linear system with a state x of N numbers and its own dt:

    x_t = Ā·x_{t-1} + B̄·u_t,  y_t = C·x_t,   Ā = (I - α·dt·A)⁻¹(I + (1-α)·dt·A),  B̄ = (I - α·dt·A)⁻¹·dt·B

with dense A (N, N) and B (N,), those of HiPPO-LegS. As a convolution, its kernel is k[l] = C·Āˡ·B̄.

Shapes: B sequences, D channels, K kernels (D, or 2D for both sides), N states.
"""

import math
from typing import Annotated, Literal, Unpack

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from longlens.mixers.common import StateSpace, log_uniform_
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import no_autocast, without_autocast, working_dtype
from longlens.ops.hippo import hippo_legs
from longlens.options import Is, Positive, Size


def lssl_kernel_reference(a: Tensor, b: Tensor, c: Tensor, dt: Tensor, alpha: float, length: int) -> Tensor:
    """The kernels (K, length) of A (N, N), B (N,), C (K, N) and dt (D,), by the recurrence for an impulse u:
    (I - α·dt·A)·x_t = (I + (1-α)·dt·A)·x_{t-1} + dt·B·u_t."""
    one = torch.eye(len(b), dtype=a.dtype, device=a.device)
    kernels = []
    for row, step in zip(c, dt.repeat(len(c) // len(dt)), strict=True):
        state, kernel = torch.zeros_like(b), []
        for t in range(length):
            driven = (one + (1 - alpha) * step * a) @ state + (step * b if t == 0 else 0)
            state = torch.linalg.solve(one - alpha * step * a, driven)
            kernel.append(row @ state)
        kernels.append(torch.stack(kernel))
    return torch.stack(kernels)


def lssl_kernel(a: Tensor, b: Tensor, c: Tensor, length: int) -> Tensor:
    """The kernels (K, length) of Ā (D, N, N), B̄ (D, N) and C (K, N). With l = p·T + q it is the product of C·Ā^(p·T)
    and Ā^q·B̄ for T ≈ √L, both made by doubling from the squares of Ā: never all L states of a channel at once."""
    block = 1 << max(0, round(math.log2(max(length, 1)) / 2))  # T
    right, power = b.unsqueeze(-1), a  # (D, N, T), from one column on
    while right.shape[-1] < block:
        right, power = torch.cat([right, power @ right], dim=-1), power @ power
    left = c.unflatten(0, (-1, a.shape[0]))[:, :, None]  # (K/D, D, blocks, N), from one row on
    blocks = -(-length // block)
    while left.shape[-2] < blocks:
        left = torch.cat([left, left @ power], dim=-2)
        if left.shape[-2] < blocks:
            power = power @ power
    return (left[..., :blocks, :] @ right).flatten(-2).flatten(0, 1)[:, :length]


def discretize(a: Tensor, b: Tensor, dt: Tensor, alpha: float = 0.5) -> tuple[Tensor, Tensor]:
    """Ā (D, N, N) and B̄ (D, N) of A (N, N), B (N,) and dt (D,), by the generalized bilinear rule: the bilinear one
    for α = 1/2, the backward one for α = 1."""
    dt, one = dt[:, None, None], torch.eye(a.shape[0], dtype=a.dtype, device=a.device)
    right = torch.cat([one + (1 - alpha) * dt * a, dt * b[:, None]], dim=-1)
    both = torch.linalg.solve(one - alpha * dt * a, right)
    return both[..., :-1], both[..., -1]


@register(
    "lssl",
    "dense linear state space, HiPPO-LegS",
    Traits(decays=True, special_init=True, cost="L log L", state="D·state_size"),
)
class LSSL(StateSpace):
    """LSSL in the frame of ``Convolution``. (B, L, D) -> (B, L, D). A and B belong to all channels; dt, and C for each
    side, to one. It is LSSL-fixed, with the defaults of the official code except for two: there, a state has as many
    numbers as there are channels, which takes D⁴ operations, and the output is a linear projection.

    Args:
        alpha: Weight α of the discretization, from 0.5 (bilinear rule) to 1 (backward rule).
        learn_a: Learn the dense state matrix A, which may become unstable.
        learn_dt: Learn the step sizes.
    """

    def __init__(
        self,
        d_model: Size,
        *,
        state_size: Size = 64,
        dt_min: Positive = 0.001,
        dt_max: Positive = 0.1,
        # Less than 0.5 is unstable: HiPPO has eigenvalues of -N, and dt is up to 0.1.
        alpha: Annotated[float, Ge(0.5), Le(1), Is("a number from 0.5 to 1")] = 0.5,
        learn_a: bool = False,
        learn_dt: bool = False,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        self.state_size, self.alpha = state_size, alpha
        self.dt_min, self.dt_max = dt_min, dt_max
        self.kernel_parameters: tuple[str, ...] = ("a",) * learn_a + ("log_dt",) * learn_dt
        self.c = nn.Parameter(torch.empty(self.kernels, state_size, **factory))
        # A fixed A is not stored: rounded to half precision, it would no longer be stable.
        self.a = nn.Parameter(torch.empty(state_size, state_size, **factory)) if learn_a else None
        self.log_dt = nn.Buffer(torch.empty(d_model, **factory))
        if learn_dt:
            self.log_dt = nn.Parameter(self.log_dt)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """HiPPO-LegS, dt log-uniform, and C normal, as in the official code."""
        super().reset_parameters()
        nn.init.normal_(self.c)
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        if self.a is not None:
            self.a.copy_(hippo_legs(self.state_size)[0])

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ā (D, N, N), B̄ (D, N) and C (K, N), in float32 at the least."""
        dtype = working_dtype(self.c.dtype)
        a, b = hippo_legs(self.state_size, device=self.c.device, dtype=dtype)
        if self.a is not None:
            a = self.a.to(dtype)
        return *discretize(a, b, self.log_dt.to(dtype).exp(), self.alpha), self.c.to(dtype)

    def kernel(self, length: int) -> Tensor:
        with without_autocast(self.c.device.type):
            return lssl_kernel(*self.system(), length)

    def constants(self) -> tuple[Tensor, Tensor, Tensor]:
        with without_autocast(self.c.device.type):
            return self.system()

    @no_autocast
    def recur(self, x: Tensor, past: Tensor | None, *constants: Tensor) -> tuple[Tensor, Tensor]:
        """The past is (B, D, N)."""
        a, b, c = constants
        past = a.new_zeros(x.shape[0], *b.shape) if past is None else past
        # (D, B, N) by (D, N, N), one matrix for each channel
        past = (past.transpose(0, 1) @ a.mT).transpose(0, 1) + b * x.unsqueeze(-1)
        return (c * past).sum(-1).to(x.dtype), past
