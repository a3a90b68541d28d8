"""Eq. 4 of the paper as it is printed, with the L×L matrices in full: the oracle, never the fast path."""

import math
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import AttentionArguments, AttentionOptions, at_least_float32, full_mask, no_autocast
from longlens.ops.decay import widest_dtype
from longlens.ops.smoothing import Side, Smoothing, check_choice, smoothing_kernel

Pooling = Literal["after-softmax", "re-masked", "renormalized", "before-softmax"]


class _Options(AttentionOptions, total=False):
    pooling: Pooling


@overload
def las_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, *, return_weights: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def las_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, *, return_weights: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
def las_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor | Sequence[float] | None = None,
    smoothing: Smoothing | None = None,
    side: Side = "past",
    chunk_size: int | None = None,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    pooling: Pooling = "after-softmax",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``las_attention`` by its formula, LaS_c(Q, K, V) = AP(softmax(exp(-α_c · D) ⊙ (Q Kᵀ / √d))) V, with its arguments
    and two more. Low precision is computed in float32 and rounded at the end.

    Args:
        pooling: Order of pooling and softmax, where the paper is silent. ``"after-softmax"`` is Eq. 4. ``"re-masked"``
            sets to 0 what pooling has moved to places that the mask forbids, ``"renormalized"`` also makes the rows sum
            to 1 again, and ``"before-softmax"`` pools the scores instead of the weights.
        return_weights: Also return the weights (B, H, Lq, Lk) that multiply the values.
    """
    given = AttentionArguments(decay, smoothing, side, chunk_size, is_causal, attn_mask, scale, dropout_p, enable_gqa)
    given.check(query, key, value)
    check_choice("pooling", pooling, Pooling)
    output, weights = attend_by_formula(query, key, value, given, pooling)
    return (output, weights) if return_weights else output


@no_autocast
def attend_by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: AttentionArguments,
    pooling: Pooling = "after-softmax",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Lq, dv) and the weights (B, H, Lq, Lk), for arguments that have been checked. A bias, which
    broadcasts to the weights, is added to the decayed scores."""
    dtype = query.dtype
    query, key, value = (at_least_float32(x) for x in (query, key, value))
    key, value = given.repeat_groups(query, key, value)

    # The queries are the last Lq positions.
    key_position = torch.arange(key.shape[-2], device=query.device)
    query_position = torch.arange(query.shape[-2], device=query.device) + key.shape[-2] - query.shape[-2]
    distance = query_position[:, None] - key_position  # (Lq, Lk)
    allowed = distance >= 0 if given.is_causal else torch.ones_like(distance, dtype=torch.bool)
    mask = None if given.attn_mask is None else full_mask(given.attn_mask, key.shape[-2])
    same_chunk = None
    if given.chunk_size is not None:
        same_chunk = query_position[:, None] // given.chunk_size == key_position // given.chunk_size
        allowed = allowed & same_chunk
        mask = mask if mask is None else mask & same_chunk
    if mask is not None:
        allowed = allowed & mask

    scores = query @ key.mT * given.score_scale(query)  # (B, H, Lq, Lk)
    if given.decay is not None:
        rates = torch.as_tensor(given.decay, device=query.device, dtype=widest_dtype(query.device))
        scores = scores * torch.exp(-rates[:, None, None] * distance.abs()).to(scores.dtype)
    if bias is not None:
        scores = scores + at_least_float32(bias)
    if given.smoothing is not None and pooling == "before-softmax":
        scores = _pool(scores.masked_fill(~allowed, 0.0), given.smoothing, given.side)
    weights = torch.softmax(scores.masked_fill(~allowed, -math.inf), dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~allowed, 0.0)  # a row that may attend to nothing gives 0, not nan
    if given.dropout_p > 0:
        weights = torch.dropout(weights, given.dropout_p, train=True)
    if given.smoothing is not None and pooling != "before-softmax":
        weights = _pool(weights, given.smoothing, given.side)
        if same_chunk is not None:
            weights = weights.masked_fill(~same_chunk, 0.0)  # a chunk begins with zeros, as a sequence does
    if pooling in ("re-masked", "renormalized"):
        weights = weights.masked_fill(~allowed, 0.0)
    if pooling == "renormalized":
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    if mask is not None:  # a key that no query (of its chunk) may attend to is outside of the sequence: padding
        weights = weights.masked_fill(~mask.any(-2, keepdim=True), 0.0)

    return (weights @ value).to(dtype), weights


def _pool(rows: Tensor, smoothing: Smoothing, side: Side) -> Tensor:
    """1-D pooling of each row, with zeros outside of it: pooled[j] = Σ_m f_m · row[j + m - offset]."""
    kernel = smoothing_kernel(smoothing, side)
    length, reach = rows.shape[-1], len(kernel) - 1
    offset = reach // 2 if side == "centered" else 0
    padded = F.pad(rows, (offset, reach - offset))
    pooled = kernel[0] * padded[..., :length]
    for m in range(1, len(kernel)):
        pooled = pooled + kernel[m] * padded[..., m : m + length]
    return pooled
