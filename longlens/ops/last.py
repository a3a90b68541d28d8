"""Attention of a single query, that of the last token, to all keys, as in decoding. Its weights are one row, so that
the formulas are cheap as they stand: a decay multiplies scores, biases are added, and the row itself is smoothed."""

import math

import torch
from torch import Tensor

from longlens.ops.checks import at_least_float32, no_autocast
from longlens.ops.smoothing import Side, Smoothing, smooth_weights


@no_autocast
def attend_last(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    rates: Tensor | None = None,
    slopes: Tensor | None = None,
    smoothing: Smoothing | None = None,
    side: Side = "past",
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, 1, dv) and the scores (B, H, 1, L), in float32 at least, for a query (B, H, 1, d), and keys and
    values of H heads or of fewer, each of which serves a group of the query's.

    A score n steps back is multiplied by exp(-rate·n), and slope·n is subtracted, for rates and slopes (H,). Keys whose
    mask (B or 1, H or 1, 1, L) is False do not count; if all do not, the output is 0.
    """
    heads = query.shape[1]
    query, key, value = (at_least_float32(x) for x in (query, key, value))
    grouped = key.shape[1], heads // max(key.shape[1], 1)
    scores = query.squeeze(-2).unflatten(1, grouped) * scale @ key.mT  # (B, heads of keys, of each group, L)
    ago = torch.arange(1 - key.shape[-2], 1, device=query.device, dtype=query.dtype)  # -n
    if rates is not None:  # an error of rate·n, which may be large, is harmless: n·exp(-rate·n) is small then
        scores = scores * torch.exp(rates.to(query.dtype).view(*grouped, 1) * ago)
    if slopes is not None:
        scores = scores + slopes.to(query.dtype).view(*grouped, 1) * ago
    hidden = None
    if mask is not None:
        hidden = ~mask if mask.shape[1] == 1 else ~mask.squeeze(-2).unflatten(1, grouped)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    if smoothing is not None:
        weights = smooth_weights(weights, smoothing, side)
        weights = weights if hidden is None else weights.masked_fill(hidden, 0.0)
    return tuple(x.flatten(1, 2).unsqueeze(-2) for x in (weights @ value, scores))  # pyright: ignore[reportReturnType]
