"""LSSL, the linear state-space layer (Gu et al., NeurIPS 2021, "Combining recurrent, convolutional, and continuous-time
models with linear state-space layers"). Each channel is a linear system with a state x of N numbers and its own dt:

    x_t = Ā·x_{t-1} + B̄·u_t,  y_t = C·x_t,   Ā = (I - α·dt·A)⁻¹(I + (1-α)·dt·A),  B̄ = (I - α·dt·A)⁻¹·dt·B

with dense A (N, N) and B (N,), those of HiPPO-LegS. As a convolution, its kernel is k[l] = C·Āˡ·B̄.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import StateSpace
from longlens.ops.exponentials import log_uniform_
from longlens.ops.hippo import hippo_legs


def lssl_kernel(a: Tensor, b: Tensor, c: Tensor, length: int) -> Tensor:
    """The kernels (K, length) of Ā (D, N, N), B̄ (D, N) and C (K, N), with K = D, or K = 2D for two kernels of each
    channel.

    With l = p·T + q it is the product of C·Ā^(p·T) and Ā^q·B̄ for T ≈ √L, both made by doubling from the squares of Ā:
    never all L states of a channel at once.
    """
    block = 1 << max(0, round(math.log2(max(length, 1)) / 2))
    right, power = b.unsqueeze(-1), a
    while right.shape[-1] < block:
        right, power = torch.cat([right, power @ right], dim=-1), power @ power
    left = c.unflatten(0, (-1, a.shape[0]))[:, :, None]  # (K/D, D, P, N)
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


@dataclass
class LSSLState:
    """What a step remembers: the states (B, D, N); and Ā (D, N, N) and B̄ (D, N), to compute them only once."""

    states: Tensor
    a: Tensor
    b: Tensor


class LSSL(StateSpace):
    """LSSL in the frame of ``Convolution``. A and B belong to all channels; dt, and C for each side, to one.

    Args:
        d_model: D.
        state_size: N.
        dt_min: least step size at the start,
        dt_max: and the largest; they are spread evenly in log dt.
        alpha: α.
        learn_a: learn A, as a dense matrix; otherwise it stays what it is.
        learn_dt: learn dt.
        bidirectional: see both sides, with another C for what is ahead.
        output: see ``Convolution``.
    """

    def __init__(
        self,
        d_model: int,
        *,
        state_size: int = 64,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        alpha: float = 0.5,
        learn_a: bool = False,
        learn_dt: bool = False,
        bidirectional: bool = False,
        output: str = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, device=device, dtype=dtype)
        if state_size < 1:
            raise ValueError(f"state_size must be at least 1, got {state_size}")
        if not 0.5 <= alpha <= 1:  # less is unstable: HiPPO has eigenvalues of -N, and dt is up to 0.1
            raise ValueError(f"alpha must lie between 0.5 and 1, got {alpha}")
        self.state_size, self.dt_min, self.dt_max, self.alpha = state_size, dt_min, dt_max, alpha
        self.special_parameters = ("a",) * learn_a + ("log_dt",) * learn_dt
        self.c = nn.Parameter(torch.empty(self.kernels, state_size, device=device, dtype=dtype))
        # A fixed A is not stored: rounded to half precision, it would no longer be stable.
        a = torch.empty(state_size, state_size, device=device, dtype=dtype)
        self.a = nn.Parameter(a) if learn_a else None
        log_dt = torch.empty(d_model, device=device, dtype=dtype)
        self.log_dt: Tensor
        if learn_dt:
            self.log_dt = nn.Parameter(log_dt)
        else:
            self.register_buffer("log_dt", log_dt)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """HiPPO-LegS, dt log-uniform, and C normal, as in the official code."""
        super().reset_parameters()
        nn.init.normal_(self.c)
        with torch.no_grad():
            log_uniform_(self.log_dt, self.dt_min, self.dt_max)
            if self.a is not None:
                self.a.copy_(hippo_legs(self.state_size)[0])

    def _system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ā, B̄ and C, in float32 at the least."""
        exact = torch.promote_types(self.c.dtype, torch.float32)
        a, b = hippo_legs(self.state_size, device=self.c.device, dtype=exact)
        if self.a is not None:
            a = self.a.to(exact)
        return *discretize(a, b, self.log_dt.to(exact).exp(), self.alpha), self.c.to(exact)

    def kernel(self, length: int) -> Tensor:
        with torch.autocast(self.c.device.type, enabled=False):
            return lssl_kernel(*self._system(), length)

    def recur(self, x: Tensor, state: LSSLState | None) -> tuple[Tensor, LSSLState]:
        with torch.autocast(x.device.type, enabled=False):
            if state is None:
                a, b, _ = self._system()
                state = LSSLState(a.new_zeros(x.shape[0], self.d_model, self.state_size), a, b)
            # (D, B, N) by (D, N, N), one matrix for each channel
            states = (state.states.transpose(0, 1) @ state.a.mT).transpose(0, 1) + state.b * x.unsqueeze(-1)
            return (self.c.to(states.dtype) * states).sum(-1).to(x.dtype), LSSLState(states, state.a, state.b)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, state_size={self.state_size}, alpha={self.alpha}, learn_a={self.a is not None}"


@register("lssl")
@dataclass(frozen=True, kw_only=True)
class LSSLConfig(Config):
    """LSSL-fixed, with the defaults of the official code except for two: there, a state has as many numbers as there
    are channels, which takes D⁴ operations, and the last part is a projection.

    Args:
        state_size: numbers in the state of a channel.
        dt_min: least step size at the start.
        dt_max: largest step size at the start.
        alpha: of the generalized bilinear rule, from 0.5, the bilinear one, to 1, the backward one.
        learn_a: learn the dense state matrix, which may become unstable.
        learn_dt: learn the step sizes.
        bidirectional: see both sides.
        output: the last part, a gated linear unit or a projection.
    """

    state_size: int = 64
    dt_min: float = 0.001
    dt_max: float = 0.1
    alpha: float = 0.5
    learn_a: bool = False
    learn_dt: bool = False
    bidirectional: bool = False
    output: Literal["glu", "linear"] = "glu"

    summary: ClassVar[str] = "dense linear state space, HiPPO-LegS"
    traits: ClassVar[Traits] = Traits(decays=True, special_init=True, cost="L log L", state="D·state_size")

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> LSSL:
        return LSSL(d_model, **asdict(self), device=device, dtype=dtype)
