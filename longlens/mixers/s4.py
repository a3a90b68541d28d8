"""S4, the structured state space (Gu, Goel & Ré, ICLR 2022, "Efficiently modeling long sequences with structured state
spaces"). Each channel is a linear system with a state x of N numbers, discretized by the bilinear rule with its own dt:

    x_t = Ā·x_{t-1} + B̄·u_t,  y_t = C·x_t,   Ā = (I - dt/2·A)⁻¹(I + dt/2·A),  B̄ = (I - dt/2·A)⁻¹·dt·B
    A = Λ - P·P*,   Λ diagonal, initialized as the HiPPO-LegS matrix; N/2 conjugate pairs, of which one half is stored

As a convolution, its kernel k[l] = C·Āˡ·B̄ of length M comes from its generating function at the M-th roots of unity z,
where, because A is diagonal plus a matrix of rank one, it takes four sums over the N states (Woodbury's identity):

    k̂(z) = C̃·(I - Ā·z)⁻¹·B̄ = 2/(1+z)·(C̃·R·B - C̃·R·P·(1 + P*·R·P)⁻¹·P*·R·B)
    R = (g - Λ)⁻¹,   g = 2/dt·(1-z)/(1+z),   C̃ = C·(I - Ā^M), which is the parameter

A term w/(g - λ) of such a sum, times 2/(1+z), is a geometric series, and at a root of unity it is one of M terms:

    2/(1+z)·w/(g - λ) = v·Σ_{l < M} (a·z)ˡ,   a = (1 + dt/2·λ)/(1 - dt/2·λ),   v = w·dt/(1 - dt/2·λ)/(1 - a^M)

so that the sums at all z are the FFTs of sums of exponentials, which take far less time than J·N divisions.

Shapes: B sequences, D channels, K kernels (D, or 2D for both sides), N/2 pairs of states, J = M/2 + 1 roots of unity z
(the others are their conjugates). Λ, P and B are (D, N/2), or (1, N/2) if all channels have the same.
"""

import math
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import StateSpace, check_heads, log_uniform_
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.checks import no_autocast, once_differentiable, without_autocast, working_dtype
from longlens.ops.decay import widest_dtype
from longlens.ops.exponentials import grouped_exponentials
from longlens.ops.hippo import clip_inputs, dplr_legs
from longlens.options import Even, Positive, Probability, Size


def s4_kernel_reference(
    rates: Tensor, p: Tensor, b: Tensor, c: Tensor, dt: Tensor, length: int, max_length: int
) -> Tensor:
    """The kernels (K, length), C·Āˡ·B̄ with dense matrices, of Λ, P, B (D or 1, N/2), C̃ (K, N/2), dt (D,) and M."""
    rates, p, b, c = (torch.cat([x, x.conj()], dim=-1) for x in (rates, p, b, c))  # with the conjugate half
    a = torch.diag_embed(rates) - p.unsqueeze(-1) * p.conj().unsqueeze(-2)  # (D or 1, N, N)
    one, dt = torch.eye(a.shape[-1], dtype=p.dtype, device=p.device), dt[:, None, None]
    inverse = torch.linalg.inv(one - dt / 2 * a)
    a_bar, b_bar = inverse @ (one + dt / 2 * a), inverse @ (dt * b.unsqueeze(-1))  # (D, N, N), (D, N, 1)
    c = c.unflatten(0, (-1, len(dt))).unsqueeze(-2)  # (K/D, D, 1, N)
    c = c @ torch.linalg.inv(one - torch.linalg.matrix_power(a_bar, max_length))  # C of C̃
    kernel = [c @ torch.linalg.matrix_power(a_bar, steps) @ b_bar for steps in range(length)]
    return torch.cat(kernel, dim=-1).flatten(0, 2).real


def s4_kernel(rates: Tensor, p: Tensor, b: Tensor, c: Tensor, dt: Tensor, length: int) -> Tensor:
    """The kernels (K, length) of Λ, P, B (D or 1, N/2) and C̃ (K, N/2), all complex, and dt (D,), with M = length. The
    four sums cancel each other for the most part, and so do their gradients, hence in float64."""
    dtype, wide = dt.dtype, widest_dtype(dt.device)
    rates, p, b, c = (x.to(torch.promote_types(wide, torch.complex64)) for x in (rates, p, b, c))
    dt = dt.to(wide).unsqueeze(-1)
    c = c.unflatten(0, (-1, len(dt))).transpose(0, 1)  # (D, K/D, N/2)
    logs = torch.log((1 + dt / 2 * rates) / (1 - dt / 2 * rates))  # of a: (D, N/2)
    inputs = 2 * dt / ((1 - dt / 2 * rates) * -torch.expm1(logs * length))  # v/w, of both of a pair
    rates, p, b, inputs = (x.unsqueeze(1) for x in (rates, p, b, inputs))
    shared = torch.cat([p.conj() * p, p.conj() * b], dim=1).expand(len(dt), -1, -1)
    sums = torch.cat([c * b, c * p, shared], dim=1) * inputs  # C̃·R·B, C̃·R·P, P*·R·P and P*·R·B
    series = grouped_exponentials(sums, logs, length)  # (D, 2·K/D + 2, M)
    return _Woodbury.apply(series).transpose(0, 1).flatten(0, 1).to(dtype)


class _Woodbury(torch.autograd.Function):
    """The spectrum ĉb - ĉp·h·p̂b/(1 + h·p̂p), h = (1+z)/2, of four series in (D, 2·K/D + 2, M), as a series (D, K/D, M).
    With a gradient of its own it takes fewer FFTs, and no complex ones: the factors of their adjoints cancel."""

    @staticmethod
    def forward(ctx: Any, series: Tensor) -> Tensor:
        sides, length = series.shape[1] // 2 - 1, series.shape[2]
        angle = torch.arange(length // 2 + 1, dtype=series.dtype, device=series.device) * (-2 * math.pi / length)
        half = (1 + torch.polar(torch.ones_like(angle), angle)) / 2
        out, loop, into = torch.fft.rfft(series[:, sides:]).split([sides, 1, 1], dim=1)
        gain = half / (half * loop).add_(1)
        through = gain * into
        ctx.save_for_backward(out, gain, through)
        return series[:, :sides] - torch.fft.irfft(out * through, n=length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        out, gain, through = ctx.saved_tensors
        length, through, spectrum = grad.shape[-1], through.conj_physical(), torch.fft.rfft(grad)
        into = (out.conj() * spectrum).sum(1, keepdim=True) * gain.conj_physical()
        grads = torch.cat([through * spectrum, -through * into, into], dim=1)  # of ĉp, p̂p and p̂b, each times -1
        return torch.cat([grad, -torch.fft.irfft(grads, n=length)], dim=1)


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
    basis = torch.view_as_complex(torch.eye(2 * p.shape[-1], dtype=dt.dtype, device=dt.device).unflatten(1, (-1, 2)))
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
@register(
    "s4-v1",
    "S4 as first published: causal, linear output, one A, P, B for all channels",
    Traits(decays=True, special_init=True, stable=True, complex=True, cost="L log L", state="D·state_size"),
    size_note="its output is linear, half of a gated one",
    fixed={"bidirectional": False, "output": "linear", "tied_a": True, "n_ssm": None, "clip_b": False},
)
@register(
    "s4-v2",
    "S4 of its later results: both sides, gated output, A, P, B of each channel",
    Traits(decays=True, special_init=True, stable=True, complex=True, cost="L log L"),
    size_note="each channel has A, P and B of its own",
    fixed={"bidirectional": True, "output": "glu", "tied_a": False, "clip_b": True},
)
class S4(StateSpace):
    """S4 in the frame of ``Convolution``. (B, L, D) -> (B, L, D). dt, and C for each side, belong to one channel; Λ, P
    and B to all or to one. The sizes are those of the official code. ``s4`` and ``s4-bidirectional`` are neither of the
    published ones: they have the gated output of the second, and one Λ, P and B for all channels as the first.

    Args:
        tied_a: Share one A, P and B among all channels; otherwise each channel has its own.
        n_ssm: Number of A, P and B, which divides the width; channels share them in turn; by default, tied_a decides.
        clip_b: Start with an Im B of at most 2, as in the newest official code; the first version has no clip.
        dropout: Dropout of what the output projection gets, the same channels at all positions of a sequence.
        max_length: Length M of the kernel; shorter sequences use its first part, longer ones a C̃ computed for them.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_decay", "frequency", "p", "b", "log_dt")
    groups: ClassVar[dict[str, tuple[str, ...]]] = {"ssm": ("log_decay", "frequency", "p", "b"), "dt": ("log_dt",)}

    def __init__(
        self,
        d_model: Size,
        *,
        state_size: Even = 64,
        tied_a: bool = True,
        n_ssm: Size | None = None,
        clip_b: bool = False,
        dt_min: Positive = 0.001,
        dt_max: Positive = 0.1,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        dropout: Probability = 0.0,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, output=output, dropout=dropout, **factory)
        systems = n_ssm or (1 if tied_a else d_model)
        check_heads(d_model, systems, "n_ssm")
        self.state_size, self.max_length = state_size, max_length
        self.clip_b = clip_b
        self.dt_min, self.dt_max = dt_min, dt_max
        pairs = state_size // 2
        shape = (pairs,) if systems == 1 else (systems, pairs)
        self.log_decay = nn.Parameter(torch.empty(shape, **factory))  # log(-Re Λ)
        self.frequency = nn.Parameter(torch.empty(shape, **factory))  # Im Λ
        self.p = nn.Parameter(torch.empty(*shape, 2, **factory))
        self.b = nn.Parameter(torch.empty(*shape, 2, **factory))
        self.c = nn.Parameter(torch.empty(self.kernels, pairs, 2, **factory))  # C̃
        self.log_dt = nn.Parameter(torch.empty(d_model, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """HiPPO-LegS, dt log-uniform, and C complex normal, as in the official code."""
        super().reset_parameters()
        rates, p, b, vectors = dplr_legs(self.state_size)
        if self.clip_b:
            b = clip_inputs(b, vectors)
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
        """Λ, P, B (D or 1, N/2), C̃ (K, N/2) and dt (D,), in float32 at the least."""
        dtype = working_dtype(self.p.dtype)
        rates = torch.complex(-self.log_decay.to(dtype).exp(), self.frequency.to(dtype))
        p, b, c = (torch.view_as_complex(x.to(dtype).contiguous()) for x in (self.p, self.b, self.c))
        rates, p, b = (torch.atleast_2d(x) for x in (rates, p, b))
        if len(p) > 1:  # channel n has those of n mod n_ssm
            rates, p, b = (x.repeat(self.d_model // len(p), 1) for x in (rates, p, b))
        return rates, p, b, c, self.log_dt.to(dtype).exp()

    def kernel(self, length: int) -> Tensor:
        with without_autocast(self.p.device.type):
            rates, p, b, c, dt = self.system()
            known = self.max_length
            if length > known:
                # C·(I - Ā²ᴹ) = C̃·(I + Āᴹ): twice as long, until it is long enough
                rows, power = _as_rows(c, self.d_model), torch.linalg.matrix_power(_matrix(rates, p, dt), known)
                while known < length:
                    rows, power, known = rows + rows @ power, power @ power, 2 * known
                c = _from_rows(rows)
            return s4_kernel(rates, p, b, c, dt, known)[:, :length]

    def constants(self) -> tuple[Tensor, ...]:
        """The system, with C (D, N/2) in the place of C̃."""
        with without_autocast(self.p.device.type):
            rates, p, b, c, dt = self.system()
            power = torch.linalg.matrix_power(_matrix(rates, p, dt), self.max_length)
            rest = torch.eye(self.state_size, dtype=dt.dtype, device=dt.device) - power
            return rates, p, b, _from_rows(torch.linalg.solve(rest, _as_rows(c, self.d_model), left=False)), dt

    @no_autocast
    def recur(self, x: Tensor, past: Tensor | None, *constants: Tensor) -> tuple[Tensor, Tensor]:
        """The past is (B, D, N/2)."""
        rates, p, b, c, dt = constants
        past = p.new_zeros(x.shape[0], self.d_model, p.shape[-1]) if past is None else past
        past = s4_advance(rates, p, dt, past, b * x.unsqueeze(-1))
        return 2 * (c * past).real.sum(-1).to(x.dtype), past
