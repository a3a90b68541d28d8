"""The precision of operators, and the arguments of attention with their checks.

Half precision has no complex numbers, cannot count positions beyond 256, and loses what long sums cancel, so that such
steps run in float32 at least, also under autocast.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longlens.ops.smoothing import Side, Smoothing, check_choice, smoothing_kernel

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

Backend = Literal["auto", "sdpa", "linear", "reference"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AXES = "the axes are (batch, heads, length, width)"  # the hint for (batch, length, heads, width)


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor itself, or in float32 if it is of half precision."""
    return x.to(working_dtype(x.dtype))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def known_size(size: int) -> int:
    """The size itself, or 1 for one that torch.export leaves open, on which the number of pieces must not depend."""
    return size if isinstance(size, int) else 1


def in_autocast(device: str) -> bool:
    """Whether autocast is on for a kind of device, which need not have it."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """On a kind of device, for steps that compute in the dtypes of their inputs."""
    return torch.autocast(device, enabled=False) if in_autocast(device) else nullcontext()


def no_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator of a function that computes in the dtypes of its arguments, on the device of the first tensor."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        device = next(x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with without_autocast(device):
            return function(*args, **kwargs)

    return run


def once_differentiable(backward: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorator of the backward of an autograd Function that has no gradient of its own, so that asking for one fails.
    Torch's decorator of this name refuses in ``backward()`` alone: ``torch.autograd.grad`` takes the gradient for 0."""
    refusing = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(*args: Any) -> _Result:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError("gradients of gradients (create_graph=True) are not available for this layer")
        return refusing(*args)

    return run


def refuse_tangents(*tensors: Tensor | None) -> None:
    """For operators of our own, whose derivative in forward mode torch would take for 0."""
    given = [] if torch.compiler.is_compiling() else [x for x in tensors if x is not None]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        raise NotImplementedError(
            "derivatives in forward mode (jvp, jacfwd) are not available for this attention: take those in reverse "
            "mode (vjp, autograd.functional.jacobian), or backend='reference'"
        )


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments that ``las_attention`` and its reference share, for functions that pass them on."""

    decay: Tensor | Sequence[float] | None
    smoothing: Smoothing | None
    side: Side
    chunk_size: int | None
    is_causal: bool
    attn_mask: Tensor | None
    scale: float | None
    dropout_p: float
    enable_gqa: bool


@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """The same as one object: made once, where a call comes in, and passed on. ``las_attention`` describes them."""

    decay: Tensor | Sequence[float] | None = None
    smoothing: Smoothing | None = None
    side: Side = "past"
    chunk_size: int | None = None
    is_causal: bool = True
    attn_mask: Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    enable_gqa: bool = False

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError or TypeError for what attention does not take."""
        _check_tensors(query, key, value, self.enable_gqa)
        positions_matter = self.is_causal or self.decay is not None or self.chunk_size is not None
        if positions_matter and query.shape[-2] > key.shape[-2]:
            raise ValueError(
                f"query has {query.shape[-2]} positions and key only {key.shape[-2]}; with is_causal, decay or "
                "chunk_size the queries are the last positions of the keys, so there must be at least as many keys"
            )
        check_decay(self.decay, query.shape[1], query.shape[2])
        if self.smoothing is not None:
            smoothing_kernel(self.smoothing, self.side)
        check_choice("side", self.side, Side)
        if self.chunk_size is not None:
            if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int):
                raise TypeError(f"chunk_size must be an integer or None, got {self.chunk_size!r}")
            if self.chunk_size < 1:
                raise ValueError(f"chunk_size must be at least 1 or None, got {self.chunk_size}")
        if self.attn_mask is not None:
            _check_mask(self.attn_mask, (*query.shape[:-1], key.shape[-2]))
            _check_device("attn_mask", self.attn_mask, query)
        if self.scale is not None and not -math.inf < _number("scale", self.scale) < math.inf:
            raise ValueError(f"scale must be a finite number or None, got {self.scale!r}")
        if not 0.0 <= _number("dropout_p", self.dropout_p) <= 1.0:
            raise ValueError(f"dropout_p must lie between 0 and 1, got {self.dropout_p!r}")

    def check_linear(self, query: Tensor, key: Tensor) -> None:
        """Raise a ValueError for what the linear backend does not take."""
        dense = self.attn_mask is not None and self.attn_mask.ndim > 1 and self.attn_mask.shape[-2] != 1
        traced = isinstance(self.decay, Tensor) and torch.compiler.is_compiling()
        reasons = {
            "is_causal must be True": not self.is_causal,
            "dropout_p must be 0": self.dropout_p > 0,
            "query and key must have the same length": query.shape[-2] != key.shape[-2],
            "attn_mask must be the same for all queries, (..., 1, keys)": dense,
            "decay must be a sequence of floats under torch.compile": traced,
        }
        for reason, applies in reasons.items():
            if applies:
                raise ValueError(f"{reason} for backend='linear'; use backend='auto' otherwise")

    def score_scale(self, query: Tensor) -> float:
        """The factor of the scores, 1/√d by default."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def repeat_groups(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with as many heads as the queries have."""
        if not self.enable_gqa or query.shape[1] == key.shape[1]:
            return key, value
        groups = query.shape[1] // key.shape[1]
        return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def check_decay(decay: Tensor | Sequence[float] | None, num_heads: int, length: int | None = None) -> None:
    """Rates must be one finite number of at least 0 for each head. (A traced tensor has no values to look at.) As many
    rates as the ``length`` of the queries are a sign of swapped axes."""
    if decay is None:
        return
    if isinstance(decay, Tensor):
        if decay.dtype not in DTYPES:
            raise TypeError(f"decay must be a floating-point tensor of rates, got {decay.dtype}")
        shape, given = tuple(decay.shape), f"shape {tuple(decay.shape)}"
    elif isinstance(decay, str) or not isinstance(decay, Sequence):
        hint = "decay_rates(num_heads, max_rate) makes them"
        raise TypeError(f"decay must be a tensor or a sequence of rates, one for each head, got {decay!r}: {hint}")
    else:
        shape, given = (len(decay),), str(len(decay))
    if shape != (num_heads,):
        hint = f"; {AXES}" if shape == (length,) else ""
        raise ValueError(f"decay must have one rate for each of the {num_heads} query heads, got {given}{hint}")
    if isinstance(decay, Tensor):
        decay = [] if torch.compiler.is_compiling() else decay.tolist()
    for head, rate in enumerate(decay):
        if not 0 <= _number(f"decay of head {head}", rate) < math.inf:
            raise ValueError(f"decay must have finite rates of at least 0, got {rate} for head {head}")


def check_tolerance(tolerance: float | None, backend: str) -> None:
    """A tolerance is one number above 0, of the linear backend."""
    if tolerance is None:
        return
    if backend != "linear":
        raise ValueError(f"tolerance must be None for backend={backend!r}, got {tolerance!r}; use backend='linear'")
    if not 0 < _number("tolerance", tolerance) < math.inf:
        raise ValueError(f"tolerance must be a finite number above 0, got {tolerance!r}")


def full_mask(attn_mask: Tensor, key_length: int) -> Tensor:
    """A mask as (B or 1, H or 1, Lq or 1, Lk)."""
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    return mask.expand(-1, -1, -1, key_length)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return value


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    casts = in_autocast(query.device.type) if isinstance(query, Tensor) else False  # all but float64
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
        if tensor.dtype != query.dtype and (not casts or torch.float64 in (tensor.dtype, query.dtype)):
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        _check_device(name, tensor, query)
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key and value must agree in batch, heads and length, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    for name, axis in (("batch size", 0), ("head width", -1)):
        if query.shape[axis] != key.shape[axis]:
            raise ValueError(f"query and key must have the same {name}, got {query.shape[axis]} and {key.shape[axis]}")
    query_heads, key_heads = query.shape[1], key.shape[1]
    if enable_gqa:
        if key_heads == 0 or query_heads % key_heads != 0:
            raise ValueError(f"enable_gqa needs query heads in multiples of key's {key_heads}, got {query_heads}")
    elif query_heads != key_heads:
        hint = AXES if query_heads < key_heads else "for grouped keys pass enable_gqa=True"
        raise ValueError(f"query and key must have the same number of heads, got {query_heads} and {key_heads}; {hint}")


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")


def _check_mask(attn_mask: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
        given = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise TypeError(f"attn_mask must be a boolean tensor, True where a query may attend to a key, got {given}")
    sizes = zip(reversed(attn_mask.shape), reversed(shape), strict=False)
    if attn_mask.ndim > len(shape) or any(given not in (1, size) for given, size in sizes):
        raise ValueError(
            f"attn_mask must broadcast to (batch, heads, queries, keys) = {shape}, "
            f"got {tuple(attn_mask.shape)}; a key padding mask (batch, keys) is passed as mask[:, None, None, :]"
        )
