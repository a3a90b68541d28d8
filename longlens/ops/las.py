"""Local and Smooth (LaS) attention (Zimerman & Wolf, ICML 2024), at the cost of FlashAttention.

    LaS_c(Q, K, V) = AP(softmax(mask(exp(-α_c · D) ⊙ (Q Kᵀ / √d)))) V                                          (Eq. 4)

Two identities remove the L×L matrices. Average pooling moves to the values, AP(A)·V = A·(F V) (``smoothing.py``), and
the causal decay folds into queries and keys: for i >= j and any center c

    exp(-a(i-j)) · q_i·k_j  =  (exp(-a(i-c))·q_i) · (exp(a(j-c))·k_j),

so causal LaS is ``scaled_dot_product_attention(q', k', F v, is_causal=True)``. Where one folding does not reach (rates
too large for the dtype, bidirectional attention, a cache), ``union.py`` joins several. ``reference.py`` is the formula.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import AttentionArguments, Backend, check_tolerance, full_mask, in_autocast, refuse_tangents
from longlens.ops.decay import Piece, fold, hide_keys, join_masks, one_folding_fits, pad_heads, widest_dtype
from longlens.ops.last import attend_last
from longlens.ops.linear import linear_attention
from longlens.ops.reference import attend_by_formula
from longlens.ops.smoothing import Side, Smoothing, check_choice, smooth_values
from longlens.ops.union import union_attention
from longlens.ops.windows import REACH, choose_windows, fixed_windows

EXACT_REACH = 40.0  # exp(-80) = 2e-35: nothing is approximate


def las_attention(
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
    backend: Backend = "auto",
    tolerance: float | None = None,
) -> Tensor:
    """Local and Smooth attention, (B, H, Lq, dv); a drop-in for ``torch.nn.functional.scaled_dot_product_attention``,
    though causal by default. With neither decay nor smoothing it is plain attention; decay alone is the paper's
    L-attention, smoothing alone its S-attention, both are LaS, and with ``chunk_size=128`` LaS-chunk.

    Args:
        query: Queries, (B, H, Lq, d): heads come before positions. With Lq < Lk they are the last Lq positions, as with
            a cache of keys.
        key: Keys, (B, H, Lk, d).
        value: Values, (B, H, Lk, dv).
        decay: Rates >= 0, (H,), see ``decay_rates``; a score at distance n is multiplied by exp(-rate·n). A sequence of
            floats saves a GPU from waiting for the values of a tensor to be checked. One kernel call serves while
            rate·Lq is below about 44 (float32, bfloat16; 5.5 in float16); steeper rates take several.
        smoothing: Odd window P of the moving average over each row of weights, or a 1-D kernel f: the weight of a key
            moves on to the keys before it, f[0] of it staying. At the ends it is not renormalized: with a window of P
            the weights of the first query sum to 1 / P.
        side: Side of the window. ``"past"`` smooths over the key and the P - 1 keys before it, which keeps causality.
            ``"centered"`` is ordinary pooling: it shows each query (P - 1) / 2 steps of its future, so never use it for
            a language model.
        chunk_size: Length of independent chunks, the last of which may be shorter; None for the whole sequence.
        is_causal: Attend to j <= i only. Without it the distance is |i - j|.
        attn_mask: Boolean, True = attend, broadcastable to (B, H, Lq, Lk); applied after the decay. A key that no query
            may attend to is padding: its value does not enter the smoothing (among the queries given: with a cache,
            hide a key from one query only if it is hidden from all). Rows that may attend to nothing give 0.
        scale: Factor of the scores; 1/√d by default.
        dropout_p: Dropout of the weights, before smoothing. As in torch's function it is always on: pass 0.0 for
            evaluation. Where several kernel calls are joined (bidirectional decay, a cache, steep rates) it takes the
            formula.
        enable_gqa: Let key and value have fewer heads, each serving a group of H / Hkv query heads.
        backend: Kernel. ``"sdpa"``: the exact fast path; ``"reference"``: the formula with L×L matrices; ``"linear"``:
            causal only, approximate for the far past (``linear.py``), O(L) for each head that decays fast enough for it
            to pay, while the others, and that of rate 0, stay as they are; ``"auto"``: sdpa, but for a single query
            two products (``last.py``), which are faster then.
        tolerance: Of the linear backend: no entry of the output differs from that of the exact form by more than
            ``tolerance`` times the largest entry of |value| (smoothed) in its sequence and head, rounding aside. The
            near window of each head is chosen for it, from the queries and keys given (``windows.py`` has the proof).
            None: windows of 3 / rate, and no bound: an error of about 1e-4 for scores of size 1.
    """
    check_choice("backend", backend, Backend)
    given = AttentionArguments(decay, smoothing, side, chunk_size, is_causal, attn_mask, scale, dropout_p, enable_gqa)
    given.check(query, key, value)
    check_tolerance(tolerance, backend)
    if backend == "reference":
        return attend_by_formula(query, key, value, given)[0]
    if backend == "linear":
        given.check_linear(query, key)
    mask = None if attn_mask is None else full_mask(attn_mask, key.shape[-2])
    rates, numbers = _rates(decay, query.device)
    if query.shape[-2] == 1 and backend == "auto" and dropout_p == 0:
        return _attend_last(query, key, value, mask, rates, given)
    key, value = given.repeat_groups(query, key, value)
    plan = _Plan(given, rates, numbers, given.score_scale(query), backend, tolerance, _compute_dtype(query))
    if chunk_size is None or chunk_size >= key.shape[-2]:
        return _attend(query, key, value, mask, plan)
    return _attend_chunks(query, key, value, mask, chunk_size, plan)


def _attend_last(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rates: Tensor | None, given: AttentionArguments
) -> Tensor:
    """For a single query."""
    if given.chunk_size is not None:  # those before its own do not count
        own = (key.shape[-2] - 1) % given.chunk_size + 1
        key, value = key[..., -own:, :], value[..., -own:, :]
        mask = None if mask is None else mask[..., -own:]
    if mask is not None:  # a weight of 0 does not remove what is not a number
        if mask.shape[1] > 1:  # heads of a group may hide different keys
            key, value = given.repeat_groups(query, key, value)
        value = value.masked_fill(~mask.mT, 0.0)
    query, key, value = (x.to(_compute_dtype(x)) for x in (query, key, value))
    smoothing = {"smoothing": given.smoothing, "side": given.side}
    output, _ = attend_last(query, key, value, given.score_scale(query), rates=rates, mask=mask, **smoothing)
    return output.to(query.dtype)


class _Plan(NamedTuple):
    """The arguments, and what follows from them and the inputs."""

    given: AttentionArguments
    rates: Tensor | None  # (H,)
    numbers: tuple[float, ...] | None  # the rates; None: a traced tensor, whose values are not known yet
    scale: float
    backend: Backend
    tolerance: float | None
    dtype: torch.dtype  # of the products: the inputs', or autocast's


def _rates(
    decay: Tensor | Sequence[float] | None, device: torch.device
) -> tuple[Tensor | None, tuple[float, ...] | None]:
    """The rates as a tensor and as numbers. All 0 is plain attention."""
    if decay is None:
        return None, ()
    if isinstance(decay, Tensor):
        numbers = None if torch.compiler.is_compiling() else tuple(decay.tolist())
        learned, decay = decay.requires_grad, decay.to(device)
    else:
        numbers, learned = tuple(decay), False
        decay = torch.tensor(numbers, dtype=widest_dtype(device), device=device)
    return (decay, numbers) if learned or numbers is None or max(numbers, default=0.0) > 0 else (None, ())


def _compute_dtype(query: Tensor) -> torch.dtype:
    """As torch's own function: autocast lowers float32, never float64."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if in_autocast(kind) and query.dtype != torch.float64 else query.dtype


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, plan: _Plan) -> Tensor:
    """Attention over one unbroken sequence: smooth the values, fold the decay, call the kernel."""
    absent = None if mask is None else ~mask.any(-2).unsqueeze(-1)  # (B or 1, H or 1, Lk, 1): padding
    if absent is not None:  # it neither lends values to the smoothing nor keeps any
        value = value.masked_fill(absent, 0.0)
    if plan.given.smoothing is not None:
        value = smooth_values(value, plan.given.smoothing, plan.given.side)
        value = value if absent is None else value.masked_fill(absent, 0.0)
    return _attend_smoothed(query, key, value, mask, plan)


def _attend_smoothed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, plan: _Plan) -> Tensor:
    is_causal, dropout_p = plan.given.is_causal, plan.given.dropout_p
    piece = _single_piece(query.shape[-2], key.shape[-2], plan)
    if query.numel() == 0 or (piece is None and dropout_p > 0):
        query, key, value = (x.to(plan.dtype) for x in (query, key, value))
        rest = replace(plan.given, decay=plan.rates, smoothing=None, chunk_size=None, attn_mask=mask, scale=plan.scale)
        return attend_by_formula(query, key, value, rest)[0]
    key_mask = mask if mask is not None and mask.shape[-2] == 1 else None
    dense_mask = None if key_mask is not None else mask
    windows = None if dense_mask is not None else _near_windows(query, key, key_mask, plan)
    if piece is None or windows is not None:
        refuse_tangents(query, key, value, plan.rates)
    if windows is not None:
        assert plan.rates is not None
        return linear_attention(query, key, value, plan.rates, key_mask, windows, plan.scale, plan.dtype)[0]
    if piece is None:
        masks, far = (key_mask, dense_mask), (None, None)
        return union_attention(query, key, value, plan.rates, *masks, *far, is_causal, plan.scale, plan.dtype)[0]

    # One folding and one call of torch's attention: the usual case.
    width, folded_scale, scale = value.shape[-1], 1.0, plan.scale
    if key_mask is not None or scale <= 0:  # torch's kernel multiplies its mask of -inf by the scale, too
        folded_scale, scale = scale, 1.0
    query, key = fold(query, key, plan.rates, piece, scale=folded_scale, dtype=plan.dtype)
    if key_mask is not None:
        query, key = hide_keys(query, key, key_mask)
    dense_mask, is_causal = join_masks(query, key, dense_mask, is_causal)
    query, key, value = pad_heads(query, key, value.to(plan.dtype))
    return F.scaled_dot_product_attention(query, key, value, dense_mask, dropout_p, is_causal, scale=scale)[..., :width]


def _single_piece(query_length: int, key_length: int, plan: _Plan) -> Piece | None:
    """What to fold if one call of the kernel covers it all; None if it takes several, or if that is not known yet."""
    if not plan.given.is_causal:
        return Piece((0, query_length), (0, key_length), 0.0, causal=False) if plan.rates is None else None
    if plan.numbers is None or query_length != key_length:
        return None
    if not one_folding_fits(key_length, max(plan.numbers, default=0.0), plan.dtype):
        return None
    return Piece((0, key_length), (0, key_length), (key_length - 1) / 2, causal=True)


def _near_windows(query: Tensor, key: Tensor, key_mask: Tensor | None, plan: _Plan) -> Tensor | None:
    """The window (H,) of each head that is cheaper with one: exactly if it decays steeply, or in linear time. None if
    there is no such head."""
    given, length = plan.given, key.shape[-2]
    if plan.rates is None or plan.numbers is None or not given.is_causal or query.shape[-2] != length:
        return None
    if given.dropout_p > 0:
        return None
    reach = REACH if plan.backend == "linear" and plan.tolerance is None else EXACT_REACH
    if plan.tolerance is None and max(plan.numbers) * length <= 2 * reach:  # the usual case
        return None
    windows = fixed_windows(plan.numbers, length, reach)
    if plan.tolerance is not None and any(plan.numbers):
        rest = plan.rates.detach(), key_mask, plan.scale, plan.tolerance
        chosen = choose_windows(query.detach(), key.detach(), *rest)
        chosen = torch.minimum(chosen, torch.tensor(windows))
        return chosen if torch.compiler.is_compiling() or min(chosen.tolist()) < length else None
    return torch.tensor(windows) if min(windows) < length else None


def _attend_chunks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, size: int, plan: _Plan) -> Tensor:
    """Each chunk is a sequence of its own: full chunks go into the batch, a shorter last one runs alone."""
    query_length, missing = query.shape[-2], key.shape[-2] - query.shape[-2]
    if missing > 0:  # chunks before the first query are not needed; its own chunk may begin before it
        start, lead = missing - missing % size, missing % size
        key, value = key[..., start:, :], value[..., start:, :]
        mask = mask if mask is None else mask[..., start:]
        if key.shape[-2] <= size:
            return _attend(query, key, value, mask, plan)
        query = F.pad(query, (0, 0, lead, 0))
        if mask is not None and mask.shape[-2] > 1:
            mask = F.pad(mask, (0, 0, lead, 0))
    count = key.shape[-2] // size
    body = count * size
    q, k, v = (_split(x[..., :body, :], size) for x in (query, key, value))
    outputs = _attend(q, k, v, _split_mask(mask, query.shape[0], body, size), plan)
    outputs = outputs.unflatten(0, (query.shape[0], count)).transpose(2, 3).flatten(1, 2).transpose(1, 2)
    if body < key.shape[-2]:
        tail = mask if mask is None or mask.shape[-2] == 1 else mask[..., body:, :]
        tail = tail if tail is None else tail[..., body:]
        last = _attend(query[..., body:, :], key[..., body:, :], value[..., body:, :], tail, plan)
        outputs = torch.cat([outputs, last], dim=-2)
    return outputs[..., -query_length:, :]


def _split(x: Tensor, size: int) -> Tensor:
    """(B, H, n·size, d) -> (B·n, H, size, d)"""
    return x.unflatten(-2, (-1, size)).transpose(1, 2).flatten(0, 1)


def _split_mask(mask: Tensor | None, batch: int, length: int, size: int) -> Tensor | None:
    """(B or 1, H or 1, Lq or 1, Lk) -> (B·n, H or 1, size or 1, size): the blocks on the diagonal."""
    if mask is None:
        return None
    mask = mask[..., :length].expand(batch, -1, -1, -1)
    if mask.shape[-2] == 1:
        return _split(mask.mT, size).mT
    mask = mask[..., :length, :].unflatten(-1, (-1, size)).unflatten(2, (-1, size))  # (B, H, n, size, n, size)
    return mask.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3).flatten(0, 1)
