"""Attention between blocks of tokens, of which each attends to a few others (as in BigBird, Zaheer et al. 2020).

A pattern (H or 1, blocks, K) names the K key blocks of each query block, each once; a negative number, or one beyond
the sequence, names none. The first ``global_blocks`` blocks attend to all instead, whatever their rows say.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Tensor,
    *,
    block_size: int,
    global_blocks: int = 0,
    is_causal: bool = False,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention between blocks of query, key and value (B, H, L, d), in O(L·K·block_size) -> (B, H, L, d). The last
    block may be shorter. ``mask`` (B, L) is True for tokens, False for padding, which no token then sees."""
    length = query.shape[2]
    blocks = -(-length // block_size)
    everywhere = min(global_blocks * block_size, length)
    if pattern.ndim != 3 or pattern.shape[0] not in (1, query.shape[1]) or pattern.shape[1] < blocks:
        raise ValueError(
            f"pattern must have the shape (1 or {query.shape[1]} heads, at least {blocks} blocks, blocks that each "
            f"attends to), got {tuple(pattern.shape)}"
        )
    if value.numel() == 0:
        return value.clone()
    tokens = torch.ones(1, length, dtype=torch.bool, device=query.device) if mask is None else mask
    outputs = []
    if everywhere:
        reach = everywhere if is_causal else length
        seen = tokens[:, None, None, :reach]
        if is_causal:
            seen = seen & torch.ones(reach, reach, dtype=torch.bool, device=query.device).tril()
        outputs.append(_attend(query[:, :, :everywhere], key[:, :, :reach], value[:, :, :reach], seen, dropout_p))
    if everywhere < length:
        query, key, value = (F.pad(x, (0, 0, 0, -length % block_size)) for x in (query, key, value))
        tokens = F.pad(tokens, (0, -length % block_size), value=False).unflatten(1, (blocks, block_size))
        rows = pattern[:, global_blocks:blocks]
        index = rows.clamp(0, blocks - 1)
        seen = ((rows == index).unsqueeze(-1) & tokens[:, index]).unsqueeze(3)  # (B or 1, H or 1, rows, 1, K, block)
        if is_causal:
            own = torch.arange(global_blocks, blocks, device=query.device)[:, None]
            past = torch.ones(block_size, block_size, dtype=torch.bool, device=query.device).tril()
            seen = seen & ((rows < own)[..., None, :, None] | ((rows == own)[..., None, :, None] & past[:, None]))
        seen = seen.flatten(4).expand(-1, query.shape[1], -1, -1, -1).flatten(1, 2)
        chosen = query[:, :, everywhere:].unflatten(2, (-1, block_size)).flatten(1, 2)  # (B, H·rows, block, d)
        y = _attend(chosen, _gather(key, index, block_size), _gather(value, index, block_size), seen, dropout_p)
        outputs.append(y.unflatten(1, (-1, rows.shape[1])).flatten(2, 3)[:, :, : length - everywhere])
    return torch.cat(outputs, dim=2)


def block_sparse_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Tensor,
    *,
    block_size: int,
    global_blocks: int = 0,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """The same with all pairs of tokens, (B, H, L, L)."""
    length = query.shape[2]
    position = torch.arange(length, device=query.device)
    block = position // block_size
    rows = pattern[:, block]  # (H or 1, L, K)
    seen = (rows.unsqueeze(-1) == block).any(dim=2) | (block < global_blocks)[:, None]
    if is_causal:
        seen = seen & (position <= position[:, None])
    seen = seen.unsqueeze(0) if mask is None else seen & mask[:, None, None, :]
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.masked_fill(~_or_all(seen), -math.inf).softmax(dim=-1) @ value


def _gather(x: Tensor, index: Tensor, block_size: int) -> Tensor:
    """The blocks of x (B, H, L, d) that index (H or 1, rows, K) names -> (B, H·rows, K·block, d)."""
    batch, heads, length, width = x.shape
    blocks = length // block_size
    start = blocks * torch.arange(batch * heads, device=x.device).view(batch, heads, 1, 1)
    chosen = x.reshape(-1, block_size * width).index_select(0, (index + start).flatten())
    return chosen.view(batch, heads * index.shape[1], -1, width)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, dropout_p: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=_or_all(seen), dropout_p=dropout_p)


def _or_all(seen: Tensor) -> Tensor:
    """Padding that would see nothing sees everything: its result does not matter, but must be a number."""
    return seen | ~seen.any(dim=-1, keepdim=True)
