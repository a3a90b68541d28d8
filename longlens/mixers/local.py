"""Local attention, the baseline of the Long Range Arena (Tay et al., 2021).

    y_i = Σ_{j in block(i)} softmax_j(q_i·k_j / √d) · v_j,        block(i) = {j : ⌊j / W⌋ = ⌊i / W⌋}

A token attends to those of its own block of W tokens. The blocks go into the batch, (B, H, n·W, d) -> (B·n, H, W, d),
which makes it linear in the length. With ``neighbors`` a token also attends to the blocks beside its own, as in the
package local-attention.

The arena's own code reshapes a padded sequence to (W, n): its "blocks" are tokens n apart, block(i) = {j : j ≡ i mod n}
with n = ⌊L / W⌋ + 1, which is ``strided``. Here L is the longest sequence, so that n does not change with the padding.
"""

import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.errors import BadInput
from longlens.mixers.common import MultiHead, check_step
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.las import las_attention
from longlens.options import Count, Probability, Size

LocalState = tuple[tuple[Tensor, Tensor], int]


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
    batch, length = query.shape[0], query.shape[2]
    around = neighbors, 0 if is_causal else neighbors
    present = torch.ones(batch, length, dtype=torch.bool, device=query.device) if mask is None else mask
    allowed = _blocks(present[:, None, :, None], block_size, around).mT  # (B·n, 1, 1, m·W)
    if is_causal:
        causal = torch.ones(block_size, allowed.shape[-1], dtype=torch.bool, device=query.device)
        allowed = allowed & causal.tril(neighbors * block_size)
    attended = las_attention(
        _blocks(query, block_size, (0, 0)),
        _blocks(key, block_size, around),
        _blocks(value, block_size, around),
        is_causal=False,
        attn_mask=allowed,
        dropout_p=dropout_p,
    )  # (B·n, H, W, d)
    return attended.unflatten(0, (batch, -(-length // block_size))).transpose(1, 2).flatten(2, 3)[..., :length, :]


def strided_attention(
    query: Tensor, key: Tensor, value: Tensor, stride: int, *, mask: Tensor | None = None, **how: Any
) -> Tensor:
    """Attention among tokens whose positions differ by a multiple of ``stride``: (B, H, L, d) -> (B, H, L, d)."""
    length = query.shape[-2]
    rows = max(1, -(-length // stride))

    def gather(x: Tensor) -> Tensor:
        """(..., L, d) -> (..., stride·rows, d): the tokens of each class one after the other."""
        x = F.pad(x, (0, 0, 0, rows * stride - length))
        return x.unflatten(-2, (rows, stride)).transpose(-3, -2).flatten(-3, -2)

    mask = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device) if mask is None else mask
    query, key, value, mask = gather(query), gather(key), gather(value), gather(mask.unsqueeze(-1)).squeeze(-1)
    attended = local_attention(query, key, value, rows, mask=mask, **how)
    return attended.unflatten(-2, (stride, rows)).transpose(-3, -2).flatten(-3, -2)[..., :length, :]


def local_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_size: int,
    *,
    neighbors: int = 0,
    stride: int | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """The same by its formula, with a mask of blocks (L, L). A token that sees none gives NaN."""
    position = torch.arange(key.shape[-2], device=key.device)
    block = position // block_size if stride is None else position % stride
    seen = (block[:, None] - block).abs() <= neighbors
    if is_causal:
        seen = seen & (position <= position[:, None])
    if mask is not None:
        seen = seen & mask[:, None, None, :]
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ value


def _blocks(x: Tensor, size: int, around: tuple[int, int]) -> Tensor:
    """(B, H, L, d) -> (B·n, H, m·W, d): each block with those before and after it, zeros beyond the ends."""
    before, after = around
    count = -(-x.shape[-2] // size)
    x = F.pad(x, (0, 0, before * size, (count + after) * size - x.shape[-2]))
    x = x.unflatten(-2, (-1, size)).transpose(1, 2)  # (B, before + n + after, H, W, d)
    return torch.cat([x[:, place : place + count] for place in range(before + 1 + after)], dim=-2).flatten(0, 1)


@register(
    "local",
    "attention within blocks",
    Traits(decays=True, stable=True, cost="L", state="2·(neighbors + 1)·block_size·D"),
)
class LocalAttention(MultiHead):
    """Multi-head self-attention within blocks. (B, L, D) -> (B, L, D), with the parameters of attention. The arena's
    configs have blocks of 64 tokens for images, and of 50 for text.

    Args:
        block_size: Number of tokens W in a block.
        neighbors: Number of blocks on each side that a token sees beside its own.
        strided: Blocks of tokens that are equally far apart over the whole sequence, as in the code of the Long Range
            Arena, instead of adjacent ones.
        max_length: Length of the longest sequence, which decides how far apart strided tokens are.
    """

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        block_size: Size = 64,
        neighbors: Count = 0,
        strided: bool = False,
        bidirectional: bool = True,
        bias: bool = True,
        dropout: Probability = 0.0,
        rotary: bool = False,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, heads, bias=bias, dropout=dropout, rotary=rotary, **factory)
        if strided and neighbors:
            raise BadInput(f"neighbors must be 0 with strided=True, got {neighbors}")
        self.block_size, self.neighbors = block_size, neighbors
        self.stride = max_length // block_size + 1 if strided else None
        self.bidirectional = bidirectional
        self.reset_parameters()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        how: dict[str, Any] = {"is_causal": not self.bidirectional, "mask": mask, "dropout_p": self.dropout_p}
        if self.stride is not None:
            return strided_attention(query, key, value, self.stride, **how)
        return local_attention(query, key, value, self.block_size, neighbors=self.neighbors, **how)

    def step(self, x: Tensor, state: LocalState | None = None) -> tuple[Tensor, LocalState]:
        """The state is the keys and values (B, H, n, d) of the blocks in reach, and how many tokens there were."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        if self.stride is not None:
            raise BadInput("step needs strided=False: strided tokens see the whole past")
        past, seen = (None, 0) if state is None else state
        query, key, value = self._project(x.unsqueeze(1), start=seen)
        if past is not None:
            first = max(past[0].shape[-2] - seen % self.block_size - self.neighbors * self.block_size, 0)
            key = torch.cat([past[0][..., first:, :], key], dim=-2)
            value = torch.cat([past[1][..., first:, :], value], dim=-2)
        attended = las_attention(query, key, value, dropout_p=self.dropout_p)
        return self._merge(attended).squeeze(1), ((key, value), seen + 1)
