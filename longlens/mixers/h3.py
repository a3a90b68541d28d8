"""H3 (Dao, Fu et al. 2022, Hungry Hungry Hippos): two state spaces, around them the products of linear attention.

    q, k, v = W x;   k̃ = s * k + e ⊙ k;   S = k̃ ⊗ v  (per head);   y = out(q · (κ * S + skip ⊙ S))

s (D, N): the kernel of the shift state space, whose state is the last N inputs: N taps.
κ (D/d, L): that of a diagonal one of N states, S4D with the bilinear rule (see ``s4d.py``), for each head.
A head is d channels, with S (d, d); for d = 1 all products are elementwise.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import check_inputs, check_step, hide_padding
from longlens.mixers.s4d import s4d_frequencies, s4d_kernel, s4d_modes
from longlens.ops.exponentials import as_complex, exact, log_uniform_, step_exponentials
from longlens.ops.long_conv import long_conv


class H3(nn.Module):
    """The layer above.

    Args:
        d_model: D, a multiple of ``head_dim``.
        head_dim: d.
        state_size: N, even, of both state spaces.
        tied_a: one A for all heads.
        dt_min: the smallest step Δ at the start.
        dt_max: the largest.
    """

    special_parameters: ClassVar[tuple[str, ...]] = ("log_dt", "a_real", "a_imag")

    def __init__(
        self,
        d_model: int,
        *,
        head_dim: int = 1,
        state_size: int = 64,
        tied_a: bool = True,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim < 1 or d_model < 1 or d_model % head_dim:
            raise ValueError(f"d_model must be a multiple of head_dim, got d_model={d_model} and head_dim={head_dim}")
        if state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be an even number of at least 2, got {state_size}")
        self.d_model, self.head_dim, self.state_size, self.tied_a = d_model, head_dim, state_size, tied_a
        self.dt_min, self.dt_max = dt_min, dt_max
        heads, pairs = d_model // head_dim, state_size // 2

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.in_proj = nn.Linear(d_model, 3 * d_model, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, device=device, dtype=dtype)
        self.taps = empty(d_model, state_size)  # s
        self.key_skip = empty(d_model)  # e
        self.log_dt = empty(heads, 1)
        self.a_real = empty(1 if tied_a else heads, pairs)  # log of -Re A
        self.a_imag = empty(1 if tied_a else heads, pairs)
        self.c = empty(heads, pairs, 2)
        self.skip = empty(heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As the official code: S4D-Lin, A_n = -1/2 + iπn; taps as those of ``nn.Conv1d``."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        nn.init.uniform_(self.taps, -(self.state_size**-0.5), self.state_size**-0.5)
        log_uniform_(self.log_dt, self.dt_min, self.dt_max)
        nn.init.constant_(self.a_real, math.log(0.5))
        self.a_imag.copy_(s4d_frequencies("lin", self.state_size).expand_as(self.a_imag))
        nn.init.normal_(self.c, std=0.5**0.5)  # a variance of 1 for each complex number
        nn.init.normal_(self.key_skip)
        nn.init.normal_(self.skip)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        key, value = hide_padding(key, mask), hide_padding(value, mask)
        memory = self._write(long_conv(key, self.taps) + self.key_skip * key, value)
        kernel = self.kernel(x.shape[1]).repeat_interleave(self.head_dim**2, dim=0)
        return self.out_proj(self._read(query, long_conv(memory, kernel) + self._memory_skip() * memory))

    def kernel(self, length: int) -> Tensor:
        """(D/d, length): the kernels of the diagonal state space, one for each head."""
        return s4d_kernel(*self._system(), length, "bilinear")

    def step(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One token of each sequence, (B, D), and what came before, None at the start -> (B, D) and the next state: the
        last N keys (B, N, D), latest first, and the states (B, D·d, N/2) of the diagonal state space."""
        check_step(x, self.d_model, causal=True)
        keys, states = (x.new_zeros(len(x), *self.taps.T.shape), None) if state is None else state
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        keys = torch.cat([key.unsqueeze(1), keys[:, :-1]], dim=1)
        memory = self._write((self.taps.T * keys).sum(1) + self.key_skip * key, value)
        modes = s4d_modes(*self._system(), "bilinear")
        weights, rates = (part.repeat_interleave(self.head_dim**2, dim=0) for part in modes)
        recalled, states = step_exponentials(weights, rates, memory, states)
        return self.out_proj(self._read(query, recalled + self._memory_skip() * memory)), (keys, states)

    def _system(self) -> tuple[Tensor, Tensor, Tensor]:
        """C (D/d, N/2), A (D/d or 1, N/2) and Δ (D/d, 1) of the diagonal state space."""
        a = torch.complex(-exact(self.a_real).exp(), exact(self.a_imag))
        return as_complex(self.c), a, exact(self.log_dt).exp()

    def _memory_skip(self) -> Tensor:
        return self.skip.repeat_interleave(self.head_dim**2)

    def _write(self, key: Tensor, value: Tensor) -> Tensor:
        """The outer product in each head, two of (..., D) -> (..., D·d)."""
        if self.head_dim == 1:
            return key * value
        key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (key, value))
        return (key.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-3)

    def _read(self, query: Tensor, memory: Tensor) -> Tensor:
        """In each head the query times the matrix, (..., D) and (..., D·d) -> (..., D)."""
        if self.head_dim == 1:
            return query * memory
        query = query.unflatten(-1, (-1, self.head_dim))
        memory = memory.unflatten(-1, (-1, self.head_dim, self.head_dim))
        return (query.unsqueeze(-1) * memory).sum(-2).flatten(-2)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, head_dim={self.head_dim}, state_size={self.state_size}, tied_a={self.tied_a}, "
            f"dt_min={self.dt_min}, dt_max={self.dt_max}"
        )


@register("h3")
@dataclass(frozen=True, kw_only=True)
class H3Config(Config):
    """H3, with the defaults of the official code but for ``tied_a``.

    Args:
        head_dim: channels of a head; memory and time grow with it.
        state_size: N, even, of both state spaces.
        tied_a: one A for all heads; False for one each, as published, with state_size·D/head_dim parameters more.
        dt_min: smallest step at the start.
        dt_max: largest step at the start.
    """

    head_dim: int = 1
    state_size: int = 64
    tied_a: bool = True
    dt_min: float = 1e-3
    dt_max: float = 0.1

    summary: ClassVar[str] = "linear attention over a shift and a diagonal state space"
    traits: ClassVar[Traits] = Traits(
        decays=True, special_init=True, stable=True, gated=True, complex=True, cost="L log L",
        state="(1 + head_dim)·state_size·D",
    )  # fmt: skip

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> H3:
        return H3(d_model, **asdict(self), device=device, dtype=dtype)
