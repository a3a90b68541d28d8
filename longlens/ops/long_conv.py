"""Convolution with kernels as long as the sequence, by FFT: O(L log L).

y_t = Σ_{j ≤ t} k[t - j]·x_j  (+ Σ_{j > t} later[j - t - 1]·x_j),   one kernel for each channel
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import at_least_float32, once_differentiable


def long_conv(x: Tensor, kernel: Tensor, later: Tensor | None = None) -> Tensor:
    """Convolve each channel of x (B, L, D) with its kernel (D, K), which may be shorter or longer than the sequence, in
    float32 at least: ``kernel[:, n]`` weighs the input n steps back, ``later[:, n]`` that n + 1 steps later."""
    if x.ndim != 3:
        raise ValueError(f"x must have the shape (batch, length, channels), got {tuple(x.shape)}")
    for name, taps in (("kernel", kernel), ("later", later)):
        if taps is not None and (taps.ndim != 2 or taps.shape[0] != x.shape[-1]):
            raise ValueError(f"{name} must have the shape ({x.shape[-1]}, length), got {tuple(taps.shape)}")
    length, channels, dtype = x.shape[1], x.shape[2], x.dtype
    if x.numel() == 0:
        return x.clone()
    x = at_least_float32(x)
    size = fast_size(2 * length)
    kernel = kernel[:, :length].to(x.dtype)
    if later is not None:
        later = later[:, : length - 1].to(x.dtype)
        middle = x.new_zeros(channels, size - kernel.shape[1] - later.shape[1])
        kernel = torch.cat([kernel, middle, later.flip(1)], dim=1)
    return _CircularConvolution.apply(x.transpose(1, 2), kernel, size).transpose(1, 2).to(dtype)


def long_conv_reference(x: Tensor, kernel: Tensor, later: Tensor | None = None) -> Tensor:
    """The same by its definition, with an L×L matrix for each channel."""
    length = x.shape[1]
    lag = torch.arange(length, device=x.device)[:, None] - torch.arange(length, device=x.device)
    matrix = torch.where(lag >= 0, F.pad(kernel, (0, length))[:, lag.clamp(min=0)], 0)  # (D, L, L)
    if later is not None:
        matrix = matrix + torch.where(lag < 0, F.pad(later, (0, length))[:, (-lag - 1).clamp(min=0)], 0)
    return torch.einsum("dij,bjd->bid", matrix, x)


def fast_size(least: int) -> int:
    """The smallest length of at least ``least`` without prime factors above 5, for which FFTs are fast."""
    size = max(least, 1)
    while 60**24 % size:  # divides a power of 60: no other prime factors than 2, 3 and 5
        size += 1
    return size


class _CircularConvolution(torch.autograd.Function):
    """(B, D, L) with (D, K) on a circle of ``size`` >= 2L points, of which the first L are kept. What torch would do,
    in half of its time: fewer copies, and no gradient of the parts that are cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, size: int) -> Tensor:
        inputs, weights = torch.fft.rfft(x, n=size), torch.fft.rfft(kernel, n=size)
        ctx.save_for_backward(inputs, weights)
        ctx.lengths = x.shape[-1], kernel.shape[-1], size
        return torch.fft.irfft(inputs * weights, n=size)[..., : x.shape[-1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, weights = ctx.saved_tensors
        length, taps, size = ctx.lengths
        spectrum = torch.fft.rfft(grad, n=size)
        grad_x = grad_kernel = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.fft.irfft(spectrum * weights.conj(), n=size)[..., :length]
        if ctx.needs_input_grad[1]:
            grad_kernel = torch.fft.irfft((spectrum * inputs.conj()).sum(0), n=size)[..., :taps]
        return grad_x, grad_kernel, None
