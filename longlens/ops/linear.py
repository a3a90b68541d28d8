"""LaS attention in linear time: exact nearby, a running state for the far past.

The decay shrinks far *scores* to 0, not far weights: with x_ij = exp(-a(i-j))·s_ij small, exp(x_ij) ≈ 1 + x_ij, so that
the far keys of a query enter only through sums over them,

    Σ_j exp(x_ij)·v_j  ≈  Σ_j v_j  +  q_i·exp(-a(i-c)) · Σ_j exp(-a(c-j))·k_j ⊗ v_j,       and likewise with v_j = 1.

The second sum is a state of size d×d that decays from block to block: linear attention with retention. The sequence is
cut into blocks of W; a query attends exactly to its own block and the one before it, and to earlier ones through the
state. The error falls like exp(-2aW) and grows with the scores. With W = reach / a the time is O(L·W) for each head. A
head with a = 0 has no far field and stays exact. With ``EXACT_REACH`` the far scores are 0 in any dtype, and nothing is
approximate: so the exact path uses it, too, for heads that decay steeply.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.decay import decay_weights
from longlens.ops.precision import at_least_float32, working_dtype
from longlens.ops.union import union_attention

EXACT_REACH = 40.0  # exp(-80) = 2e-35
REACH = 3.0  # a·W. Measured at L = 8192, outputs and gradients: 5e-3 at 1, 5e-4 at 2, 5e-5 at 3, 5e-6 at 4
MIN_WIDTH = 64  # narrower blocks would save nothing, and their states would fill the memory


def block_width(rate: float, length: int, reach: float) -> int | None:
    """The blocks W of a head, or None if full attention is as cheap: three blocks span the sequence, or no decay."""
    if rate * length <= 3 * reach:
        return None
    width = max(int(reach / rate) + 1, MIN_WIDTH)
    return None if 3 * width >= length else width


def linear_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    width: int,
    *,
    scale: float,
    key_mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Causal LaS attention of one head, of values that are smoothed already, in blocks.

    Args:
        query: (B, 1, L, d).
        key: (B, 1, L, d).
        value: (B, 1, L, dv).
        rate: Decay rate of the head, (1,).
        width: Width W of the blocks.
        scale: Factor of the scores.
        key_mask: (B, 1, 1, L) boolean, True for keys that count; None for all.
        dtype: Type of the products in the kernel.

    Returns:
        (B, 1, L, dv).
    """
    batch, _, length, _ = query.shape
    working = working_dtype(query.dtype)
    present = (
        torch.ones(batch, length, 1, dtype=working, device=query.device)
        if key_mask is None
        else key_mask[:, 0].mT.to(working)
    )
    q, k, v, ones = (
        _blocks(at_least_float32(x), width) for x in (query[:, 0], key[:, 0], value[:, 0], present)
    )  # (B, n, W, ·)

    # The far field: sums over all blocks but the query's own and the one before it.
    step = torch.arange(width, device=query.device)
    values = torch.cat([v * ones, ones], dim=-1)  # (B, n, W, dv + 1): numerator and denominator at once
    sums = _shift(values.sum(2), 2).cumsum(1)  # (B, n, dv + 1)
    weighted = k * decay_weights(rate, step - width, working)[0]  # relative to the end of a key's own block
    states = weighted.mT @ values  # (B, n, d, dv + 1)
    states = torch.einsum("ij,bjde->bide", _retention(rate, k.shape[1], width, working), states)
    folded = q * decay_weights(rate, -step, working)[0] * scale  # relative to the start of a query's own block
    far = sums.unsqueeze(2) + folded @ states  # (B, n, W, dv + 1)
    count = sums[..., -1:].unsqueeze(2)
    total = far[..., -1:].clamp_min(1e-3 * count.clamp_min(1.0))  # positive, also for scores beyond the expansion
    output = far[..., :-1] / total
    lse = torch.where(count > 0, torch.log(total), -torch.inf).squeeze(-1)

    # The near field, exact: each block attends to the one before it and to itself, joined with the far field.
    pairs = [torch.cat([_shift(x, 1), x], dim=2).flatten(0, 1).unsqueeze(1) for x in (k, v, ones)]  # (B·n, 1, 2W, ·)
    attended = union_attention(
        q.flatten(0, 1).unsqueeze(1),
        pairs[0],
        pairs[1],
        rate,
        is_causal=True,
        scale=scale,
        key_mask=pairs[2].mT > 0,
        mask=None,
        dtype=dtype,
        far=(output.flatten(0, 1).unsqueeze(1), lse.flatten(0, 1).unsqueeze(1)),
    )
    return attended.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[..., :length, :]


def _blocks(x: Tensor, width: int) -> Tensor:
    """(B, L, d) -> (B, n, W, d), with zeros after the end, which no query sees."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % width)).unflatten(1, (-1, width))


def _shift(blocks: Tensor, by: int) -> Tensor:
    """Block i becomes block i + by; zeros come in."""
    return torch.cat([torch.zeros_like(blocks[:, :by]), blocks[:, : blocks.shape[1] - by]], dim=1)


def _retention(rate: Tensor, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """(n, n): how much of block j's state, as of its end, is left at the start of block i; 0 for j > i - 2."""
    block = torch.arange(count, device=rate.device)
    gap = block[:, None] - block[None, :] - 1  # whole blocks in between
    weights = decay_weights(rate, (-width * gap.clamp_min(0)).flatten(), dtype).view(count, count)
    return torch.where(gap >= 1, weights, 0.0)
