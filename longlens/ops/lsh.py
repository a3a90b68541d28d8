"""Attention among the tokens that a locality-sensitive hash puts into the same bucket (Kitaev et al. 2020).

In each of several rounds the tokens are sorted by bucket, within it by time, and cut into chunks. A token sees those
tokens of its bucket that are in its own chunk or the one before. With the scores s_j = q·k_j, where k = q/|q|, of the
tokens that it sees in round r,

    y = Σ_r exp(z_r)·y_r / Σ_r exp(z_r),   y_r = Σ_j exp(s_j - z_r)·v_j,   z_r = log Σ_j exp(s_j)

A token sees itself only if there is no other. The borders of chunks depend on all tokens, later ones too: a causal
token sees the last tokens of its bucket before it instead, as many as a chunk has, which lie in the same two chunks.

Shapes: B sequences, H heads, L tokens, R rounds; in a round, the sorted tokens are n chunks of S, each of which sees 2S
tokens. A *place* is where a token stands in the order of a round.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import at_least_float32, known_size, no_autocast, once_differentiable

_SELF = -5e4  # the score of a token with itself, as in reformer-pytorch: below all others, and possible in float16
_PADDING = torch.iinfo(torch.int32).max  # the bucket of padding, which sorts behind all others
_NO_TOKEN = -1  # the bucket of what is seen where there is no token
_PAIRS = {"cpu": 2**19}  # scores at a time, which should stay in a cache; other devices need many


def lsh_buckets(x: Tensor, rotations: Tensor, factors: tuple[int, ...] | None = None) -> Tensor:
    """The bucket argmax([x·M; -x·M]), (B, H, R, L), of each token x, (B, H, L, d), in each round, for matrices M of
    (R, d, buckets / 2); those of (R, d, 0) put all tokens into one bucket.

    With ``factors`` n_1, n_2, … there are several hashes of so many buckets, whose M stand side by side, and one of
    n_1·n_2·… buckets for each combination of theirs: as many products as their sum."""
    rounds, _, half = rotations.shape
    buckets = torch.zeros((*x.shape[:2], rounds, x.shape[2]), dtype=torch.int64, device=x.device)
    if half == 0:
        return buckets
    turned = x.detach().unsqueeze(2) @ rotations.to(x.dtype)  # (B, H, R, L, Σ n / 2)
    for part in turned.split([half] if factors is None else [count // 2 for count in factors], dim=-1):
        axis = part.abs().argmax(dim=-1, keepdim=True)
        bucket = (axis + part.shape[-1] * (part.gather(-1, axis) < 0)).squeeze(-1)
        buckets = 2 * part.shape[-1] * buckets + bucket
    return buckets


def lsh_attention(
    qk: Tensor,
    value: Tensor,
    buckets: Tensor,
    *,
    size: int,
    is_causal: bool = False,
    across_buckets: bool = False,
    distinct: bool = False,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention within buckets, (B, H, L, d), in O(R·L·S) after a sort.

    Args:
        qk: Queries, (B, H, L, d), whose directions are the keys.
        value: Values, (B, H, L, d).
        buckets: Bucket of each token in each round, (B, H, R, L), numbers of at least 0.
        size: Length S of a chunk.
        across_buckets: See all tokens of the two chunks, whatever their bucket. This cannot be causal.
        distinct: Count a token that is seen in several rounds once, which takes O(R²·L·S).
        mask: (B, L), True for tokens, False for padding, which no token then sees.
        dropout_p: Dropout of the weights within a round.
    """
    _check(is_causal, across_buckets)
    length = qk.shape[2]
    if length == 0:
        return value.clone()
    size = min(size, length)  # a chunk that holds all tokens need not be longer
    buckets = F.pad(_send_padding_back(buckets, mask), (0, -length % size), value=_PADDING)
    orders = torch.argsort(buckets, dim=-1, stable=True)  # (B, H, R, n·S): the token at each place
    places = torch.empty_like(orders)  # and the place of each token
    places.scatter_(-1, orders, torch.arange(orders.shape[-1], device=orders.device).expand_as(orders))
    tokens = torch.cat([qk, F.normalize(at_least_float32(qk), dim=-1).to(qk.dtype), value], dim=-1)
    tokens = F.pad(tokens, (0, 0, 0, -length % size))  # (B, H, n·S, 3d)

    totals, outputs = [], []
    # One round after the other: the pairs of all rounds at once would need far more memory.
    for this, (order, place) in enumerate(zip(orders.unbind(2), places.unbind(2), strict=True)):
        chunks = _Reorder.apply(tokens, order, place).unflatten(2, (-1, size))
        query, key, v = chunks.chunk(3, dim=-1)  # (B, H, n, S, d)
        kept = F.dropout(query.new_ones(*query.shape[:-1], 2 * size), dropout_p) if dropout_p > 0 else None
        rounds = slice(0 if distinct else this, this + 1)  # those before it tell what has been seen already
        sorted_buckets, sorted_places = (
            x[:, :, rounds].int().gather(-1, order.unsqueeze(2).expand_as(x[:, :, rounds])) for x in (buckets, places)
        )
        total, y = _Attend.apply(query, key, v, sorted_buckets, sorted_places, kept, is_causal, across_buckets)
        totals.append(_Reorder.apply(total.flatten(2).unsqueeze(-1), place, order))
        outputs.append(_Reorder.apply(y.flatten(2, 3), place, order))
    weights = torch.stack(totals, dim=2).softmax(dim=2).to(value.dtype)  # (B, H, R, L, 1): exp(z_r) / Σ_r exp(z_r)
    return (weights * torch.stack(outputs, dim=2)).sum(dim=2)[:, :, :length]


def lsh_attention_reference(
    qk: Tensor,
    value: Tensor,
    buckets: Tensor,
    *,
    size: int,
    is_causal: bool = False,
    across_buckets: bool = False,
    distinct: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """The same with all pairs of tokens, (B, H, R, L, L): rows see columns."""
    _check(is_causal, across_buckets)
    buckets = _send_padding_back(buckets, mask)
    time = torch.arange(qk.shape[2], device=qk.device)
    row, column = buckets.unsqueeze(-1), buckets.unsqueeze(-2)
    place = ((column < row) | ((column == row) & (time < time[:, None]))).sum(dim=-1)  # (B, H, R, L)
    if is_causal:
        back = place.unsqueeze(-1) - place.unsqueeze(-2)  # by how many places
        seen = (back >= 0) & (back <= size)
    else:
        back = (place // size).unsqueeze(-1) - (place // size).unsqueeze(-2)  # by how many chunks
        seen = (back == 0) | (back == 1)
    seen = seen & (column != _PADDING) & (across_buckets | (column == row))

    scores = (qk @ F.normalize(qk, dim=-1).mT).unsqueeze(2)
    if distinct:
        scores = scores - seen.sum(dim=2, keepdim=True).clamp(min=1).to(scores.dtype).log()
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(time == time[:, None], _SELF)
    total = scores.logsumexp(dim=-1, keepdim=True)
    return (total.softmax(dim=2) * (scores.softmax(dim=-1) @ value.unsqueeze(2))).sum(dim=2)


def _check(is_causal: bool, across_buckets: bool) -> None:
    if is_causal and across_buckets:
        raise ValueError("across_buckets cannot be causal: later tokens decide which buckets share a chunk")


def _send_padding_back(buckets: Tensor, mask: Tensor | None) -> Tensor:
    return buckets if mask is None else buckets.masked_fill(~mask[:, None, None, :], _PADDING)


class _Reorder(torch.autograd.Function):
    """(B, H, L, d) in the order of a permutation, (B, H, L). Its gradient is in that of the inverse one; autograd,
    which does not know that no token is taken twice, would add them one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        start = x.shape[2] * torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1)
        return x.flatten(0, 2).index_select(0, (order + start).flatten()).unflatten(0, order.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        order, inverse = ctx.saved_tensors
        return _Reorder.apply(grad, inverse, order), None, None


class _Attend(torch.autograd.Function):
    """One round of sorted chunks, (B, H, n, S, d): z and y. The gradient computes the scores again. Both go
    through a few chunks at a time."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        buckets: Tensor,
        places: Tensor,
        kept: Tensor | None,
        is_causal: bool,
        across_buckets: bool,
    ) -> tuple[Tensor, Tensor]:
        y, total = torch.empty_like(value), at_least_float32(query.new_empty(query.shape[:-1]))
        for rows, seen in _pieces(query):
            scores = _scores(query, key, buckets, places, rows, seen, is_causal, across_buckets)
            weights = scores.softmax(dim=-1)
            total[:, :, rows] = scores.amax(dim=-1) - weights.amax(dim=-1).log()
            y[:, :, rows] = _drop(weights, kept, rows).to(value.dtype) @ _and_previous(value[:, :, seen], rows)
        ctx.save_for_backward(query, key, value, buckets, places, kept, y)
        ctx.options = is_causal, across_buckets
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_y: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, buckets, places, kept, y = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        change = ((grad_y * y).sum(dim=-1) - grad_total).unsqueeze(-1)
        for rows, seen in _pieces(query):
            scores = _scores(query, key, buckets, places, rows, seen, *ctx.options)
            weights = scores.softmax(dim=-1)  # exp(s - z), without torch.exp, which is slow at -inf
            g = grad_y[:, :, rows]
            _add_to_previous(grad_value, _drop(weights, kept, rows).to(value.dtype).mT @ g, rows)
            # dz/ds = w, and dy/ds = w ⊙ (v - y); a token's score with itself is a constant.
            grad = (g @ _and_previous(value[:, :, seen], rows).mT).to(weights.dtype)
            grad = _drop(grad, kept, rows).sub_(change[:, :, rows]).mul_(weights)
            _with_itself(grad).zero_()
            grad = grad.to(query.dtype)
            grad_query[:, :, rows] = grad @ _and_previous(key[:, :, seen], rows)
            _add_to_previous(grad_key, grad.mT @ query[:, :, rows], rows)
        return grad_query, grad_key, grad_value, None, None, None, None, None


def _pieces(chunks: Tensor) -> list[tuple[slice, slice]]:
    """Parts of the n chunks (B, H, n, S, d), and what they see: the same and the chunk before them, if there is one."""
    batch, heads, count, size, _ = chunks.shape
    step = max(1, _PAIRS.get(chunks.device.type, 2**26) // max(1, known_size(batch) * heads * 2 * size**2))
    starts = range(0, count, step)
    return [(slice(n, min(n + step, count)), slice(max(n - 1, 0), min(n + step, count))) for n in starts]


def _scores(
    query: Tensor,
    key: Tensor,
    buckets: Tensor,
    places: Tensor,
    rows: slice,
    seen: slice,
    is_causal: bool,
    across_buckets: bool,
) -> Tensor:
    """(B, H, rows, S, 2S). Buckets and places, (B, H, r, n·S), are those of the sorted tokens, in r - 1 rounds before
    this one and in it."""
    size = query.shape[-2]
    buckets, places = (x[..., seen.start * size : seen.stop * size] for x in (buckets, places))
    row, column = _pairs(buckets[:, :, -1], size, rows)
    hidden = column == _NO_TOKEN if across_buckets else column != row
    if is_causal:
        position = torch.arange(2 * size, device=buckets.device)
        back = position[size:, None] - position  # by how many places
        hidden = hidden | (back < 0) | (back > size)
    # Pairs that an earlier round has seen.
    for bucket, place in zip(buckets[:, :, :-1].unbind(2), places[:, :, :-1].unbind(2), strict=True):
        row, column = _pairs(place if is_causal else place // size, size, rows)
        repeated = (row - column >= 0) & (row - column <= (size if is_causal else 1))
        if not across_buckets:
            row, column = _pairs(bucket, size, rows)
            repeated &= row == column
        hidden = hidden | repeated
    scores = at_least_float32(query[:, :, rows] @ _and_previous(key[:, :, seen], rows).mT)
    scores = scores.masked_fill_(hidden, -math.inf)
    _with_itself(scores).fill_(_SELF)
    return scores


def _pairs(numbers: Tensor, size: int, rows: slice) -> tuple[Tensor, Tensor]:
    """(B, H, seen·S) -> the rows and columns of pairs: those of a chunk, (B, H, rows, S, 1), and those that it sees,
    (B, H, rows, 1, 2S)."""
    row = numbers.unflatten(-1, (-1, size)).unsqueeze(-1)
    column = _and_previous(row.masked_fill(row == _PADDING, _NO_TOKEN), rows, _NO_TOKEN).mT
    return row[:, :, min(rows.start, 1) :], column


def _and_previous(chunks: Tensor, rows: slice, fill: int = 0) -> Tensor:
    """(..., seen, S, d) -> (..., rows, 2S, d): the rows of the chunk before, then its own."""
    if rows.start == 0:
        chunks = F.pad(chunks, (0, 0, 0, 0, 1, 0), value=fill)
    return torch.cat([chunks[..., :-1, :, :], chunks[..., 1:, :, :]], dim=-2)


def _add_to_previous(total: Tensor, grad: Tensor, rows: slice) -> None:
    """The gradient of ``_and_previous``, (..., rows, 2S, d), to that of all chunks, (..., n, S, d)."""
    before, own = grad.chunk(2, dim=-2)
    total[..., rows, :, :] += own
    first = max(rows.start, 1)
    total[..., first - 1 : rows.stop - 1, :, :] += before[..., first - rows.start :, :, :]


def _with_itself(pairs: Tensor) -> Tensor:
    """The pairs (..., S, 2S) of tokens with themselves, (..., S)."""
    return pairs[..., pairs.shape[-2] :].diagonal(dim1=-2, dim2=-1)


def _drop(weights: Tensor, kept: Tensor | None, rows: slice) -> Tensor:
    return weights if kept is None else weights * kept[:, :, rows]
