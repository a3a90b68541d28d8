"""S4, the structured state space (Gu, Goel & Ré, ICLR 2022, "Efficiently modeling long sequences with structured state
spaces"). Each channel is a linear system with a state x of N numbers, discretized by the bilinear rule with its own dt:

    x_t = Ā·x_{t-1} + B̄·u_t,  y_t = C·x_t,   Ā = (I - dt/2·A)⁻¹(I + dt/2·A),  B̄ = (I - dt/2·A)⁻¹·dt·B
    A = Λ - P·P*,   Λ diagonal, initialized as the HiPPO-LegS matrix; N/2 conjugate pairs, of which one half is stored

As a convolution, its kernel k[l] = C·Āˡ·B̄ of length M comes from its generating function at the M-th roots of unity z,
where, because A is diagonal plus a matrix of rank one, it takes four sums over the N states (Woodbury's identity):

    k̂(z) = C̃·(I - Ā·z)⁻¹·B̄ = 2/(1+z)·(C̃·R·B - C̃·R·P·(1 + P*·R·P)⁻¹·P*·R·B)
    R = (g - Λ)⁻¹,   g = 2/dt·(1-z)/(1+z),   C̃ = C·(I - Ā^M), which is the parameter

Shapes: B sequences, D channels, K kernels (D, or 2D for both sides), N/2 pairs of states, J = M/2 + 1 roots of unity z
(the others are their conjugates), T sums over the states at each z.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longlens.mixers.common import StateSpace, log_uniform_
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.checks import working_dtype
from longlens.ops.decay import widest_dtype
from longlens.ops.hippo import dplr_legs
from longlens.options import Even, Positive, Size


def s4_kernel_reference(
    rates: Tensor, p: Tensor, b: Tensor, c: Tensor, dt: Tensor, length: int, max_length: int
) -> Tensor:
    """The kernels (K, length), C·Āˡ·B̄ with dense matrices, of Λ, P, B (N/2,), C̃ (K, N/2), dt (D,) and M."""
    rates, p, b, c = (torch.cat([x, x.conj()], dim=-1) for x in (rates, p, b, c))  # with the conjugate half
    a, one = torch.diag(rates) - torch.outer(p, p.conj()), torch.eye(len(p), dtype=p.dtype, device=p.device)
    dt = dt[:, None, None]
    inverse = torch.linalg.inv(one - dt / 2 * a)
    a_bar, b_bar = inverse @ (one + dt / 2 * a), inverse @ (dt * b[:, None])  # (D, N, N), (D, N, 1)
    c = c.unflatten(0, (-1, len(dt))).unsqueeze(-2)  # (K/D, D, 1, N)
    c = c @ torch.linalg.inv(one - torch.linalg.matrix_power(a_bar, max_length))  # C of C̃
    kernel = [c @ torch.linalg.matrix_power(a_bar, steps) @ b_bar for steps in range(length)]
    return torch.cat(kernel, dim=-1).flatten(0, 2).real


def s4_kernel(rates: Tensor, p: Tensor, b: Tensor, c: Tensor, dt: Tensor, length: int) -> Tensor:
    """The kernels (K, length) of Λ, P, B (N/2,) and C̃ (K, N/2), all complex, and dt (D,), with M = length. For z =
    exp(-2iφ), all terms are multiplied by dt/2·cos φ, so that none is infinite at z = -1: g - λ becomes
    i·sin φ - dt/2·cos φ·λ."""
    channels = dt.shape[0]
    angle = torch.arange(length // 2 + 1, dtype=widest_dtype(dt.device), device=dt.device) * (math.pi / length)
    # s = sin φ (J,) and c = dt/2·cos φ (D, J)
    sine, cosine = angle.sin().to(dt.dtype), 0.5 * dt[:, None] * angle.cos().to(dt.dtype)
    c = c.unflatten(0, (-1, channels)).transpose(0, 1)  # (D, K/D, N/2)
    # The four sums are C̃·R·B, C̃·R·P, P*·R·P and P*·R·B.
    shared = torch.stack([p.conj() * p, p.conj() * b]).expand(channels, -1, -1)
    sums = _pair_sums(torch.cat([c * b, c * p, shared], dim=1), rates, cosine, sine)
    c_b, c_p, p_p, p_b = sums.split([c.shape[1], c.shape[1], 1, 1], dim=1)
    cosine = cosine.unsqueeze(1)
    spectrum = c_b - c_p * (cosine * p_b / (1 + cosine * p_p))  # (D, K/D, J)
    # 2/(1+z) = exp(iφ)/cos φ, times the dt/2·cos φ of R that the sums leave out
    spectrum = spectrum * (0.5 * dt[:, None, None] * torch.polar(torch.ones_like(angle), angle).to(spectrum.dtype))
    return torch.fft.irfft(spectrum, n=length).transpose(0, 1).flatten(0, 1)


def _pair_sums(weights: Tensor, rates: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Σ_n w_n/(i·s - c·λ_n) + w̄_n/(i·s - c·λ̄_n) of weights w (D, T, N/2), rates λ (N/2,), c (D, J) and s (J,)
    -> (D, T, J). A pair is (2i·s·Re w - 2c·Re(w·λ̄))/q with q = (i·s - c·λ)(i·s - c·λ̄)."""
    numerators = torch.cat([weights.real, (weights * rates.conj()).real], dim=1)  # (D, 2T, N/2)
    real, imag = _InverseSums.apply(numerators, rates.real, rates.abs().square(), cosine, sine)
    # Σ Re w/q and Σ Re(w·λ̄)/q, real and imaginary parts
    (w_real, w_rate_real), (w_imag, w_rate_imag) = real.chunk(2, dim=1), imag.chunk(2, dim=1)
    cosine = cosine.unsqueeze(1)
    return 2 * torch.complex(-sine * w_imag - cosine * w_rate_real, sine * w_real - cosine * w_rate_imag)


class _InverseSums(torch.autograd.Function):
    """Σ_n w_n/q_n, real and imaginary part (D, T, J), of real weights w (D, T, N/2), for q = |λ|²·c² - s² -
    2i·Re λ·c·s of Re λ and |λ|² (N/2,), c (D, J) and s (J,). The inverses 1/q, (N/2, J) for each channel, are never
    there all at once: those of a few channels stay in the cache, and the gradient computes them again."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, rate_real: Tensor, rate_square: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weights, rate_real, rate_square, cosine, sine)
        real = weights.new_empty(*weights.shape[:2], cosine.shape[1])
        imag = torch.empty_like(real)
        for part in _channel_slices(cosine, rate_real.shape[0]):
            inverse_real, inverse_imag = _inverses(rate_real, rate_square, cosine[part], sine)
            torch.bmm(weights[part], inverse_real, out=real[part])
            torch.bmm(weights[part], inverse_imag, out=imag[part])
        return real, imag

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_real: Tensor, grad_imag: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, rate_real, rate_square, cosine, sine = ctx.saved_tensors
        grad_weights, grad_cosine = torch.empty_like(weights), torch.empty_like(cosine)
        grad_rate_real, grad_rate_square = torch.zeros_like(rate_real), torch.zeros_like(rate_square)
        for part in _channel_slices(cosine, rate_real.shape[0]):
            real, imag = _inverses(rate_real, rate_square, cosine[part], sine)  # of 1/q, (d, N/2, J)
            grad_weights[part] = grad_real[part] @ real.mT + grad_imag[part] @ imag.mT

            # The gradient with respect to 1/q, then to q: 1/q changes by -dq/q², and 1/q² = square + 2i·cross.
            transposed = weights[part].mT
            grad_inverse_real, grad_inverse_imag = transposed @ grad_real[part], transposed @ grad_imag[part]
            square, cross = (real + imag).mul_(real - imag), real.mul_(imag)
            grad_q_real = (square * grad_inverse_real).addcmul_(cross, grad_inverse_imag, value=2).neg_()
            grad_q_imag = cross.mul_(grad_inverse_real).mul_(2).addcmul_(square, grad_inverse_imag, value=-1)

            # From q to |λ|², Re λ and c.
            c = cosine[part]
            grad_rate_square += (grad_q_real @ c.square().unsqueeze(-1)).sum((0, 2))
            grad_rate_real -= 2 * (grad_q_imag @ (c * sine).unsqueeze(-1)).sum((0, 2))
            grad_cosine[part] = 2 * (c * (rate_square @ grad_q_real) - sine * (rate_real @ grad_q_imag))
        return grad_weights, grad_rate_real, grad_rate_square, grad_cosine, None


def _channel_slices(cosine: Tensor, pairs: int) -> Iterator[slice]:
    """Slices of as many channels as fit into a processor's cache, or fill a GPU."""
    channels, nodes = cosine.shape
    step = max(1, (1 << (18 if cosine.device.type == "cpu" else 24)) // (nodes * pairs))
    return (slice(start, start + step) for start in range(0, channels, step))


def _inverses(rate_real: Tensor, rate_square: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """The real and the imaginary part of 1/q = conj(q)/|q|² for d channels, (d, N/2, J)."""
    cosine = cosine.unsqueeze(1)
    real = torch.addcmul(-sine.square(), cosine.square(), rate_square[:, None])
    imag = (2 * cosine * sine) * rate_real[:, None]  # of conj(q)
    inverse_square = real.square().addcmul_(imag, imag).reciprocal_()
    return real.mul_(inverse_square), imag.mul_(inverse_square)


def s4_advance(rates: Tensor, p: Tensor, dt: Tensor, state: Tensor, inputs: Tensor | None = None) -> Tensor:
    """Ā·x + B̄·u of states x (..., D, N/2) and inputs B·u of that shape, in O(N): Ā = (2/dt - A)⁻¹(2/dt + A), and
    B̄ = (2/dt - A)⁻¹·2B, with the inverse of a diagonal plus rank one by Woodbury's identity."""

    def along_p(x: Tensor) -> Tensor:  # P*·x, with the conjugate half
        return 2 * (p.conj() * x).real.sum(-1, keepdim=True)

    driven = (2 / dt[:, None] + rates) * state - p * along_p(state)  # (2/dt + A)·x
    if inputs is not None:
        driven = driven + 2 * inputs
    resolvent = 1 / (2 / dt[:, None] - rates)
    driven = resolvent * driven
    return driven - resolvent * p * (along_p(driven) / (1 + along_p(resolvent * p)))


def _matrix(rates: Tensor, p: Tensor, dt: Tensor) -> Tensor:
    """Ā as real matrices (D, N, N), of the real and imaginary parts of the states in turn."""
    basis = torch.view_as_complex(torch.eye(2 * p.shape[0], dtype=dt.dtype, device=dt.device).unflatten(1, (-1, 2)))
    return torch.view_as_real(s4_advance(rates, p, dt, basis[:, None])).flatten(-2).permute(1, 2, 0)


def _as_rows(c: Tensor, channels: int) -> Tensor:
    """C (K, N/2) as real rows (D, K/D, N): a row times a state is half of C·x + c.c."""
    rows = torch.view_as_real(c.conj().resolve_conj()).flatten(-2)
    return rows.unflatten(0, (-1, channels)).transpose(0, 1)


def _from_rows(rows: Tensor) -> Tensor:
    """Real rows (D, K/D, N) -> C (K, N/2)."""
    return torch.view_as_complex(rows.transpose(0, 1).flatten(0, 1).unflatten(-1, (-1, 2)).contiguous()).conj()


@register(
    "s4",
    "structured state space, HiPPO-LegS",
    Traits(decays=True, special_init=True, stable=True, complex=True, cost="L log L", state="D·state_size"),
    fixed={"bidirectional": False},
)
@register(
    "s4-bidirectional",
    "S4 to both sides",
    Traits(decays=True, special_init=True, stable=True, complex=True, cost="L log L"),
    fixed={"bidirectional": True},
)
class S4(StateSpace):
    """S4 in the frame of ``Convolution``. (B, L, D) -> (B, L, D). Λ, P and B belong to all channels; dt, and C for each
    side, to one. The sizes are those of the official code.

    Args:
        max_length: Length M of the kernel; shorter sequences use its first part, longer ones a C̃ computed for them.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_decay", "frequency", "p", "b", "log_dt")

    def __init__(
        self,
        d_model: Size,
        *,
        state_size: Even = 64,
        dt_min: Positive = 0.001,
        dt_max: Positive = 0.1,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, **factory)
        self.state_size, self.max_length = state_size, max_length
        self.dt_min, self.dt_max = dt_min, dt_max
        pairs = state_size // 2
        self.log_decay = nn.Parameter(torch.empty(pairs, **factory))  # log(-Re Λ)
        self.frequency = nn.Parameter(torch.empty(pairs, **factory))  # Im Λ
        self.p = nn.Parameter(torch.empty(pairs, 2, **factory))
        self.b = nn.Parameter(torch.empty(pairs, 2, **factory))
        self.c = nn.Parameter(torch.empty(self.kernels, pairs, 2, **factory))  # C̃
        self.log_dt = nn.Parameter(torch.empty(d_model, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """HiPPO-LegS, dt log-uniform, and C complex normal, as in the official code."""
        super().reset_parameters()
        rates, p, b, _ = dplr_legs(self.state_size)
        self.log_decay.copy_(torch.log(-rates.real))
        self.frequency.copy_(rates.imag)
        self.p.copy_(torch.view_as_real(p))
        self.b.copy_(torch.view_as_real(b))
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        self.c.normal_(std=0.5**0.5)
        rates, p, _, c, dt = self.system()
        rows = _as_rows(c, self.d_model)
        rows = rows - rows @ torch.linalg.matrix_power(_matrix(rates, p, dt), self.max_length)
        self.c.copy_(torch.view_as_real(_from_rows(rows).resolve_conj()))

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Λ, P, B (N/2,), C̃ (K, N/2) and dt (D,), in float32 at the least."""
        dtype = working_dtype(self.p.dtype)
        rates = torch.complex(-self.log_decay.to(dtype).exp(), self.frequency.to(dtype))
        p, b, c = (torch.view_as_complex(x.to(dtype).contiguous()) for x in (self.p, self.b, self.c))
        return rates, p, b, c, self.log_dt.to(dtype).exp()

    def kernel(self, length: int) -> Tensor:
        with torch.autocast(self.p.device.type, enabled=False):
            rates, p, b, c, dt = self.system()
            known = self.max_length
            if length > known:
                # C·(I - Ā²ᴹ) = C̃·(I + Āᴹ): twice as long, until it is long enough
                rows, power = _as_rows(c, self.d_model), torch.linalg.matrix_power(_matrix(rates, p, dt), known)
                while known < length:
                    rows, power, known = rows + rows @ power, power @ power, 2 * known
                c = _from_rows(rows)
            return s4_kernel(rates, p, b, c, dt, known)[:, :length]

    def recur(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The state is (B, D, N/2), and C (D, N/2), which is computed only once."""
        with torch.autocast(x.device.type, enabled=False):
            rates, p, b, c, dt = self.system()
            if state is None:
                power = torch.linalg.matrix_power(_matrix(rates, p, dt), self.max_length)
                rest = torch.eye(self.state_size, dtype=dt.dtype, device=dt.device) - power
                c = _from_rows(torch.linalg.solve(rest, _as_rows(c, self.d_model), left=False))
                state = p.new_zeros(x.shape[0], self.d_model, p.shape[0]), c
            states, c = s4_advance(rates, p, dt, state[0], b * x.unsqueeze(-1)), state[1]
            return 2 * (c * states).real.sum(-1).to(x.dtype), (states, c)
