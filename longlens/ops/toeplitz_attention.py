"""Attention with a learned bias for each distance, without an L×L matrix.

    y_i = Σ_j softmax_j(q_i·k_j/√Z + b[j - i])·v_j

The biases of all pairs are a Toeplitz matrix. With the queries from last to first, i = L - 1 - r, each row of it is the
one before, moved by one place, and a block of rows is a view of the vector b. Scores are computed for one block of
queries at a time. Only y and the log-sum-exp of the scores are kept for the gradient, which computes the scores again.
"""

import math
from typing import Any

import torch
from torch import Tensor

from longlens.ops.checks import at_least_float32, known_size, no_autocast, once_differentiable

_HIDDEN = -1e30  # a score whose exponential is 0, and that can be multiplied by 0
_PAIRS = {"cpu": 2**19}  # scores of a block, which should stay in a cache; other devices need large blocks
_LEAST_ROWS = 64  # of a block, for efficient products


@no_autocast
def toeplitz_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Tensor,
    *,
    is_causal: bool,
    mask: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """Attention of one head, of query and key (B, L, Z) and value (B, L, H), in O(L) memory, in float32 at least.

    Args:
        biases: Biases b, (2L - 1,), of the keys from L - 1 steps back to L - 1 steps later.
        mask: (B, L), True for tokens; no token sees padding, and padding that sees no token sees padding.
        rows: Queries in a block, by default as many as have about half a million scores, but at least 64.
    """
    query, key, value, biases = (at_least_float32(x) for x in (query, key, value, biases))
    batch, length, width = query.shape
    if biases.shape != (2 * length - 1,):
        raise ValueError(f"biases must have the shape ({2 * length - 1},), got {tuple(biases.shape)}")
    if rows is None:
        rows = max(_LEAST_ROWS, _PAIRS.get(query.device.type, 2**24) // max(1, known_size(batch) * length))
    query = query / math.sqrt(width)
    if mask is not None:  # a further channel, whose product is the score of padding for queries that see any token
        sees = mask.cumsum(dim=1) > 0 if is_causal else mask.any(dim=1, keepdim=True).expand_as(mask)
        query = torch.cat([query, sees.unsqueeze(-1).to(query.dtype)], dim=-1)
        key = torch.cat([key, _HIDDEN * (~mask).unsqueeze(-1).to(key.dtype)], dim=-1)
    if is_causal:
        biases = torch.cat([biases[:length], torch.full_like(biases[length:], -math.inf)])
    return _Attend.apply(query.flip(1), key, value, biases, is_causal, min(rows, length)).flip(1)


def toeplitz_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, biases: Tensor, *, is_causal: bool, mask: Tensor | None = None
) -> Tensor:
    """The same with all pairs at once, (B, L, L)."""
    length, width = query.shape[1:]
    time = torch.arange(length, device=query.device)
    distance = time - time[:, None]  # j - i
    scores = query @ key.mT / math.sqrt(width) + biases[distance + length - 1]
    allowed = distance <= (0 if is_causal else length)
    seen = allowed if mask is None else allowed & mask.unsqueeze(1)
    seen = seen | (allowed & ~seen.any(dim=-1, keepdim=True))
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ value


class _Attend(torch.autograd.Function):
    """softmax(q·kᵀ + biases)·v for queries from last to first, in blocks of ``rows``. If it is causal, the biases of
    later keys are -inf."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, biases: Tensor, is_causal: bool, rows: int
    ) -> Tensor:
        query, key, value, biases = (x.contiguous() for x in (query, key, value, biases))
        output, total = torch.empty_like(value), query.new_empty((*query.shape[:2], 1))
        buffer = query.new_empty(query.shape[0], rows, key.shape[1])  # one for all blocks: new memory is slow
        for block, seen in _blocks(key.shape[1], rows, is_causal):
            scores = buffer[:, : block.stop - block.start, :seen].copy_(_of_block(biases, block, seen))
            scores.baddbmm_(query[:, block], key[:, :seen].mT)
            largest = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            sums = weights.sum(dim=-1, keepdim=True)
            output[:, block] = torch.bmm(weights, value[:, :seen]).div_(sums)
            total[:, block] = largest.add_(sums.log_())
        ctx.save_for_backward(query, key, value, biases, output, total)
        ctx.options = is_causal, rows
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, biases, output, total = ctx.saved_tensors
        is_causal, rows = ctx.options
        batch, length, _ = total.shape
        grad, mean = grad.contiguous(), (grad * output).sum(dim=-1, keepdim=True)
        grad_query, grad_key, grad_value, grad_biases = (torch.zeros_like(x) for x in (query, key, value, biases))
        buffer = query.new_empty(batch, rows, length)
        # Each row begins one place after the one before, so that pairs of equal distance share a column.
        columns = length + rows - 1
        moved = query.new_zeros(batch, rows, columns)
        # Products are in place, where autocast, if this runs in it, leaves them in full precision.
        for block, seen in _blocks(length, rows, is_causal):
            size = block.stop - block.start
            weights = torch.sub(_of_block(biases, block, seen), total[:, block], out=buffer[:, :size, :seen])
            weights.baddbmm_(query[:, block], key[:, :seen].mT).exp_()
            grad_value[:, :seen].baddbmm_(weights.mT, grad[:, block])
            scores = moved.as_strided((batch, size, seen), (rows * columns, columns + 1, 1))
            torch.bmm(grad[:, block], value[:, :seen].mT, out=scores)
            scores.sub_(mean[:, block]).mul_(weights)
            torch.bmm(scores, key[:, :seen], out=grad_query[:, block])
            grad_key[:, :seen].baddbmm_(scores.mT, query[:, block])
            # What a causal block has beyond its keys belongs to later ones, and is partly left from the block before.
            last = length if is_causal else block.stop + seen - 1
            grad_biases[block.start : last] += moved[:, :size, : last - block.start].sum((0, 1))
        return grad_query, grad_key, grad_value, grad_biases, None, None


def _blocks(length: int, rows: int, is_causal: bool) -> list[tuple[slice, int]]:
    """Blocks of queries from last to first, each with the number of keys that its first query may see."""
    return [
        (slice(start, min(start + rows, length)), length - start if is_causal else length)
        for start in range(0, length, rows)
    ]


def _of_block(biases: Tensor, block: slice, seen: int) -> Tensor:
    """A view (rows, seen) of the biases (2L - 1,): its row r begins at their r-th."""
    return biases[block.start :].as_strided((block.stop - block.start, seen), (1, 1))
