"""Attention with linear biases, ALiBi (Press, Smith & Lewis, 2022), at the cost of plain attention.

    y_i = Σ_{j<=i} softmax_j(q_i·k_j / √d - m·(i - j)) · v_j,        one slope m for each head

The bias is itself a product, -m·(i - j) = [m, -i]·[j, m], so that a few more columns of the queries and keys add it
within the usual causal kernel, and nothing of size L×L is made. It is as exact as adding the matrix: positions and
slopes are split into parts of so few bits that each product is exact, and the columns come first, so that the large m·j
and -m·i cancel before the small q·k is added.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from longlens.ops.checks import AttentionArguments, AttentionOptions
from longlens.ops.las import las_attention
from longlens.ops.smoothing import Side, Smoothing, smooth_values_reference


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The published slopes: for a power of two H the geometric sequence from 2^(-8/H) to 2^-8; for another number of
    heads that of the next lower power, then every other slope of the next higher one.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be an integer of at least 1, got {heads!r}")
    lower = 1 << (heads.bit_length() - 1)
    exponents = [8 * (head + 1) / lower for head in range(lower)]
    exponents += [4 * (2 * head + 1) / lower for head in range(heads - lower)]
    return tuple(2.0**-exponent for exponent in exponents)


def alibi_attention(
    query: Tensor, key: Tensor, value: Tensor, slopes: tuple[float, ...], **options: Unpack[AttentionOptions]
) -> Tensor:
    """Causal attention with linear biases, one slope m for each head. Tensors and options are those of
    ``las_attention``, except that there is no decay."""
    given = AttentionArguments(**options)
    given.check(query, key, value)
    if len(slopes) != query.shape[1]:
        raise ValueError(f"slopes must be one number for each of the {query.shape[1]} heads, got {len(slopes)}")
    if not given.is_causal or given.decay is not None:
        raise ValueError("is_causal must be True and decay None: ALiBi is causal and has no decay")
    key, value = given.repeat_groups(query, key, value)
    query = query * given.score_scale(query)
    position = torch.arange(key.shape[-2], device=query.device)
    if given.chunk_size:  # positions count from the middle of the queries, to be small there
        position = position % given.chunk_size - given.chunk_size // 2
    else:
        position = position - (key.shape[-2] - (query.shape[-2] + 1) // 2)
    query_bias, key_bias = _columns(position, slopes, query.dtype)
    query_bias = query_bias[:, key.shape[-2] - query.shape[-2] :]
    query, key = (
        torch.cat([columns.expand(x.shape[0], -1, -1, -1), x], dim=-1)
        for columns, x in ((query_bias, query), (key_bias, key))
    )
    return las_attention(query, key, value, **(options | {"scale": 1.0, "enable_gqa": False}))


def _columns(position: Tensor, slopes: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two of (H, L, ·), whose products for each pair of positions are m·(j - i)."""
    low = position % 256  # 8 bits are what bfloat16 holds
    query, key = [], []
    for part in _parts(slopes, dtype):
        slope = torch.tensor(part, dtype=dtype, device=position.device)[:, None].expand(-1, position.shape[0])
        for place in (position - low, low):
            place = place.to(dtype).expand_as(slope)
            query += [slope, -place]
            key += [place, slope]
    return torch.stack(query, dim=-1), torch.stack(key, dim=-1)


def _parts(slopes: tuple[float, ...], dtype: torch.dtype) -> list[tuple[float, ...]]:
    """Numbers of at most 12 bits that add up to the slopes, in float32. Others need no more than one: float64 has the
    bits for products of whole slopes, and the lower ones round everything else as much."""
    if dtype != torch.float32:
        return [slopes]
    parts = map(math.frexp, slopes)  # mantissa and exponent
    rough = tuple(math.ldexp(round(math.ldexp(mantissa, 12)), exponent - 12) for mantissa, exponent in parts)
    rest = tuple(slope - part for slope, part in zip(slopes, rough, strict=True))
    return [rough, rest] if any(rest) else [rough]


def alibi_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: tuple[float, ...],
    *,
    smoothing: Smoothing | None = None,
    side: Side = "past",
    chunk_size: int | None = None,
) -> Tensor:
    """The same by its formula, with the biases (H, L, L) in full, for as many queries as keys."""
    if chunk_size is not None:
        chunks = zip(*(x.split(chunk_size, dim=-2) for x in (query, key, value)), strict=True)
        parts = [alibi_attention_reference(q, k, v, slopes, smoothing=smoothing, side=side) for q, k, v in chunks]
        return torch.cat(parts, dim=-2)
    position = torch.arange(key.shape[-2], device=query.device)
    distance = position[:, None] - position
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = scores - torch.tensor(slopes, dtype=query.dtype, device=query.device)[:, None, None] * distance
    weights = torch.softmax(scores.masked_fill(distance < 0, -math.inf), dim=-1)
    return weights @ (value if smoothing is None else smooth_values_reference(value, smoothing, side))
