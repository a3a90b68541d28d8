"""Decayed attention over several pieces of the keys, joined exactly.

Folding writes exp(-a|i-j|)·q_i·k_j as a product of a weighted query and a weighted key, which reaches only as far as
the exponent of the dtype, and only one side of the diagonal. For the rest, the queries are cut into segments, and the
keys of a segment into *pieces*, each folded around a center of its own,

    past      all earlier segments          weights <= 1, may vanish: the score is then truly 0
    diagonal  the segment itself, j <= i    weights up to exp(a·W/2), the segment's width W is chosen so that it fits
    upper     the segment itself, j > i     (bidirectional only) the same, reversed
    future    all later segments            (bidirectional only) as the past

so that each piece is one call of a FlashAttention kernel. Their outputs are joined by their log-sum-exp. The backward
pass calls the kernel's own backward for each piece with the *joined* output and log-sum-exp, which gives the exact
gradient, as P_ij = exp(s_ij - lse) holds for the whole row. Nothing of size L×L is made, and nothing folded is stored.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longlens.ops.checks import check_decay, working_dtype
from longlens.ops.decay import Piece, fold, hide_keys, max_exponent, one_folding_fits, widest_dtype
from longlens.ops.kernels import attention_backward, attention_forward


@torch.library.custom_op("longlens::union_attention", mutates_args=())
def union_attention(
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
    """softmax(mask(exp(-a·|i-j|) ⊙ q·kᵀ·scale))·v over all pieces, (B, H, Lq, dv), with products in ``dtype``; and the
    log-sum-exp of the scores, (B, H, Lq).

    ``key_mask`` (B, 1 or H, 1, Lk) is True for keys that count, ``mask`` (B, 1 or H, Lq, Lk) where a query attends to a
    key. ``far_output`` and ``far_lse`` are those of further keys, to be joined with the rest. It is an operator of its
    own, so that torch.compile need not know the rates (they decide the pieces) to trace it.
    """
    check_decay(rates, query.shape[1])  # again, because a traced tensor shows its values only here
    working = working_dtype(dtype)
    if far_output is None or far_lse is None:
        output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=working, device=query.device)
        lse = torch.full(query.shape[:-1], -math.inf, dtype=working, device=query.device)
    else:
        output, lse = (x.to(working).clone(memory_format=torch.contiguous_format) for x in (far_output, far_lse))
    pieces = _folded_pieces(query, key, value, rates, key_mask, mask, is_causal, scale, dtype)
    for piece, rows, _, q, k, v, m in pieces:
        part, part_lse = attention_forward(q, k, v, m, piece.causal)
        if piece.reversed:
            part, part_lse = part.flip(-2), part_lse.flip(-1)
        old, joined = lse[..., rows], torch.logaddexp(lse[..., rows], part_lse)
        floor = joined.clamp_min(torch.finfo(working).min)  # a row that has no key yet stays 0
        output[..., rows, :] *= torch.exp(old - floor).unsqueeze(-1)
        output[..., rows, :] += torch.exp(part_lse - floor).unsqueeze(-1) * part
        lse[..., rows] = joined
    return output.to(dtype), lse


@torch.library.custom_op("longlens::union_attention_backward", mutates_args=())
def union_backward(
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
    pieces = _folded_pieces(query, key, value, rates, key_mask, mask, is_causal, scale, dtype)
    for piece, rows, keys, q, k, v, m in pieces:
        part = grad[..., rows, :], output[..., rows, :], lse[..., rows]
        if piece.reversed:
            part = part[0].flip(-2), part[1].flip(-2), part[2].flip(-1)
        dq, dk, dv = attention_backward(part[0], q, k, v, part[1], part[2], m, piece.causal)
        if piece.reversed:
            dq, dk, dv = dq.flip(-2), dk.flip(-2), dv.flip(-2)
        dq, dk = dq[..., : query.shape[-1]] * scale, dk[..., : key.shape[-1]]  # without the column of hide_keys
        if rates is not None:
            query_weights, key_weights = piece.weights(rates, working)
            dq, dk = dq * query_weights, dk * key_weights
        if rates is not None and learn_rates:  # d/da of exp(-a(i-c)) and exp(a(j-c))
            query_distance, key_distance = piece.distances(rates.device)
            grad_rates -= (dq * query[..., rows, :]).sum((0, -1)).to(grad_rates) @ query_distance
            grad_rates += (dk * key[..., keys, :]).sum((0, -1)).to(grad_rates) @ key_distance
        grad_query[..., rows, :] += dq
        grad_key[..., keys, :] += dk
        grad_value[..., keys, :] += dv
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_rates


@union_attention.register_fake
def _(query, key, value, rates, key_mask, mask, far_output, far_lse, is_causal, scale, dtype):
    output = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=dtype)
    return output, query.new_empty(query.shape[:-1], dtype=working_dtype(dtype))


@union_backward.register_fake
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
    *grads, grad_rates = union_backward(grad, *inputs, output, lse, ctx.is_causal, ctx.scale, ctx.dtype, learn_rates)
    grad_rates = grad_rates.to(inputs[3].dtype) if learn_rates else None
    grad_far_output = grad_far_lse = None
    if far_output is not None:
        weight = torch.exp(far_lse - lse).unsqueeze(-1)  # of the far keys, in each row
        grad_far_output = weight * grad
        grad_far_lse = (grad_far_output * (far_output - output)).sum(-1)
    return *grads, grad_rates, None, None, grad_far_output, grad_far_lse, None, None, None


union_attention.register_autograd(_backward, setup_context=_setup_context)


def _pieces(
    query_length: int, key_length: int, max_rate: float, dtype: torch.dtype, is_causal: bool
) -> Iterator[Piece]:
    """Cut attention of the last ``query_length`` positions over ``key_length`` keys into pieces that fit ``dtype``."""
    fits = one_folding_fits(query_length, max_rate, dtype)
    width = max(query_length, 1) if fits else int(2 * max_exponent(dtype) / max_rate) + 1
    for start in range(key_length - query_length, key_length, width):
        stop = min(start + width, key_length)
        middle = (start + stop - 1) / 2
        if start > 0:
            yield Piece((start, stop), (0, start), start, causal=False)
        yield Piece((start, stop), (start, stop), middle, causal=True)
        if not is_causal and stop - start > 1:
            yield Piece((start, stop - 1), (start + 1, stop), middle, causal=True, upper=True)
        if not is_causal and stop < key_length:
            yield Piece((start, stop), (stop, key_length), stop - 1, causal=False, upper=True)


def _folded_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dtype: torch.dtype,
) -> Iterator[tuple[Piece, slice, slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """Each piece, its rows and keys, and what the kernel gets: folded, hidden keys excluded, and reversed where keys
    come later."""
    max_rate = 0.0 if rates is None else float(rates.max())
    first = key.shape[-2] - query.shape[-2]  # the queries are the last positions of the keys
    for piece in _pieces(query.shape[-2], key.shape[-2], max_rate, dtype, is_causal):
        rows, keys = slice(piece.rows[0] - first, piece.rows[1] - first), slice(*piece.keys)
        q, k = fold(query[..., rows, :], key[..., keys, :], rates, piece, scale=scale, dtype=dtype)
        v = value[..., keys, :].to(dtype)
        m = None if mask is None else mask[..., rows, keys]
        if key_mask is not None:
            q, k = hide_keys(q, k, key_mask[..., keys])
        if piece.reversed:
            q, k, v, m = q.flip(-2), k.flip(-2), v.flip(-2), None if m is None else m.flip(-2, -1)
        yield piece, rows, keys, q, k, v, m
