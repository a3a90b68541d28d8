"""Local attention, the baseline of the Long Range Arena (Tay et al., 2021).

    y_i = Σ_{j in block(i)} softmax_j(q_i·k_j / √d) · v_j,        block(i) = {j : ⌊j / W⌋ = ⌊i / W⌋}

A sequence is cut into blocks of W tokens, and a token attends to those of its own block. The blocks go into the batch,
(B, H, n·W, d) -> (B·n, H, W, d), which makes it linear in the length. With ``neighbors`` a token also attends to the
blocks beside its own, so that more layers see further, as in the package local-attention.

The arena's code reshapes a sequence to (W, n): its "blocks" are tokens n apart, which changes with the length of the
padding. Contiguous blocks, which the name promises, are what is offered here.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import MultiHead, check_step
from longlens.ops.checks import check_share
from longlens.ops.las import las_attention


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_size: int,
    *,
    neighbors: int = 0,
    is_causal: bool = False,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention within blocks, and to ``neighbors`` blocks before them, and after them if it is not causal.

    query, key and value (B, H, L, d), mask (B, L) boolean or None -> (B, H, L, d). The last block may be shorter.
    """
    if neighbors == 0:
        mask = None if mask is None else mask[:, None, None, :]
        return las_attention(
            query, key, value, chunk_size=block_size, is_causal=is_causal, attn_mask=mask, dropout_p=dropout_p
        )
    batch, _, length, _ = query.shape
    around = neighbors, 0 if is_causal else neighbors
    present = torch.ones(1, length, dtype=torch.bool, device=query.device) if mask is None else mask
    allowed = _blocks(present[:, None, :, None], block_size, around).mT  # (n or B·n, 1, 1, m·W)
    if is_causal:
        causal = torch.ones(block_size, allowed.shape[-1], dtype=torch.bool, device=query.device)
        allowed = allowed & causal.tril(neighbors * block_size)
    attended = las_attention(
        _blocks(query, block_size, (0, 0)),
        _blocks(key, block_size, around),
        _blocks(value, block_size, around),
        is_causal=False,
        attn_mask=allowed.repeat(batch // len(present), 1, 1, 1),
        dropout_p=dropout_p,
    )  # (B·n, H, W, d)
    return attended.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[..., :length, :]


def _blocks(x: Tensor, size: int, around: tuple[int, int]) -> Tensor:
    """(B, H, L, d) -> (B·n, H, m·W, d): each block with those before and after it, zeros beyond the ends."""
    before, after = around
    count = -(-x.shape[-2] // size)
    x = F.pad(x, (0, 0, before * size, (count + after) * size - x.shape[-2]))
    x = x.unflatten(-2, (-1, size)).transpose(1, 2)  # (B, before + n + after, H, W, d)
    return torch.cat([x[:, place : place + count] for place in range(before + 1 + after)], dim=-2).flatten(0, 1)


class LocalState(NamedTuple):
    """What a step remembers: keys and values (B, H, n, d) of the blocks in reach, and how many tokens there were."""

    key: Tensor
    value: Tensor
    seen: int


class LocalAttention(MultiHead):
    """Multi-head self-attention within blocks. (B, L, D) -> (B, L, D), with the parameters of attention.

    Args:
        d_model: D, a multiple of ``heads``.
        heads: H.
        block_size: W, the tokens of a block.
        neighbors: blocks on each side that a token sees beside its own.
        bidirectional: see later tokens, too.
        bias, rotary: see ``MultiHead``.
        attention_dropout: of the attention weights, in training.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        block_size: int = 64,
        neighbors: int = 0,
        bidirectional: bool = True,
        bias: bool = True,
        attention_dropout: float = 0.0,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if neighbors < 0:
            raise ValueError(f"neighbors must be at least 0, got {neighbors}")
        check_share("attention_dropout", attention_dropout)
        super().__init__(d_model, heads, bias=bias, rotary=rotary, device=device, dtype=dtype)
        self.block_size, self.neighbors = block_size, neighbors
        self.bidirectional, self.dropout = bidirectional, attention_dropout
        self.reset_parameters()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return local_attention(
            query, key, value, self.block_size, neighbors=self.neighbors, is_causal=not self.bidirectional, mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip

    def step(self, x: Tensor, state: LocalState | None = None) -> tuple[Tensor, LocalState]:
        """One token of each sequence, (B, D), and what came before, None at the start -> (B, D) and the next state."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        seen = 0 if state is None else state.seen
        query, key, value = self._project(x.unsqueeze(1), start=seen)
        if state is not None:
            reach = seen % self.block_size + self.neighbors * self.block_size
            first = max(state.key.shape[-2] - reach, 0)
            key = torch.cat([state.key[..., first:, :], key], dim=-2)
            value = torch.cat([state.value[..., first:, :], value], dim=-2)
        attended = las_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0)
        return self._merge(attended).squeeze(1), LocalState(key, value, seen + 1)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, heads={self.heads}, block_size={self.block_size}, neighbors={self.neighbors}, "
            f"bidirectional={self.bidirectional}, dropout={self.dropout}, rotary={self.rotary}"
        )


@register("local")
@dataclass(frozen=True, kw_only=True)
class Local(Config):
    """Attention within blocks, as the Long Range Arena's encoder (its configs say 64 for images; its text tasks 50).

    Args:
        heads: number of heads.
        block_size: tokens of a block.
        neighbors: blocks on each side that a token sees beside its own.
        bidirectional: see both sides.
        bias: of the two projections.
        attention_dropout: of the attention weights, in training.
        rotary: turn queries and keys by their positions.
    """

    heads: int = 8
    block_size: int = 64
    neighbors: int = 0
    bidirectional: bool = True
    bias: bool = True
    attention_dropout: float = 0.0
    rotary: bool = False

    summary: ClassVar[str] = "attention within blocks"
    traits: ClassVar[Traits] = Traits(decays=True, stable=True, cost="L", state="2·(neighbors + 1)·block_size·D")

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> LocalAttention:
        return LocalAttention(d_model, **asdict(self), device=device, dtype=dtype)
