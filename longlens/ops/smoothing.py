"""Smoothing of the attention rows, moved to the values: pooling each row of an attention matrix A with a kernel f,

    pool(A) · V  =  A · (F V),        (F V)_n = Σ_m f_m · v_{n - m + offset},        v = 0 outside of the sequence,

has offset 0 for ``side="past"`` (weight only moves to earlier positions: causal) and (P - 1) / 2 for
``side="centered"`` (the window of ordinary average pooling: after a causal softmax it sees (P - 1) / 2 later steps).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Side = Literal["past", "centered"]  # where the window of a key lies: on it and the keys before it, or around it
Smoothing = int | Sequence[float] | Tensor  # an odd window of the moving average, or any 1-D kernel
Kernel = tuple[float, ...] | Tensor  # the weights f: numbers, or a tensor if they are learned


def smooth_values(value: Tensor, smoothing: Smoothing, side: Side = "past") -> Tensor:
    """Filter values (..., L, d) along the sequence, with zeros before the first and after the last position, by an odd
    window P of the moving average or a 1-D kernel f.

    >>> smooth_values(torch.tensor([[3.0], [6.0], [9.0]]), 3).flatten()
    tensor([1., 3., 6.])
    """
    check_choice("side", side, Side)
    if value.ndim < 2:
        raise ValueError(f"value must have the shape (..., length, width), got {tuple(value.shape)}")
    kernel = smoothing_kernel(smoothing, side)
    return _smooth(value, kernel, _shifts(kernel, side))


def smooth_weights(weights: Tensor, smoothing: Smoothing, side: Side) -> Tensor:
    """Rows of weights (..., L) instead of the values, which is cheaper if the rows are few: for a matrix A of them,
    smooth_weights(A)·V = A·smooth_values(V)."""
    kernel = smoothing_kernel(smoothing, side)
    return _smooth(weights.unsqueeze(-1), kernel, tuple(-shift for shift in _shifts(kernel, side))).squeeze(-1)


def smooth_values_reference(value: Tensor, smoothing: Smoothing, side: Side = "past") -> Tensor:
    """The same, as one L×L Toeplitz matrix F with F[n, n - m + offset] = f_m."""
    kernel = smoothing_kernel(smoothing, side)
    length = value.shape[-2]
    rows = torch.arange(length, device=value.device)
    matrix = value.new_zeros(length, length)
    for shift, weight in zip(_shifts(kernel, side), kernel, strict=True):
        matrix = matrix + weight * (rows[:, None] - rows[None, :] == shift).to(value.dtype)
    return matrix @ value


def check_choice(name: str, given: str, choices: Any) -> None:
    """Refuse what is not one of the values of a Literal."""
    if given not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {given!r}")


def smoothing_kernel(smoothing: Smoothing, side: Side) -> Kernel:
    """The weights (P,) of a window or kernel argument, checked."""
    if isinstance(smoothing, bool):
        raise TypeError("smoothing must be an odd window, a 1-D kernel or None, got a bool")
    if isinstance(smoothing, int):
        if smoothing < 1 or smoothing % 2 == 0:
            raise ValueError(f"smoothing must be an odd window of at least 1, or a 1-D kernel, got {smoothing}")
        return (1.0 / smoothing,) * smoothing
    if isinstance(smoothing, Tensor):
        if smoothing.ndim != 1 or smoothing.numel() == 0:
            raise ValueError(f"smoothing must be a 1-D kernel, got a tensor of shape {tuple(smoothing.shape)}")
        if not smoothing.is_floating_point():
            raise TypeError(f"smoothing must be a kernel of floating-point weights, got {smoothing.dtype}")
        kernel = smoothing
    elif isinstance(smoothing, Sequence) and not isinstance(smoothing, str):
        if len(smoothing) == 0:
            raise ValueError("smoothing must be a kernel of at least one weight, got none")
        for weight in smoothing:
            if not isinstance(weight, (int, float)) or not -math.inf < weight < math.inf:
                raise ValueError(f"smoothing must be a kernel of finite numbers, got {weight!r}")
        kernel = tuple(float(weight) for weight in smoothing)
    else:
        raise TypeError(f"smoothing must be an odd window, a 1-D kernel or None, got a {type(smoothing).__name__}")
    if side == "centered" and len(kernel) % 2 == 0:
        raise ValueError(f"smoothing must have an odd length to be centered, got a kernel of {len(kernel)} weights")
    return kernel


def _shifts(kernel: Kernel, side: Side) -> tuple[int, ...]:
    """How far each weight of the kernel moves the values: 0 … P-1, or -(P-1)/2 … (P-1)/2."""
    offset = (len(kernel) - 1) // 2 if side == "centered" else 0
    return tuple(range(-offset, len(kernel) - offset))


def _smooth(value: Tensor, kernel: Kernel, shifts: tuple[int, ...]) -> Tensor:
    if isinstance(kernel, Tensor):
        kernel = kernel.to(value.device)
    elif not (torch.is_grad_enabled() and value.requires_grad):
        return _filter(value, kernel, shifts)
    return _Filter.apply(value, kernel, shifts)


def _filter(value: Tensor, kernel: Kernel, shifts: Sequence[int]) -> Tensor:
    """Σ_m kernel[m] · (value moved by shifts[m] along L), by slices in place: the last dimension stays contiguous."""
    length = value.shape[-2]
    values = value.to(torch.promote_types(value.dtype, torch.float32))
    weights = kernel.to(values.dtype).unbind() if isinstance(kernel, Tensor) else kernel
    result = values * weights[shifts.index(0)]
    for shift, weight in zip(shifts, weights, strict=True):
        if shift == 0:
            continue
        source, target = _overlap(length, shift)
        if isinstance(weight, Tensor):
            result[..., target, :].addcmul_(values[..., source, :], weight)
        else:
            result[..., target, :].add_(values[..., source, :], alpha=weight)
    return result.to(value.dtype)


def _overlap(length: int, shift: int) -> tuple[slice, slice]:
    """Where values are read, and where they land, when a sequence moves by ``shift``."""
    return slice(max(0, -shift), max(0, length - shift)), slice(max(0, shift), max(0, length + shift))


class _Filter(torch.autograd.Function):
    """``_filter``, whose gradient is the same filter with the shifts reversed (autograd of the slices would fill a
    tensor of the full size for each weight)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, kernel: Kernel, shifts: tuple[int, ...]) -> Tensor:
        return _filter(value, kernel, shifts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        value, kernel, ctx.shifts = inputs
        is_tensor = isinstance(kernel, Tensor)
        ctx.kernel = None if is_tensor else kernel
        ctx.save_for_backward(*((value if kernel.requires_grad else None, kernel) if is_tensor else ()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved: Any = ctx.saved_tensors or (None, ctx.kernel)
        value, kernel = saved
        grad_value = grad_kernel = None
        if ctx.needs_input_grad[0]:
            function = _Filter.apply if torch.is_grad_enabled() else _filter  # for gradients of gradients only
            grad_value = function(grad, kernel, tuple(-shift for shift in ctx.shifts))
        if ctx.needs_input_grad[1]:
            pairs = [_overlap(value.shape[-2], shift) for shift in ctx.shifts]
            wide = torch.promote_types(grad.dtype, torch.float32)
            sums = [(grad[..., target, :] * value[..., source, :]).sum(dtype=wide) for source, target in pairs]
            grad_kernel = torch.stack(sums).to(kernel.dtype)
        return grad_value, grad_kernel, None
