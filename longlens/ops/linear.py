"""LaS attention in linear time: exact nearby, a running state for the far past.

The decay shrinks far *scores* to 0, not far weights: with x_ij = exp(-a(i-j))·s_ij small, exp(x_ij) ≈ 1 + x_ij, so that
the far keys of a query enter only through sums over them,

    Σ_j exp(x_ij)·v_j  ≈  Σ_j v_j  +  q_i·exp(-a(i-c)) · Σ_j exp(-a(c-j))·k_j ⊗ v_j,       and likewise with v_j = 1.

The second sum is a state of size d×d that decays from block to block: linear attention with retention. The sequence is
cut into blocks of W = reach / a; a query attends exactly to its own block and the one before it, and to earlier ones
through the state: O(L·W) for each head. The error falls like exp(-2aW) and grows with the scores. With a reach of 40
the far scores are 0 in any dtype: so the exact path uses it, too, for heads that decay steeply.
"""

import torch
from torch import Tensor

from longlens.ops.checks import at_least_float32, working_dtype
from longlens.ops.decay import decay_weights
from longlens.ops.linear_attention import before, in_chunks
from longlens.ops.union import union_attention


def linear_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    key_mask: Tensor | None,
    *,
    width: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Causal LaS attention of one head, of values (B, 1, L, dv) that are smoothed already, in blocks of ``width``. Keys
    whose ``key_mask`` (B, 1, 1, L) is False do not count."""
    batch, _, length, _ = query.shape
    working = working_dtype(query.dtype)
    present = query.new_ones(batch, length, 1) if key_mask is None else key_mask[:, 0].mT.to(working)
    tokens = query[:, 0], key[:, 0], value[:, 0], present
    q, k, v, ones = (in_chunks(at_least_float32(x), width) for x in tokens)  # (B, n, W, ·)

    # The far field: sums over all blocks but the query's own and the one before it.
    step = torch.arange(width, device=query.device)
    values = torch.cat([v * ones, ones], dim=-1)  # (B, n, W, dv + 1): numerator and denominator at once
    sums = before(values.sum(2, keepdim=True), 2).cumsum(1)  # (B, n, 1, dv + 1)
    weighted = k * decay_weights(rate, step - width, working)[0]  # relative to the end of a key's own block
    states = weighted.mT @ values  # (B, n, d, dv + 1)
    block = torch.arange(k.shape[1], device=query.device)
    gap = block[:, None] - block - 1  # whole blocks in between
    retention = decay_weights(rate, (-width * gap.clamp_min(0)).flatten(), working).view_as(gap)
    states = torch.einsum("ij,bjde->bide", torch.where(gap >= 1, retention, 0.0), states)  # at the start of block i
    folded = q * decay_weights(rate, -step, working)[0] * scale  # relative to the start of a query's own block
    far = sums + folded @ states  # (B, n, W, dv + 1)
    count = sums[..., -1:]
    total = far[..., -1:].clamp_min(1e-3 * count.clamp_min(1.0))  # positive, also for scores beyond the expansion
    output = far[..., :-1] / total
    lse = torch.where(count > 0, torch.log(total), -torch.inf).squeeze(-1)

    # The near field, exact: each block attends to the one before it and to itself, joined with the far field.
    k, v, ones = (torch.cat([before(x), x], dim=2) for x in (k, v, ones))  # (B, n, 2W, ·)
    q, k, v, ones, output, lse = (x.flatten(0, 1).unsqueeze(1) for x in (q, k, v, ones, output, lse))  # (B·n, 1, …)
    attended, _ = union_attention(q, k, v, rate, ones.mT > 0, None, output, lse, True, scale, dtype)
    return attended.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[..., :length, :]
