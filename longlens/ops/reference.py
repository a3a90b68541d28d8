"""Eq. 4 of the paper as it is printed, with the L×L matrices in full: the oracle, never the fast path.

LaS_c(Q, K, V) = AP(softmax(exp(-α_c · D) ⊙ (Q Kᵀ / √d))) V
"""

import math
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import AttentionOptions, check_attention, full_mask
from longlens.ops.smoothing import Smoothing, smoothing_kernel

POOLINGS = ("after-softmax", "re-masked", "renormalized", "before-softmax")


@overload
def las_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pooling: str = ...,
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def las_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pooling: str = ...,
    return_weights: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
def las_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor | Sequence[float] | None = None,
    smoothing: Smoothing | None = None,
    side: str = "past",
    chunk_size: int | None = None,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    pooling: str = "after-softmax",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``las_attention`` by its formula; the arguments are the same, and two more:

    * ``pooling``: where the paper is silent. ``"after-softmax"`` is Eq. 4. ``"re-masked"`` sets to 0 what pooling has
      moved to places that the mask forbids, ``"renormalized"`` also makes the rows sum to 1 again, and
      ``"before-softmax"`` pools the scores instead of the weights.
    * ``return_weights``: also return the weights (B, H, Lq, Lk) that multiply the values.

    Low precision is computed in float32 and rounded at the end.
    """
    options: AttentionOptions = {
        "decay": decay, "smoothing": smoothing, "side": side, "chunk_size": chunk_size, "is_causal": is_causal,
        "attn_mask": attn_mask, "scale": scale, "dropout_p": dropout_p, "enable_gqa": enable_gqa,
    }  # fmt: skip
    check_attention(query, key, value, **options)
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")

    kind, dtype = query.device.type, query.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return las_attention_reference(  # pyright: ignore[reportCallIssue]
                query, key, value, pooling=pooling, return_weights=return_weights, **options
            )
    query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))

    # The queries are the last Lq positions.
    key_position = torch.arange(key.shape[-2], device=query.device)
    query_position = torch.arange(query.shape[-2], device=query.device) + key.shape[-2] - query.shape[-2]
    distance = query_position[:, None] - key_position[None, :]  # (Lq, Lk)

    allowed = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if attn_mask is not None:
        attn_mask = full_mask(attn_mask, key.shape[-2])
    same_chunk = None
    if chunk_size is not None:
        same_chunk = query_position[:, None] // chunk_size == key_position[None, :] // chunk_size
        allowed = allowed & same_chunk
        attn_mask = attn_mask if attn_mask is None else attn_mask & same_chunk
    if attn_mask is not None:
        allowed = allowed & attn_mask

    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, Lq, Lk)
    if decay is not None:
        rates = torch.as_tensor(decay, device=query.device, dtype=torch.float64)
        scores = scores * torch.exp(-rates[:, None, None] * distance.abs()).to(scores.dtype)
    if smoothing is not None and pooling == "before-softmax":
        scores = _pool(scores.masked_fill(~allowed, 0.0), smoothing, side)
    weights = torch.softmax(scores.masked_fill(~allowed, -math.inf), dim=-1)
    if attn_mask is not None:
        weights = weights.masked_fill(~allowed, 0.0)  # a row that may attend to nothing gives 0, not nan
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, train=True)
    if smoothing is not None and pooling != "before-softmax":
        weights = _pool(weights, smoothing, side)
        if same_chunk is not None:
            weights = weights.masked_fill(~same_chunk, 0.0)  # a chunk begins with zeros, as a sequence does
    if pooling in ("re-masked", "renormalized"):
        weights = weights.masked_fill(~allowed, 0.0)
    if pooling == "renormalized":
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    if attn_mask is not None:  # a key that no query (of its chunk) may attend to is outside of the sequence: padding
        weights = weights.masked_fill(~attn_mask.any(-2, keepdim=True), 0.0)

    output = (weights @ value).to(dtype)
    return (output, weights) if return_weights else output


def _pool(rows: Tensor, smoothing: Smoothing, side: str) -> Tensor:
    """1-D pooling of each row, with zeros outside of it: pooled[j] = Σ_m f_m · row[j + m - offset]."""
    kernel = smoothing_kernel(smoothing, side)
    length, reach = rows.shape[-1], len(kernel) - 1
    offset = reach // 2 if side == "centered" else 0
    padded = F.pad(rows, (offset, reach - offset))
    pooled = kernel[0] * padded[..., :length]
    for m in range(1, len(kernel)):
        pooled = pooled + kernel[m] * padded[..., m : m + length]
    return pooled
