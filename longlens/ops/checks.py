"""The checks of attention arguments: each error names the argument, what was given, and what is allowed."""

import math
from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from longlens.ops.smoothing import Smoothing, check_side, smoothing_kernel

BACKENDS = ("auto", "sdpa", "linear", "reference")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments that ``las_attention`` and its reference share."""

    decay: Tensor | Sequence[float] | None
    smoothing: Smoothing | None
    side: str
    chunk_size: int | None
    is_causal: bool
    attn_mask: Tensor | None
    scale: float | None
    dropout_p: float
    enable_gqa: bool


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor | Sequence[float] | None = None,
    smoothing: Smoothing | None = None,
    side: str = "past",
    chunk_size: int | None = None,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
) -> None:
    """Raise a ValueError or TypeError for arguments that ``las_attention`` does not take."""
    _check_tensors(query, key, value)
    _check_shapes(query, key, value, enable_gqa)
    positions_matter = is_causal or decay is not None or chunk_size is not None
    if positions_matter and query.shape[-2] > key.shape[-2]:
        raise ValueError(
            f"query has {query.shape[-2]} positions and key only {key.shape[-2]}; with is_causal, decay or chunk_size "
            "the queries are the last positions of the keys, so there must be at least as many keys"
        )
    check_decay(decay, query.shape[1])
    if smoothing is not None:
        smoothing_kernel(smoothing, side)
    check_side(side)
    check_chunk_size(chunk_size)
    if attn_mask is not None:
        _check_mask(attn_mask, (*query.shape[:-1], key.shape[-2]))
        _check_device("attn_mask", attn_mask, query)
    if scale is not None:
        check_number("scale", scale)
        if not -math.inf < scale < math.inf:
            raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    check_share("dropout_p", dropout_p)


def check_linear(query: Tensor, key: Tensor, **options: Unpack[AttentionOptions]) -> None:
    """What the linear backend does not take."""
    attn_mask, decay = options.get("attn_mask"), options.get("decay")
    reasons = {
        "is_causal must be True": not options.get("is_causal", True),
        "dropout_p must be 0": options.get("dropout_p", 0.0) > 0,
        "query and key must have the same length": query.shape[-2] != key.shape[-2],
        "attn_mask must be the same for all queries, (..., 1, keys)": attn_mask is not None
        and attn_mask.ndim > 1
        and attn_mask.shape[-2] != 1,
        "decay must be a sequence of floats under torch.compile": isinstance(decay, Tensor)
        and torch.compiler.is_compiling(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{reason} for backend='linear'; use backend='auto' otherwise")


def check_decay(decay: Tensor | Sequence[float] | None, num_heads: int) -> None:
    """Rates must be one finite number of at least 0 for each head. (A traced tensor has no values to look at.)"""
    if decay is None:
        return
    if isinstance(decay, Tensor):
        if decay.dtype not in DTYPES:
            raise TypeError(f"decay must be a floating-point tensor of rates, got {decay.dtype}")
        if decay.shape != (num_heads,):
            raise ValueError(
                f"decay must have one rate for each of the {num_heads} query heads, got shape {tuple(decay.shape)}"
            )
        if torch.compiler.is_compiling():
            return
        rates = decay.tolist()
    else:
        if isinstance(decay, (str, int, float)) or not isinstance(decay, Sequence):
            raise TypeError(f"decay must be a tensor or a sequence of rates, one for each head, got {decay!r}")
        rates = decay
        if len(rates) != num_heads:
            raise ValueError(f"decay must have one rate for each of the {num_heads} query heads, got {len(rates)}")
    for head, rate in enumerate(rates):
        check_number(f"decay of head {head}", rate)
        if not 0 <= rate < math.inf:
            raise ValueError(f"decay must have finite rates of at least 0, got {rate} for head {head}")


def check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_share(name: str, value: float) -> None:
    check_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is None:
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size must be an integer or None, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 or None, got {chunk_size}")


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def full_mask(attn_mask: Tensor, key_length: int) -> Tensor:
    """A mask as (B or 1, H or 1, Lq or 1, Lk)."""
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    return mask.expand(-1, -1, -1, key_length)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have the shape (batch, heads, length, width), got {tuple(tensor.shape)}")
        if tensor.shape[-1] == 0:
            raise ValueError(f"{name} must have a head width of at least 1, got {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must be one of {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        _check_device(name, tensor, query)


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key and value must agree in batch, heads and length, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have the same batch size, got {query.shape[0]} and {key.shape[0]}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head width, got {query.shape[-1]} and {key.shape[-1]}")
    query_heads, key_heads = query.shape[1], key.shape[1]
    if enable_gqa:
        if key_heads == 0 or query_heads % key_heads != 0:
            raise ValueError(
                f"query must have a multiple of the {key_heads} heads of key with enable_gqa, got {query_heads}"
            )
    elif query_heads != key_heads:
        raise ValueError(
            f"query and key must have the same number of heads, got {query_heads} and {key_heads}; "
            "for grouped keys pass enable_gqa=True"
        )


def _check_mask(attn_mask: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
        given = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise TypeError(f"attn_mask must be a boolean tensor, True where a query may attend to a key, got {given}")
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to (batch, heads, queries, keys) = {tuple(shape)}, "
            f"got {tuple(attn_mask.shape)}; a key padding mask (batch, keys) is passed as mask[:, None, None, :]"
        )
