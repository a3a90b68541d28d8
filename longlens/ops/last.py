"""Attention of a single query, that of the last token, to all keys: in decoding, what a kernel for many would only slow
down. Its scores are one row, so that a decay multiplies them, and biases are added, as the formulas have it."""

import math

import torch
from torch import Tensor

from longlens.ops.checks import at_least_float32, no_autocast


@no_autocast
def attend_last(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    rates: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, 1, dv) and the scores (B, H, 1, L), in float32 at least, for a query (B, H, 1, d).

    A score n steps back is multiplied by exp(-rate·n), and slope·n is subtracted, for rates and slopes (H,). Where the
    mask (B or 1, H or 1, 1, L) is False, the query does not attend; if it is everywhere, the output is 0.
    """
    query, key, value = (at_least_float32(x) for x in (query, key, value))
    scores = query * scale @ key.mT
    ago = torch.arange(1 - key.shape[-2], 1, device=query.device, dtype=query.dtype)  # -n
    if rates is not None:  # the error of rate·n, which may be large, is small where it matters: n·exp(-rate·n) is
        scores = scores * torch.exp(rates.to(query.dtype)[:, None, None] * ago)
    if slopes is not None:
        scores = scores + slopes.to(query.dtype)[:, None, None] * ago
    if mask is None:
        return torch.softmax(scores, dim=-1) @ value, scores
    scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, dim=-1).masked_fill(~mask, 0.0) @ value, scores
