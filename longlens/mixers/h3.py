"""H3 (Dao, Fu et al. 2022, Hungry Hungry Hippos): two state spaces, around them the products of linear attention.

    q, k, v = W x;   k̃ = s * k + e ⊙ k;   S = k̃ ⊗ v  (per head);   y = out(q · (κ * S + skip ⊙ S))

s (D, N): the kernel of the shift state space, x_t[n] = x_{t-1}[n-1] + b[n]·k_t, s[l] = Σ_n c[n+l]·b[n]. It starts with
b = e₁, for which the state is the last N inputs, and c are N taps.
κ (D/d, L): that of a diagonal one of N states for each head, S4D with the bilinear rule:

    κ[l] = 2·Re Σ_n C_n·B̄_n·Ā_n^l,   Ā = (1 + ΔA/2)/(1 - ΔA/2),   B̄ = Δ/(1 - ΔA/2)

A head is d channels, with S (d, d); for d = 1 all products are elementwise.
"""

import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import check_heads, check_inputs, check_step, hide_padding, log_uniform_
from longlens.mixers.diagonal import s4d_frequencies, s4d_modes, s4d_system
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.exponentials import decay_factors, step_exponentials, sum_of_exponentials
from longlens.ops.long_conv import long_conv
from longlens.options import Even, Positive, Size


@register(
    "h3",
    "linear attention over a shift and a diagonal state space",
    Traits(
        decays=True,
        special_init=True,
        stable=True,
        gated=True,
        complex=True,
        cost="L log L",
        state="(1 + head_dim)·state_size·D",
    ),
    size_note="its shift has two vectors of state_size numbers for each channel",
)
class H3(nn.Module):
    """Linear attention over two state spaces. (B, L, D) -> (B, L, D). The defaults are those of the official code but
    for ``tied_a``.

    Args:
        head_dim: Width d of a head, which divides the width of the layer; memory and time grow with it.
        state_size: State size N of both state spaces, even.
        learn_shift: Learn the input vector of the shift state space; otherwise its state is the last N keys.
        tied_a: Share one A among all heads; otherwise, as published, there are state_size·D/head_dim parameters more.
    """

    def __init__(
        self,
        d_model: Size,
        *,
        head_dim: Size = 1,
        state_size: Even = 64,
        learn_shift: bool = True,
        tied_a: bool = True,
        dt_min: Positive = 1e-3,
        dt_max: Positive = 0.1,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_heads(d_model, head_dim, "head_dim")
        self.d_model, self.head_dim = d_model, head_dim
        self.state_size, self.tied_a = state_size, tied_a
        self.dt_min, self.dt_max = dt_min, dt_max
        heads, pairs = d_model // head_dim, state_size // 2
        self.in_proj = nn.Linear(d_model, 3 * d_model, **factory)
        self.out_proj = nn.Linear(d_model, d_model, **factory)
        self.taps = nn.Parameter(torch.empty(d_model, state_size, **factory))  # c
        self.shift = nn.Parameter(torch.empty(d_model, state_size, **factory)) if learn_shift else None  # b
        self.kernel_parameters: tuple[str, ...] = ("log_dt", "a_real", "a_imag") + ("shift",) * learn_shift
        self.groups: dict[str, tuple[str, ...]] = {"ssm": ("a_real", "a_imag"), "dt": ("log_dt",)}
        if learn_shift:
            self.groups["shift"] = ("shift",)
        self.key_skip = nn.Parameter(torch.empty(d_model, **factory))  # e
        self.log_dt = nn.Parameter(torch.empty(heads, 1, **factory))
        self.a_real = nn.Parameter(torch.empty(1 if tied_a else heads, pairs, **factory))  # the logarithm of -Re A
        self.a_imag = nn.Parameter(torch.empty(1 if tied_a else heads, pairs, **factory))
        self.c = nn.Parameter(torch.empty(heads, pairs, 2, **factory))
        self.skip = nn.Parameter(torch.empty(heads, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As the official code: S4D-Lin, A_n = -1/2 + iπn; taps as those of ``nn.Conv1d``."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        nn.init.uniform_(self.taps, -(self.state_size**-0.5), self.state_size**-0.5)
        if self.shift is not None:
            self.shift.zero_()[:, 0] = 1
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        nn.init.constant_(self.a_real, math.log(0.5))
        self.a_imag.copy_(s4d_frequencies("lin", self.state_size).expand_as(self.a_imag))
        nn.init.normal_(self.c, std=0.5**0.5)  # a variance of 1 for each complex number
        nn.init.normal_(self.key_skip)
        nn.init.normal_(self.skip)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        key, value = hide_padding(key, mask), hide_padding(value, mask)
        memory = self._write(long_conv(key, self.shift_kernel()) + self.key_skip * key, value)
        kernel = self.kernel(x.shape[1]).repeat_interleave(self.head_dim**2, dim=0)
        return self._read(query, long_conv(memory, kernel), memory)

    def shift_kernel(self) -> Tensor:
        """s (D, N)."""
        if self.shift is None:
            return self.taps
        later = F.pad(self.taps, (0, self.state_size - 1)).unfold(1, self.state_size, 1)  # c[n+l]: (D, N, N)
        return (later * self.shift.unsqueeze(1)).sum(-1)

    def kernel(self, length: int) -> Tensor:
        """(D/d, length): the kernels of the diagonal state space, one for each head."""
        return sum_of_exponentials(*s4d_modes(*self.system(), "bilinear"), length)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The state is the constants, which the first step computes for all sequences and steps, the last N keys
        (B, N, D), latest first, and that of the diagonal state space (B, D·d, N/2)."""
        check_step(x, self.d_model, causal=True)
        if state is None:
            state = self.constants(), x.new_zeros(len(x), *self.taps.T.shape), None
        constants, keys, states = state
        shift, weights, decay = constants
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        keys = torch.cat([key.unsqueeze(1), keys[:, :-1]], dim=1)
        memory = self._write((shift * keys).sum(1) + self.key_skip * key, value)
        recalled, states = step_exponentials(weights, decay, memory, states)
        return self._read(query, recalled, memory), (constants, keys, states)

    def constants(self) -> tuple[Tensor, Tensor, Tensor]:
        """s (N, D), and the weights and factors of the exponentials, (D·d, N/2)."""
        weights, rates = s4d_modes(*self.system(), "bilinear")
        weights, decay = (part.repeat_interleave(self.head_dim**2, dim=0) for part in (weights, decay_factors(rates)))
        return self.shift_kernel().T, weights, decay

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """C (D/d, N/2), A (D/d or 1, N/2) and Δ (D/d, 1) of the diagonal state space."""
        return s4d_system(self.c, self.a_real, self.a_imag, self.log_dt)

    def _write(self, key: Tensor, value: Tensor) -> Tensor:
        """The outer product in each head, two of (..., D) -> (..., D·d)."""
        key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (key, value))
        return (key.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-3)

    def _read(self, query: Tensor, recalled: Tensor, memory: Tensor) -> Tensor:
        """In each head the query times what is recalled, (..., D) and two of (..., D·d) -> (..., D)."""
        recalled = recalled + self.skip.repeat_interleave(self.head_dim**2) * memory
        if self.head_dim == 1:
            return self.out_proj(query * recalled)
        query = query.unflatten(-1, (-1, self.head_dim))
        recalled = recalled.unflatten(-1, (-1, self.head_dim, self.head_dim))
        return self.out_proj((query.unsqueeze(-1) * recalled).sum(-2).flatten(-2))


def h3_reference(layer: H3, x: Tensor) -> Tensor:
    """(B, L, D) -> (B, L, D), by the formula above, with both state spaces as recurrences of H = D/d heads."""
    c, a, dt = (part[:, None, None] for part in layer.system())  # (H or 1, 1, 1, N/2 or 1)
    decay, inputs = (1 + dt * a / 2) / (1 - dt * a / 2), dt / (1 - dt * a / 2)  # Ā, B̄
    recent = x.new_zeros(x.shape[0], layer.d_model, layer.state_size)  # of the shift
    shift = F.one_hot(torch.tensor(0), layer.state_size) if layer.shift is None else layer.shift
    states, outputs = torch.zeros_like(c), []
    for x_t in x.unbind(1):
        q, k, v = F.linear(x_t, layer.in_proj.weight, layer.in_proj.bias).chunk(3, dim=-1)
        recent = F.pad(recent[..., :-1], (1, 0)) + shift * k.unsqueeze(-1)
        k = (layer.taps * recent).sum(-1) + layer.key_skip * k
        q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in (q, k, v))  # (B, H, d)
        outer = k.unsqueeze(-1) * v.unsqueeze(-2)  # (B, H, d, d)
        states = decay * states + inputs * outer.unsqueeze(-1)  # (B, H, d, d, N/2)
        memory = 2 * (c * states).sum(-1).real + layer.skip[:, None, None] * outer
        outputs.append(torch.einsum("bhi,bhij->bhj", q, memory).flatten(1))
    return F.linear(torch.stack(outputs, dim=1), layer.out_proj.weight, layer.out_proj.bias)
