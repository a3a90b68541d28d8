"""S4, the structured state space (Gu, Goel & Ré, ICLR 2022, "Efficiently modeling long sequences with structured state
spaces"). Each channel is a linear system with a state x of N numbers, discretized by the bilinear rule with its own dt:

    x_t = Ā·x_{t-1} + B̄·u_t,  y_t = C·x_t,   Ā = (I - dt/2·A)⁻¹(I + dt/2·A),  B̄ = (I - dt/2·A)⁻¹·dt·B
    A = Λ - P·P*,   Λ diagonal, begun as the HiPPO-LegS matrix; N/2 conjugate pairs, of which one half is stored

As a convolution, its kernel k[l] = C·Āˡ·B̄ of length M comes from its generating function at the M-th roots of unity z,
where, because A is diagonal plus a matrix of rank one, it takes four sums over the N states (Woodbury's identity):

    k̂(z) = C̃·(I - Ā·z)⁻¹·B̄ = 2/(1+z)·(C̃·R·B - C̃·R·P·(1 + P*·R·P)⁻¹·P*·R·B)
    R = (g - Λ)⁻¹,   g = 2/dt·(1-z)/(1+z),   C̃ = C·(I - Ā^M), which is the parameter
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import StateSpace
from longlens.ops.decay import exact_dtype
from longlens.ops.exponentials import log_uniform_
from longlens.ops.hippo import dplr_legs


def s4_kernel(rates: Tensor, p: Tensor, b: Tensor, c: Tensor, dt: Tensor, length: int) -> Tensor:
    """The kernels (K, length) of Λ, P, B (N/2,) and C̃ (K, N/2), all complex, and dt (D,), with K = D, or K = 2D for two
    kernels of each channel.

    For z = exp(-2iφ), all terms are multiplied by dt/2·cos φ, so that none is infinite at z = -1: g - λ becomes
    i·sin φ - dt/2·cos φ·λ.
    """
    channels = dt.shape[0]
    angle = torch.arange(length // 2 + 1, dtype=exact_dtype(dt.device), device=dt.device) * (math.pi / length)
    sine, cosine = angle.sin().to(dt.dtype), 0.5 * dt[:, None] * angle.cos().to(dt.dtype)  # (J,), (D, J)
    c = c.unflatten(0, (-1, channels)).transpose(0, 1)  # (D, K/D, N/2)
    shared = torch.stack([p.conj() * p, p.conj() * b]).expand(channels, -1, -1)
    sums = _pair_sums(torch.cat([c * b, c * p, shared], dim=1), rates, cosine, sine)
    c_b, c_p, p_p, p_b = sums.split([c.shape[1], c.shape[1], 1, 1], dim=1)
    cosine = cosine.unsqueeze(1)
    spectrum = c_b - c_p * (cosine * p_b / (1 + cosine * p_p))
    turned = spectrum * (0.5 * dt[:, None, None] * torch.polar(torch.ones_like(angle), angle).to(spectrum.dtype))
    return torch.fft.irfft(turned, n=length).transpose(0, 1).flatten(0, 1)


def _pair_sums(weights: Tensor, rates: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Σ_n w_n/(i·s - c·λ_n) + w̄_n/(i·s - c·λ̄_n) of weights w (D, R, N/2), rates λ (N/2,), c (D, J) and s (J,)
    -> (D, R, J). A pair is (2i·s·Re w - 2c·Re(w·λ̄))/q with q = (i·s - c·λ)(i·s - c·λ̄)."""
    parts = torch.cat([weights.real, (weights * rates.conj()).real], dim=1)  # (D, 2R, N/2)
    real, imag = _Inverses.apply(parts, rates.real, rates.abs().square(), cosine, sine)
    (a_real, b_real), (a_imag, b_imag) = real.chunk(2, dim=1), imag.chunk(2, dim=1)
    cosine = cosine.unsqueeze(1)
    return 2 * torch.complex(-sine * a_imag - cosine * b_real, sine * a_real - cosine * b_imag)


class _Inverses(torch.autograd.Function):
    """Σ_n w_n/q_n, real and imaginary part, of real weights w (D, R, N), for q = size·c² - s² - 2i·decay·c·s.

    Every channel has its own N×J of them. They are never there all at once: a few channels at a time stay in the cache,
    and the gradient computes them again.
    """

    @staticmethod
    def forward(ctx, weights: Tensor, decay: Tensor, size: Tensor, cosine: Tensor, sine: Tensor):
        ctx.save_for_backward(weights, decay, size, cosine, sine)
        real = weights.new_empty(*weights.shape[:2], cosine.shape[1])
        imag = torch.empty_like(real)
        for part in _parts(cosine, decay.shape[0]):
            inverse_real, inverse_imag = _inverse(decay, size, cosine[part], sine)
            torch.bmm(weights[part], inverse_real, out=real[part])
            torch.bmm(weights[part], inverse_imag, out=imag[part])
        return real, imag

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_real: Tensor, grad_imag: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, decay, size, cosine, sine = ctx.saved_tensors
        of_weights, of_cosine = torch.empty_like(weights), torch.empty_like(cosine)
        of_decay, of_size = torch.zeros_like(decay), torch.zeros_like(size)
        for part in _parts(cosine, decay.shape[0]):
            real, imag = _inverse(decay, size, cosine[part], sine)  # (d, N, J)
            of_weights[part] = grad_real[part] @ real.mT + grad_imag[part] @ imag.mT
            back = weights[part].mT
            of_real, of_imag = back @ grad_real[part], back @ grad_imag[part]
            # 1/q changes by -dq/q², and 1/q² = square + 2i·cross
            square, cross = (real + imag).mul_(real - imag), real.mul_(imag)
            of_q_real = (square * of_real).addcmul_(cross, of_imag, value=2).neg_()
            of_q_imag = cross.mul_(of_real).mul_(2).addcmul_(square, of_imag, value=-1)
            c = cosine[part]
            of_size += (of_q_real @ c.square().unsqueeze(-1)).sum((0, 2))
            of_decay -= 2 * (of_q_imag @ (c * sine).unsqueeze(-1)).sum((0, 2))
            of_cosine[part] = 2 * (c * (size @ of_q_real) - sine * (decay @ of_q_imag))
        return of_weights, of_decay, of_size, of_cosine, None


def _parts(cosine: Tensor, states: int) -> Iterator[slice]:
    """Slices of so many channels as fit into a processor's cache, or fill a GPU."""
    channels, nodes = cosine.shape
    step = max(1, (1 << (18 if cosine.device.type == "cpu" else 24)) // (nodes * states))
    return (slice(start, start + step) for start in range(0, channels, step))


def _inverse(decay: Tensor, size: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """The real and the imaginary part of 1/q, (d, N, J)."""
    cosine = cosine.unsqueeze(1)
    real = torch.addcmul(-sine.square(), cosine.square(), size[:, None])
    imag = (2 * cosine * sine) * decay[:, None]  # of conj(q)
    norm = real.square().addcmul_(imag, imag).reciprocal_()
    return real.mul_(norm), imag.mul_(norm)


def s4_advance(rates: Tensor, p: Tensor, dt: Tensor, state: Tensor, inputs: Tensor | None = None) -> Tensor:
    """Ā·x + B̄·u of states x (..., D, N/2) and inputs B·u of that shape, in O(N): Ā = (2/dt - A)⁻¹(2/dt + A), and
    B̄ = (2/dt - A)⁻¹·2B."""

    def along_p(x: Tensor) -> Tensor:  # P*·x, with the conjugate half
        return 2 * (p.conj() * x).real.sum(-1, keepdim=True)

    ahead = (2 / dt[:, None] + rates) * state - p * along_p(state)
    if inputs is not None:
        ahead = ahead + 2 * inputs
    resolvent = 1 / (2 / dt[:, None] - rates)
    ahead = resolvent * ahead
    return ahead - resolvent * p * (along_p(ahead) / (1 + along_p(resolvent * p)))


def _matrix(rates: Tensor, p: Tensor, dt: Tensor) -> Tensor:
    """Ā as real matrices (D, N, N), of the real and imaginary parts of the states in turn."""
    basis = torch.view_as_complex(torch.eye(2 * p.shape[0], dtype=dt.dtype, device=dt.device).unflatten(1, (-1, 2)))
    return torch.view_as_real(s4_advance(rates, p, dt, basis[:, None])).flatten(-2).permute(1, 2, 0)


def _as_rows(c: Tensor, channels: int) -> Tensor:
    """C (K, N/2) as real rows (D, K/D, N): what they give for a state is half of C·x + c.c."""
    rows = torch.view_as_real(c.conj().resolve_conj()).flatten(-2)
    return rows.unflatten(0, (-1, channels)).transpose(0, 1)


def _from_rows(rows: Tensor) -> Tensor:
    return torch.view_as_complex(rows.transpose(0, 1).flatten(0, 1).unflatten(-1, (-1, 2)).contiguous()).conj()


@dataclass
class S4State:
    """What a step remembers: the states (B, D, N/2); and C (D, N/2), to compute it only once."""

    states: Tensor
    c: Tensor


class S4(StateSpace):
    """S4 in the frame of ``Convolution``. Λ, P and B belong to all channels; dt, and C for each side, to one.

    Args:
        d_model: D.
        state_size: N, even.
        dt_min: least step size at the start,
        dt_max: and the largest; they are spread evenly in log dt.
        bidirectional: see both sides, with another C for what is ahead.
        max_length: M; shorter sequences get the first part of the kernel, and longer ones a C̃ computed for them.
        output: see ``Convolution``.
    """

    special_parameters: ClassVar[tuple[str, ...]] = ("log_decay", "frequency", "p", "b", "log_dt")

    def __init__(
        self,
        d_model: int,
        *,
        state_size: int = 64,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        bidirectional: bool = False,
        max_length: int = MAX_LENGTH,
        output: str = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, device=device, dtype=dtype)
        if state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be even and at least 2, for conjugate pairs, got {state_size}")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.state_size, self.dt_min, self.dt_max, self.max_length = state_size, dt_min, dt_max, max_length

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.log_decay, self.frequency = empty(state_size // 2), empty(state_size // 2)
        self.p, self.b = empty(state_size // 2, 2), empty(state_size // 2, 2)
        self.c = empty(self.kernels, state_size // 2, 2)  # C̃
        self.log_dt = empty(d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """HiPPO-LegS, dt log-uniform, and C complex normal, as in the official code."""
        super().reset_parameters()
        rates, p, b, _ = dplr_legs(self.state_size)
        with torch.no_grad():
            self.log_decay.copy_(torch.log(-rates.real))
            self.frequency.copy_(rates.imag)
            self.p.copy_(torch.view_as_real(p))
            self.b.copy_(torch.view_as_real(b))
            log_uniform_(self.log_dt, self.dt_min, self.dt_max)
            self.c.normal_(std=0.5**0.5)
            rates, p, _, c, dt = self._system()
            rows = _as_rows(c, self.d_model)
            rows = rows - rows @ torch.linalg.matrix_power(_matrix(rates, p, dt), self.max_length)
            self.c.copy_(torch.view_as_real(_from_rows(rows).resolve_conj()))

    def _system(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Λ, P, B, C̃ and dt, in float32 at the least."""
        exact = torch.promote_types(self.p.dtype, torch.float32)
        rates = torch.complex(-self.log_decay.to(exact).exp(), self.frequency.to(exact))
        p, b, c = (torch.view_as_complex(x.to(exact).contiguous()) for x in (self.p, self.b, self.c))
        return rates, p, b, c, self.log_dt.to(exact).exp()

    def kernel(self, length: int) -> Tensor:
        with torch.autocast(self.p.device.type, enabled=False):
            rates, p, b, c, dt = self._system()
            known = self.max_length
            if length > known:
                # C·(I - Ā²ᴹ) = C̃·(I + Āᴹ): twice as long, until it is long enough
                rows, power = _as_rows(c, self.d_model), torch.linalg.matrix_power(_matrix(rates, p, dt), known)
                while known < length:
                    rows, power, known = rows + rows @ power, power @ power, 2 * known
                c = _from_rows(rows)
            return s4_kernel(rates, p, b, c, dt, known)[:, :length]

    def recur(self, x: Tensor, state: S4State | None) -> tuple[Tensor, S4State]:
        with torch.autocast(x.device.type, enabled=False):
            rates, p, b, c, dt = self._system()
            if state is None:
                power = torch.linalg.matrix_power(_matrix(rates, p, dt), self.max_length)
                rest = torch.eye(self.state_size, dtype=dt.dtype, device=dt.device) - power
                c = _from_rows(torch.linalg.solve(rest, _as_rows(c, self.d_model), left=False))
                state = S4State(p.new_zeros(x.shape[0], self.d_model, p.shape[0]), c)
            states = s4_advance(rates, p, dt, state.states, b * x.unsqueeze(-1))
            return 2 * (state.c * states).real.sum(-1).to(x.dtype), S4State(states, state.c)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, state_size={self.state_size}, max_length={self.max_length}"


@register("s4")
@dataclass(frozen=True, kw_only=True)
class S4Config(Config):
    """S4, with the sizes of the official code: A and B belong to all channels.

    Args:
        state_size: numbers in the state of a channel, even.
        dt_min: least step size at the start.
        dt_max: largest step size at the start.
        output: the last part, a gated linear unit or a projection.
    """

    state_size: int = 64
    dt_min: float = 0.001
    dt_max: float = 0.1
    output: Literal["glu", "linear"] = "glu"

    summary: ClassVar[str] = "structured state space, HiPPO-LegS"
    traits: ClassVar[Traits] = Traits(
        decays=True, special_init=True, stable=True, complex=True, cost="L log L", state="D·state_size"
    )
    bidirectional: ClassVar[bool] = False

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> S4:
        options = asdict(self) | {"bidirectional": self.bidirectional, "max_length": max_length}
        return S4(d_model, **options, device=device, dtype=dtype)


@register("s4-bidirectional")
@dataclass(frozen=True, kw_only=True)
class S4BidirectionalConfig(S4Config):
    summary: ClassVar[str] = "S4 to both sides"
    traits: ClassVar[Traits] = replace(S4Config.traits, state=None)
    bidirectional: ClassVar[bool] = True

    def looks_ahead(self) -> str | None:
        return "it sees both sides"
