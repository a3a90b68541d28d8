"""LaS in the place of a masked softmax: what the mask of another system means, and the fastest exact way to compute it.

A mask is complete: it says all that a query may see, causality included. Most masks are one row of padding, with
causality or without it, for which ``las_attention`` has fast paths; others (windows, documents, prefixes) are dense.

The distance is that of the places in the tensor, so that padding before a sequence changes nothing in it. Documents
that share a row, as in packed batches, are sequences of their own: smoothing and chunks begin anew in each.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.errors import BadInput
from longlens.integrations.settings import Settings
from longlens.ops.checks import AttentionArguments, at_least_float32
from longlens.ops.las import las_attention
from longlens.ops.reference import attend_by_formula

HIDES = -9e3  # -inf, the smallest number, or what people write in their place: -1e9, -1e4 (-9,984 in bfloat16)
NEEDS_ALL_KEYS = (
    "with a cache, smoothing and chunks need a mask of causality and padding alone, and this one hides more, as "
    "sliding windows do: use l-attention, or no cache (use_cache=False)"
)


class Seen(NamedTuple):
    """What the queries see."""

    causal: bool  # no later keys
    keys: int  # how many there are: what comes after them is the empty end of a static cache
    mask: Tensor | None = None  # (B or 1, H or 1, 1, Lk): padding; dense: (…, Lq, Lk); None: nothing is hidden
    starts: Tensor | None = None  # (B or 1, H or 1, Lk): where the sequence of each key begins; None: all at 0
    dense: bool = False


def split_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A mask that is boolean, True where a query may attend, or is added to the scores: as a boolean one, and the rest
    of what is added, None if there is none."""
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise BadInput(f"the mask must be boolean or of floating-point numbers, got {mask.dtype}")
    hidden = mask <= HIDES
    bias = mask.masked_fill(hidden, 0.0)
    return ~hidden, bias if mask.requires_grad or bool(bias.any()) else None  # a learned one may begin with 0


def read_padding(tokens: Tensor, *, causal: bool) -> Seen:
    """What is seen if nothing but padding is hidden: (B or 1, H or 1, 1, Lk), True for tokens."""
    keys = tokens.shape[-1]
    if bool(tokens.all()):
        return Seen(causal, keys)
    starts = tokens.squeeze(-2).int().argmax(-1, keepdim=True).expand(-1, -1, keys)
    return Seen(causal, keys, tokens, starts if bool(starts.any()) else None)


def read_mask(mask: Tensor, queries: int, *, causal: bool) -> Seen:
    """What a boolean mask (B or 1, H or 1, Lq or 1, Lk) means, True where a query may see a key. ``causal`` is how the
    model means one that can be read in both ways."""
    mask = mask.expand(-1, -1, queries, -1)
    keys = mask.shape[-1]
    if queries < keys:  # with a cache; a static one is longer than what is in it
        filled = mask.flatten(0, 2).any(0).nonzero()
        keys = max(int(filled[-1]) + 1 if len(filled) else 0, queries)
        mask = mask[..., :keys]
    triangle = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    row = mask[..., -1:, :]  # the last query sees all but padding, unless the mask is dense
    for way in (causal, not causal):
        expected = row & triangle if way else row
        if (way or queries == keys) and torch.equal(mask, expected.expand_as(mask)):
            return read_padding(row.clone(), causal=way)  # a view would keep the whole mask alive
    sees_later = bool((mask & ~triangle).any())
    if queries == keys:
        return Seen(not sees_later, keys, mask, _documents(mask), dense=True)
    last = mask.flatten(0, 1).any(0) * torch.arange(1, keys + 1, device=mask.device)  # (Lq, Lk)
    if sees_later or not torch.equal(last.amax(-1), triangle.sum(-1)):
        raise BadInput("with a cache the queries must be the last positions, and the mask says that they are not")
    return Seen(True, keys, mask, dense=True)


def _documents(mask: Tensor) -> Tensor | None:
    """Where the document of each key begins, (B or 1, H or 1, L): at each token, unless it or a later one sees
    one before it in the mask (…, L, L), or is seen from there. Padding, which no query sees, is no token."""
    length = mask.shape[-1]
    places, tokens = torch.arange(length, device=mask.device), mask.any(-2)
    mask = mask & tokens.unsqueeze(-1)  # what padding sees has no meaning
    sees, seen = mask.any(-1), mask.byte()
    first = torch.where(sees, seen.argmax(-1), places).minimum(places)
    last = torch.where(sees, length - 1 - seen.flip(-1).argmax(-1), places).maximum(places)
    sees_back = first.flip(-1).cummin(-1).values.flip(-1) < places
    is_seen = F.pad(last.cummax(-1).values[..., :-1], (1, 0), value=-1) >= places
    starts = torch.where(tokens & ~sees_back & ~is_seen, places, 0).cummax(-1).values
    return starts if bool(starts.any()) else None


def _is_partly_causal(seen: Seen) -> bool:
    """Whether a mask hides tokens from earlier ones that they see, as after the prefix of a language model. Windows to
    both sides do not, nor does padding, which no query sees."""
    if not seen.dense or seen.mask is None:
        return False
    tokens = seen.mask.any(-2, keepdim=True)
    return bool((seen.mask.mT & ~seen.mask & tokens).triu(1).any())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    settings: Settings,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """LaS of queries (B, H, Lq, d), which are the last of the keys, and keys and values (B, H or fewer, Lk, d): the
    output (B, H, Lq, dv) and, if they are wanted, the weights (B, H, Lq, Lk) that multiply the values, by the formula.
    A bias (B or 1, H or 1, Lq, Lk) is added to the decayed scores."""
    if settings.side == "centered" and settings.smooths and seen.keys > 1 and (seen.causal or _is_partly_causal(seen)):
        kind = "causal" if seen.causal else "partly causal"
        raise BadInput(f"side must be past in {kind} attention, got centered, which would show each token later ones")
    if seen.dense and query.shape[-2] < seen.keys and (settings.smooths or settings.chunk_size):
        raise BadInput(NEEDS_ALL_KEYS)
    all_keys, width = key.shape[-2], value.shape[-1]
    key, value = key[..., : seen.keys, :], value[..., : seen.keys, :]
    value = with_units(value) if need_weights else value
    given = AttentionArguments(
        decay=settings.rates(query.shape[1]),
        smoothing=settings.window,
        side=settings.side,
        chunk_size=settings.chunk_size,
        is_causal=seen.causal,
        attn_mask=seen.mask,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    if bias is not None or (seen.starts is not None and (seen.dense or settings.chunk_size)):
        output = _attend_apart(query, key, value, seen, bias, given)
    else:
        output = las_attention(query, key, value, **vars(given), backend="reference" if need_weights else "auto")
    if not need_weights:
        return output, None
    return output[..., :width], F.pad(output[..., width:], (0, all_keys - seen.keys))


def with_units(value: Tensor) -> Tensor:
    """Values (B, H, Lk, dv + Lk) with a 1 for each key behind them: what attention makes of these are the weights."""
    unit = torch.eye(value.shape[-2], dtype=value.dtype, device=value.device)
    return torch.cat([value, unit.expand(*value.shape[:2], -1, -1)], dim=-1)


def _attend_apart(
    query: Tensor, key: Tensor, value: Tensor, seen: Seen, bias: Tensor | None, given: AttentionArguments
) -> Tensor:
    """The same with L×L matrices, where sequences begin at different places or scores have a bias."""
    key, value = given.repeat_groups(query, key, value)
    queries, keys = query.shape[-2], key.shape[-2]
    places = torch.arange(keys, device=query.device)
    starts = places.new_zeros(1, 1, keys) if seen.starts is None else seen.starts
    mask = seen.mask
    if given.chunk_size is not None:
        starts = starts + (places - starts) // given.chunk_size * given.chunk_size
        same = starts[..., keys - queries :].unsqueeze(-1) == starts.unsqueeze(-2)  # (…, Lq, Lk)
        mask = same if mask is None else same & mask
    if seen.mask is not None:
        value = value.masked_fill(~seen.mask.any(-2).unsqueeze(-1), 0.0)  # padding lends nothing to the smoothing
    if given.smoothing is not None:
        assert isinstance(given.smoothing, int)
        value = _smooth_apart(value, given.smoothing, given.side, starts)
    if bias is not None:
        given = replace(given, smoothing=None, chunk_size=None, attn_mask=mask)
        return attend_by_formula(query, key, value, given, bias=bias[..., :keys])[0]
    options = {"decay": given.decay, "is_causal": given.is_causal, "scale": given.scale, "dropout_p": given.dropout_p}
    return las_attention(query, key, value, attn_mask=mask, **options)


def _smooth_apart(value: Tensor, window: int, side: str, starts: Tensor) -> Tensor:
    """The moving average of values (B, H, L, d) within sequences that begin at ``starts``, (B or 1, H or 1, L)."""
    length, offset = value.shape[-2], window // 2 if side == "centered" else 0
    places, total = torch.arange(length, device=value.device), torch.zeros_like(at_least_float32(value))
    for shift in range(-offset, window - offset):
        source = places - shift
        inside = (source >= 0) & (source < length)
        source = source.clamp(0, length - 1)
        total = total + value[..., source, :] * (inside & (starts == starts[..., source])).unsqueeze(-1)
    return (total / window).to(value.dtype)
