"""Attention among the tokens that a locality-sensitive hash puts into the same bucket (Kitaev et al. 2020).

In each of several rounds the tokens are sorted by bucket, within it by time, and cut into chunks. A token sees those
tokens of its bucket that are in its own chunk or the one before. With the scores s_j = q·k_j/√d, where k = q/|q|, of
those that it sees in round r,

    y = Σ_r exp(z_r)·y_r / Σ_r exp(z_r),   y_r = Σ_j exp(s_j - z_r)·v_j,   z_r = log Σ_j exp(s_j)

Itself a token sees only if there is no other: its own score would nearly always be the largest.

The borders of chunks depend on all tokens, later ones too. A causal token sees the last tokens of its bucket before it
instead, as many as a chunk has. Wherever the borders are, those lie in the same two chunks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_SELF = -5e4  # the score of a token with itself, as in reformer-pytorch: below all others, and possible in float16
_PADDING = torch.iinfo(torch.int32).max  # the bucket of padding, which sorts behind all others
_NOBODY = -1  # a bucket without tokens


def lsh_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """argmax([xR; -xR]) in each round: (B, H, L, d) and R (rounds, d, buckets / 2) -> (B, H, rounds, L).

    Rotations of the shape (rounds, d, 0) put all tokens into one bucket.
    """
    rounds, _, half = rotations.shape
    if half == 0:
        return torch.zeros((*x.shape[:2], rounds, x.shape[2]), dtype=torch.int64, device=x.device)
    turned = x.detach().unsqueeze(2) @ rotations.to(x.dtype)  # (B, H, rounds, L, buckets / 2)
    axis = turned.abs().argmax(dim=-1, keepdim=True)
    return (axis + half * (turned.gather(-1, axis) < 0)).squeeze(-1)


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
    """Two of (B, H, L, d) -> (B, H, L, d), in O(rounds·L·size) after a sort.

    buckets: (B, H, rounds, L), numbers of at least 0.
    size: the length of a chunk.
    across_buckets: see all tokens of the two chunks, whatever their bucket. This cannot be causal.
    distinct: a token that is seen in n rounds counts once, not n times, which takes O(rounds²·L·size).
    mask: (B, L), True for tokens, False for padding, which no token then sees.
    dropout_p: of the weights within a round.
    """
    _check(is_causal, across_buckets)
    length = qk.shape[2]
    if length == 0:
        return value.clone()
    size = min(size, length)  # a chunk that holds all tokens need not be longer
    buckets = F.pad(_send_padding_back(buckets, mask), (0, -length % size), value=_PADDING)
    order = torch.argsort(buckets, dim=-1, stable=True)
    places = torch.empty_like(order)
    places.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    rows = torch.cat([qk / math.sqrt(qk.shape[-1]), F.normalize(qk, dim=-1).to(qk.dtype), value], dim=-1)
    rows = F.pad(rows, (0, 0, 0, -length % size))

    totals, outputs = [], []
    # One round after the other: the pairs of all rounds at once would need far more memory.
    for last, (forth, back) in enumerate(zip(order.unbind(2), places.unbind(2), strict=True)):
        query, key, v = _take(rows, forth).unflatten(2, (-1, size)).chunk(3, dim=-1)  # (B, H, chunks, size, d)
        kept = F.dropout(query.new_ones(*query.shape[:-1], 2 * size), dropout_p) if dropout_p > 0 else None
        rounds = slice(0 if distinct else last, last + 1)
        sorted_buckets, sorted_places = (
            x[:, :, rounds].int().gather(-1, forth.unsqueeze(2).expand_as(x[:, :, rounds])) for x in (buckets, places)
        )
        total, y = _Attend.apply(query, key, v, sorted_buckets, sorted_places, kept, is_causal, across_buckets)
        totals.append(total.flatten(2).gather(-1, back))
        outputs.append(_take(y.flatten(2, 3), back))
    shares = torch.stack(totals, dim=2).softmax(dim=2).to(value.dtype)  # (B, H, rounds, L)
    return torch.einsum("bhrl,bhrld->bhld", shares, torch.stack(outputs, dim=2))[:, :, :length]


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
    """The same with all pairs of tokens, (B, H, rounds, L, L)."""
    _check(is_causal, across_buckets)
    buckets = _send_padding_back(buckets, mask)
    time = torch.arange(qk.shape[2], device=qk.device)
    own, other = buckets.unsqueeze(-1), buckets.unsqueeze(-2)
    place = ((other < own) | ((other == own) & (time < time[:, None]))).sum(dim=-1)
    if is_causal:
        ahead = place.unsqueeze(-1) - place.unsqueeze(-2)
        seen = (ahead >= 0) & (ahead <= size)
    else:
        ahead = (place // size).unsqueeze(-1) - (place // size).unsqueeze(-2)
        seen = (ahead == 0) | (ahead == 1)
    seen = seen & (other != _PADDING) & (across_buckets | (other == own))

    scores = (qk @ F.normalize(qk, dim=-1).mT / math.sqrt(qk.shape[-1])).unsqueeze(2)
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


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """(B, H, L, d) in the order of index, (B, H, L)."""
    start = rows.shape[2] * torch.arange(rows.shape[:2].numel(), device=rows.device).view(*rows.shape[:2], 1)
    return rows.flatten(0, 2).index_select(0, (index + start).flatten()).unflatten(0, index.shape)


class _Attend(torch.autograd.Function):
    """One round of sorted chunks, (B, H, chunks, size, d): z and y. Only they are kept for the gradient, which computes
    the scores again."""

    @staticmethod
    def forward(ctx, query, key, value, buckets, places, kept, is_causal, across_buckets):
        with torch.autocast(query.device.type, enabled=False):
            scores = _scores(query, key, buckets, places, is_causal, across_buckets)
            weights = scores.softmax(dim=-1)
            total = scores.amax(dim=-1) - weights.amax(dim=-1).log()
            y = _drop(weights, kept).to(value.dtype) @ _and_previous(value)
        ctx.save_for_backward(query, key, value, buckets, places, kept, total, y)
        ctx.options = is_causal, across_buckets
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, grad_y):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, buckets, places, kept, total, y = ctx.saved_tensors
        scores = _scores(query, key, buckets, places, *ctx.options)
        weights = scores.sub_(total.unsqueeze(-1)).exp_()
        grad_value = _drop(weights, kept).to(value.dtype).mT @ grad_y
        # dz/ds = w, and dy/ds = w ⊙ (v - y); a token's score with itself is a constant.
        grad = _drop((grad_y @ _and_previous(value).mT).to(weights.dtype), kept)
        grad = grad.sub_((grad_y * y).sum(dim=-1, keepdim=True) - grad_total.unsqueeze(-1)).mul_(weights)
        _with_itself(grad).zero_()
        grad = grad.to(query.dtype)
        grad_query, grad_key = grad @ _and_previous(key), grad.mT @ query
        return grad_query, _fold(grad_key), _fold(grad_value), None, None, None, None, None


def _scores(
    query: Tensor, key: Tensor, buckets: Tensor, places: Tensor, is_causal: bool, across_buckets: bool
) -> Tensor:
    """(B, H, chunks, size, 2·size)"""
    scores = query @ _and_previous(key).mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores.masked_fill_(_hidden(buckets, places, query.shape[-2], is_causal, across_buckets), -math.inf)
    _with_itself(scores).fill_(_SELF)
    return scores


def _hidden(buckets: Tensor, places: Tensor, size: int, is_causal: bool, across_buckets: bool) -> Tensor:
    """Which pairs a round leaves out, (B, H, chunks, size, 2·size), for the buckets and places (B, H, n, L) that the
    tokens, sorted for this round, have in it and in the n - 1 rounds before it."""
    own, other = _pairs(buckets[:, :, -1], size)
    hidden = other == _NOBODY if across_buckets else other != own
    if is_causal:
        column = torch.arange(2 * size, device=buckets.device)
        ahead = column[size:, None] - column
        hidden = hidden | (ahead < 0) | (ahead > size)
    for bucket, place in zip(buckets[:, :, :-1].unbind(2), places[:, :, :-1].unbind(2), strict=True):
        own, other = _pairs(place if is_causal else place // size, size)
        seen = (own - other >= 0) & (own - other <= (size if is_causal else 1))
        if not across_buckets:
            own, other = _pairs(bucket, size)
            seen &= own == other
        hidden = hidden | seen
    return hidden


def _pairs(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(B, H, L) -> those of a chunk, (B, H, chunks, size, 1), and those that it sees, (B, H, chunks, 1, 2·size)."""
    own = numbers.unflatten(-1, (-1, size)).unsqueeze(-1)
    return own, _and_previous(own.masked_fill(own == _PADDING, _NOBODY), _NOBODY).mT


def _and_previous(chunks: Tensor, fill: int = 0) -> Tensor:
    """(..., chunks, size, d) -> (..., chunks, 2·size, d): the rows of the chunk before, then its own."""
    before = F.pad(chunks, (0, 0, 0, 0, 1, 0), value=fill)[..., :-1, :, :]
    return torch.cat([before, chunks], dim=-2)


def _fold(grad: Tensor) -> Tensor:
    """The gradient of ``_and_previous``."""
    before, own = grad.chunk(2, dim=-2)
    return own + F.pad(before[..., 1:, :, :], (0, 0, 0, 0, 0, 1))


def _with_itself(pairs: Tensor) -> Tensor:
    """The pairs (..., size, 2·size) of tokens with themselves, (..., size)."""
    return pairs[..., pairs.shape[-2] :].diagonal(dim1=-2, dim2=-1)


def _drop(weights: Tensor, kept: Tensor | None) -> Tensor:
    return weights if kept is None else weights * kept
