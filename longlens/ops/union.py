"""Decayed attention over several pieces of the keys, joined exactly.

Folding writes exp(-a|i-j|)·q_i·k_j as a product of a weighted query and a weighted key. One such product reaches only
as far as the exponent of the dtype, and only one side of the diagonal. This module covers the rest: the queries are cut
into segments, and the keys of a segment into *pieces*, each folded around a center of its own,

    past      all earlier segments          weights <= 1, may vanish: the score is then truly 0
    diagonal  the segment itself, j <= i    weights up to exp(a·W/2), the segment's width W is chosen so that it fits
    upper     the segment itself, j > i     (bidirectional only) the same, reversed
    future    all later segments            (bidirectional only) as the past

so that each piece is one call of a FlashAttention kernel. Their outputs are joined by their log-sum-exp. The backward
pass calls the kernel's own backward for each piece with the *joined* output and log-sum-exp, which gives the exact
gradient: P_ij = exp(s_ij - lse) holds for the whole row. Nothing of size L×L is made, and nothing folded is stored.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longlens.ops.checks import check_decay
from longlens.ops.decay import decay_weights, max_exponent
from longlens.ops.kernels import attention_backward, attention_forward
from longlens.ops.precision import widest_dtype, working_dtype


class Piece(NamedTuple):
    """Queries ``rows`` and keys ``keys`` (both as [start, stop) of absolute positions), folded around ``center``."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    center: float
    causal: bool  # a triangle: j <= i, or for the upper one j > i
    upper: bool  # keys later than the queries

    def slices(self, query: Tensor, key: Tensor) -> tuple[slice, slice]:
        """The piece's rows and keys; the queries are the last positions of the keys."""
        first = key.shape[-2] - query.shape[-2]
        return slice(self.rows[0] - first, self.rows[1] - first), slice(*self.keys)

    @property
    def reversed(self) -> bool:
        """An upper triangle becomes a causal one when its rows and keys are read backwards."""
        return self.causal and self.upper


def one_folding_fits(length: int, max_rate: float, dtype: torch.dtype) -> bool:
    """Whether the weights of a segment of ``length``, folded around its middle, stay within ``max_exponent``."""
    return max_rate * (length - 1) <= 2 * max_exponent(dtype)


def pieces(
    query_length: int, key_length: int, rates: Tensor | float | None, dtype: torch.dtype, is_causal: bool
) -> list[Piece]:
    """Cut attention of the last ``query_length`` positions over ``key_length`` keys into pieces that fit ``dtype``."""
    max_rate = float(rates.max()) if isinstance(rates, Tensor) else rates or 0.0
    fits = one_folding_fits(query_length, max_rate, dtype)
    width = max(query_length, 1) if fits else int(2 * max_exponent(dtype) / max_rate) + 1
    result = []
    for start in range(key_length - query_length, key_length, width):
        stop = min(start + width, key_length)
        middle = (start + stop - 1) / 2
        if start > 0:
            result.append(Piece((start, stop), (0, start), start, causal=False, upper=False))
        result.append(Piece((start, stop), (start, stop), middle, causal=True, upper=False))
        if is_causal:
            continue
        if stop - start > 1:
            result.append(Piece((start, stop - 1), (start + 1, stop), middle, causal=True, upper=True))
        if stop < key_length:
            result.append(Piece((start, stop), (stop, key_length), stop - 1, causal=False, upper=True))
    return result


def fold(
    query: Tensor, key: Tensor, rates: Tensor | None, piece: Piece, *, scale: float = 1.0, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weighted queries and keys of a piece: scale·exp(∓a(i-c))·q_i and exp(±a(j-c))·k_j, in ``dtype``."""
    if rates is None:
        return (query if scale == 1.0 else query * scale).to(dtype), key.to(dtype)
    query_weights, key_weights = _fold_weights(rates, piece, query.dtype)
    query_weights = query_weights if scale == 1.0 else query_weights * scale
    return (query * query_weights).to(dtype), (key * key_weights).to(dtype)


def _fold_weights(rates: Tensor, piece: Piece, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    query_distance, key_distance = _distances(piece, rates.device)
    if query_distance is key_distance:  # the usual piece, the diagonal: one exponential serves both
        weights = decay_weights(rates, key_distance, key_distance.dtype)
        return weights.reciprocal().to(working_dtype(dtype)), weights.to(working_dtype(dtype))
    return decay_weights(rates, -query_distance, dtype), decay_weights(rates, key_distance, dtype)


def _distances(piece: Piece, device: torch.device) -> tuple[Tensor, Tensor]:
    """i - c and j - c, negated for keys that come later than their queries."""
    sign = -1.0 if piece.upper else 1.0
    dtype = widest_dtype(device)
    rows = sign * (torch.arange(*piece.rows, device=device, dtype=dtype) - piece.center)
    if piece.rows == piece.keys:
        return rows, rows
    return rows, sign * (torch.arange(*piece.keys, device=device, dtype=dtype) - piece.center)


def hide_keys(query: Tensor, key: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Exclude keys where ``key_mask`` (B, 1 or H, 1, Lk) is False without a mask of size Lq×Lk: one more column, whose
    product is a huge negative score for them and 0 for the others. The scale must be in the queries already.
    """
    huge = 240.0 if query.dtype == torch.float16 else 1e15  # its square is still finite
    hidden = key_mask.mT.logical_not().to(key.dtype) * -huge
    query = torch.cat([query, query.new_full((1,), huge).expand(*query.shape[:-1], 1)], dim=-1)
    key = torch.cat([key, hidden.expand(*key.shape[:-1], 1)], dim=-1)
    return query, key


def union_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    key_mask: Tensor | None,
    mask: Tensor | None,
    dtype: torch.dtype,
    far: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(mask(exp(-a·|i-j|) ⊙ q·kᵀ·scale))·v over all pieces.

    It is an operator of its own, so that torch.compile need not know the rates (they decide the pieces) to trace it.

    Args:
        query: (B, H, Lq, d).
        key: (B, H, Lk, d).
        value: (B, H, Lk, dv).
        rates: Decay rates a, (H,), or None.
        is_causal: Attend to j <= i only.
        scale: Factor of the scores.
        key_mask: (B, 1 or H, 1, Lk) boolean, True for keys that count, or None.
        mask: (B, 1 or H, Lq, Lk) boolean, True = attend, or None.
        dtype: Type of the products.
        far: Output (B, H, Lq, dv) and log-sum-exp (B, H, Lq) of further keys, to be joined with the rest.

    Returns:
        (B, H, Lq, dv).
    """
    far_output, far_lse = far or (None, None)
    return _union_forward(query, key, value, rates, key_mask, mask, far_output, far_lse, is_causal, scale, dtype)[0]


@torch.library.custom_op("longlens::union_attention", mutates_args=())
def _union_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    far_output: Tensor | None,
    far_lse: Tensor | None,
    is_causal: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_decay(rates, query.shape[1])  # again, because a traced tensor shows its values only here
    working = working_dtype(dtype)
    if far_output is None or far_lse is None:
        output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=working, device=query.device)
        lse = torch.full(query.shape[:-1], -math.inf, dtype=working, device=query.device)
    else:
        output, lse = (x.to(working).clone(memory_format=torch.contiguous_format) for x in (far_output, far_lse))
    for piece in pieces(query.shape[-2], key.shape[-2], rates, dtype, is_causal):
        rows, _ = piece.slices(query, key)
        q, k, v, m = _arguments(query, key, value, rates, key_mask, mask, piece, scale, dtype)
        part, part_lse = attention_forward(q, k, v, m, piece.causal, 1.0)
        if piece.reversed:
            part, part_lse = part.flip(-2), part_lse.flip(-1)
        old, joined = lse[..., rows], torch.logaddexp(lse[..., rows], part_lse)
        floor = joined.clamp_min(torch.finfo(working).min)  # a row that has no key yet stays 0
        output[..., rows, :] *= torch.exp(old - floor).unsqueeze(-1)
        output[..., rows, :] += torch.exp(part_lse - floor).unsqueeze(-1) * part
        lse[..., rows] = joined
    return output.to(dtype), lse


@torch.library.custom_op("longlens::union_attention_backward", mutates_args=())
def _union_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    output: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    dtype: torch.dtype,
    learn_rates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    working = lse.dtype
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row without keys: all its weights are 0
    grad_query, grad_key, grad_value = (
        torch.zeros(x.shape, dtype=working, device=x.device) for x in (query, key, value)
    )
    grad_rates = torch.zeros(query.shape[1], dtype=widest_dtype(query.device), device=query.device)
    for piece in pieces(query.shape[-2], key.shape[-2], rates, dtype, is_causal):
        rows, keys = piece.slices(query, key)
        q, k, v, m = _arguments(query, key, value, rates, key_mask, mask, piece, scale, dtype)
        part = grad[..., rows, :], output[..., rows, :], lse[..., rows]
        if piece.reversed:
            part = part[0].flip(-2), part[1].flip(-2), part[2].flip(-1)
        dq, dk, dv = attention_backward(part[0], q, k, v, part[1], part[2], m, piece.causal, 1.0)
        if piece.reversed:
            dq, dk, dv = dq.flip(-2), dk.flip(-2), dv.flip(-2)
        dq, dk = dq[..., : query.shape[-1]] * scale, dk[..., : key.shape[-1]]  # without the column of hide_keys
        if rates is not None:
            query_weights, key_weights = _fold_weights(rates, piece, working)
            dq, dk = dq * query_weights, dk * key_weights
        if rates is not None and learn_rates:  # d/da of exp(-a(i-c)) and exp(a(j-c))
            query_distance, key_distance = _distances(piece, rates.device)
            grad_rates -= (dq * query[..., rows, :]).sum((0, -1)).to(grad_rates) @ query_distance
            grad_rates += (dk * key[..., keys, :]).sum((0, -1)).to(grad_rates) @ key_distance
        grad_query[..., rows, :] += dq
        grad_key[..., keys, :] += dk
        grad_value[..., keys, :] += dv
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_rates


@_union_forward.register_fake
def _(query, key, value, rates, key_mask, mask, far_output, far_lse, is_causal, scale, dtype):
    output = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=dtype)
    return output, query.new_empty(query.shape[:-1], dtype=working_dtype(dtype))


@_union_backward.register_fake
def _(grad, query, key, value, rates, key_mask, mask, output, lse, is_causal, scale, dtype, learn_rates):
    grads = (x.new_empty(x.shape) for x in (query, key, value))
    return *grads, query.new_empty(query.shape[1], dtype=widest_dtype(query.device))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal, ctx.scale, ctx.dtype = inputs
    ctx.save_for_backward(*tensors, *output)  # query, key, value, rates, key_mask, mask, far (2), output, lse
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: None):
    if grad is None:
        return (None,) * 11
    *inputs, far_output, far_lse, output, lse = ctx.saved_tensors
    learn_rates = ctx.needs_input_grad[3]
    *grads, grad_rates = _union_backward(grad, *inputs, output, lse, ctx.is_causal, ctx.scale, ctx.dtype, learn_rates)
    grad_rates = grad_rates.to(inputs[3].dtype) if learn_rates else None
    grad_far_output = grad_far_lse = None
    if far_output is not None:
        weight = torch.exp(far_lse - lse).unsqueeze(-1)  # of the far keys, in each row
        grad_far_output = weight * grad
        grad_far_lse = (grad_far_output * (far_output - output)).sum(-1)
    return *grads, grad_rates, None, None, grad_far_output, grad_far_lse, None, None, None


_union_forward.register_autograd(_backward, setup_context=_setup_context)


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    piece: Piece,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the kernel gets for a piece: folded, hidden keys excluded, and reversed where keys come later."""
    rows, keys = piece.slices(query, key)
    q, k = fold(query[..., rows, :], key[..., keys, :], rates, piece, scale=scale, dtype=dtype)
    v = value[..., keys, :].to(dtype)
    if key_mask is not None:
        q, k = hide_keys(q, k, key_mask[..., keys])
    if mask is not None:
        mask = mask[..., rows, keys]
    if piece.reversed:
        q, k, v = q.flip(-2), k.flip(-2), v.flip(-2)
        mask = None if mask is None else mask.flip(-2, -1)
    return q, k, v, mask
