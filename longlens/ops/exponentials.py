"""Kernels that are sums of exponentials, as those of all diagonal state spaces, and the recurrence that they are:

    k[l] = Re Σ_n w_n·exp(λ_n·l)      x_t = exp(λ) ⊙ x_{t-1} + u_t,   y_t = Re Σ_n w_n·x_t[n]

Shapes: D channels, N modes n, and G groups of rates. Channel c has the rates of group c mod G, so that G is D for rates
of its own, and 1 for the same in all channels. A group has C = D/G channels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import at_least_float32, no_autocast, once_differentiable, working_dtype


def sum_of_exponentials(weights: Tensor, rates: Tensor, length: int) -> Tensor:
    """The kernels k, (D, length), in float32 at least, of weights w, (D, N), and rates λ, (G, N), real or complex. With
    l = p·T + q it is a product of matrices, (C·P, N) by (N, T), in each group: far fewer exponentials than N·L for each
    channel, and no tensor of size D·N·L."""
    if rates.ndim != 2 or weights.ndim != 2 or weights.shape[1] != rates.shape[1] or weights.shape[0] % rates.shape[0]:
        raise ValueError(
            "weights must have the shape (channels, N) and rates (groups, N) for a number of groups that divides that "
            f"of channels, got {tuple(weights.shape)} and {tuple(rates.shape)}"
        )
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    dtype = working_dtype(torch.promote_types(weights.dtype, rates.dtype))
    weights, rates = weights.to(dtype), rates.to(dtype)
    if length == 0:
        return weights.real[:, :0]
    groups, modes = rates.shape
    grouped = weights.reshape(-1, groups, modes).transpose(0, 1).contiguous()  # (G, C, N)
    return grouped_exponentials(grouped, rates, length).transpose(0, 1).reshape(-1, length)


def grouped_exponentials(weights: Tensor, rates: Tensor, length: int) -> Tensor:
    """The kernels (G, C, length) of weights (G, C, N) and rates (G, N) of one dtype, by group."""
    return _SumOfExponentials.apply(weights, rates, length)


def sum_of_exponentials_reference(weights: Tensor, rates: Tensor, length: int) -> Tensor:
    """The same by its definition."""
    steps = torch.arange(length, device=rates.device, dtype=rates.real.dtype)
    rates = rates.repeat(weights.shape[0] // rates.shape[0], 1)
    return (weights.unsqueeze(-1) * torch.exp(rates.unsqueeze(-1) * steps)).real.sum(dim=-2)


def decay_factors(rates: Tensor) -> Tensor:
    """exp(λ), in float32 at least: between 0.996 and 1, where slow decays are, bfloat16 has no numbers."""
    return torch.exp(at_least_float32(rates))


def step_exponentials(weights: Tensor, decay: Tensor, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One step of the recurrence whose convolution kernels these are, for the ``decay_factors`` of the rates: inputs u,
    (B, D), and a state, (B, D, N), in float32 at least, or None at the start -> outputs y, (B, D), in the dtype of the
    inputs, and the next state."""
    inputs = at_least_float32(x).unsqueeze(-1)
    state = inputs if state is None else decay * state + inputs
    return (weights * state).real.sum(dim=-1).to(x.dtype), state


def as_complex(parameter: Tensor) -> Tensor:
    """(..., 2), real and imaginary parts -> (...), complex numbers of single precision at least."""
    return torch.view_as_complex(at_least_float32(parameter).contiguous())


class _SumOfExponentials(torch.autograd.Function):
    """(G, C, N) and (G, N) -> (G, C, L), in P blocks of T steps: exp(λ·l) = exp(λ·T·p)·exp(λ·q), coarse times fine. The
    gradients for g = ∂k are sums over the same exponentials, so that only these two tables are kept:

    ∂w_n* = Σ_l g[l]·exp(λ_n·l),   ∂λ_n* = w_n·Σ_l l·g[l]·exp(λ_n·l)
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, rates: Tensor, length: int) -> Tensor:
        groups, channels, _ = weights.shape
        # The product costs least when its two factors are of about the same size, C·P = T.
        steps = min(1 << round(math.log2(length * channels) / 2), 1 << (length - 1).bit_length())
        fine = _powers(rates, 1, steps)  # (G, T, N)
        coarse = _powers(rates, steps, -(-length // steps))  # (G, P, N)
        weighted = (weights.unsqueeze(2) * coarse.unsqueeze(1)).flatten(1, 2)  # (G, C·P, N)
        kernels = _matmul(_parts(weighted.conj_physical_()), _parts(fine).mT)  # (G, C·P, T)
        ctx.save_for_backward(weights, fine, coarse)
        ctx.length = length
        return kernels.view(groups, channels, -1)[..., :length]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, fine, coarse = ctx.saved_tensors  # (G, C, N), (G, T, N), (G, P, N)
        (groups, channels, modes), steps, blocks = weights.shape, fine.shape[1], coarse.shape[1]
        padded = (F.pad(grad, (0, blocks * steps - ctx.length)) if blocks * steps > ctx.length else grad).contiguous()
        padded, fine_parts = padded.view(groups, channels * blocks, steps), _parts(fine)

        def sum_in_blocks(rows: Tensor) -> Tensor:
            """Σ_q rows[q]·exp(λ·q) in each block: (G, C·P, T) -> (G, C, P, N)."""
            sums = _matmul(rows, fine_parts)
            sums = torch.view_as_complex(sums.unflatten(-1, (-1, 2))) if fine.is_complex() else sums
            return sums.view(groups, channels, blocks, modes)

        def sum_blocks(sums: Tensor) -> Tensor:
            """Σ_p sums[p]·exp(λ·T·p): (G, C, P, N) -> (G, C, N)."""
            return (sums * coarse.unsqueeze(1)).sum(dim=2)

        sums, grad_rates = sum_in_blocks(padded), None  # of g
        grad_weights = sum_blocks(sums).conj_physical()
        if ctx.needs_input_grad[1]:  # of l·g, where l = T·p + q
            count = torch.arange(max(steps, blocks), device=grad.device, dtype=grad.dtype)
            moments = sum_in_blocks(padded * count[:steps]) + steps * count[:blocks, None] * sums
            grad_rates = (weights * sum_blocks(moments)).sum(dim=1).conj_physical()  # (G, N)
        return grad_weights, grad_rates, None


def _powers(rates: Tensor, step: int, count: int) -> Tensor:
    """exp(λ·step·k) for k < count, (G, count, N), as products of exp(λ·step·2^j): faster than as many exponentials, and
    more accurate than the exponential of a large angle that has been rounded."""
    table = rates.new_empty(rates.shape[0], count, rates.shape[1])
    table[:, 0] = 1
    size = 1
    while size < count:
        added, angle = table[:, size : 2 * size], rates * (step * size)
        # For complex numbers on a CPU, torch.exp is six times slower than torch.polar.
        factor = torch.polar(angle.real.exp(), angle.imag) if angle.is_complex() else angle.exp()
        added.copy_(table[:, : added.shape[1]]).mul_(factor.unsqueeze(1))  # torch.compile refuses a slice for ``out``
        size *= 2
    return table


def _parts(x: Tensor) -> Tensor:
    """(…, N) -> (…, 2N), the real and imaginary parts of complex numbers side by side. Then Re(a·b) summed over N is
    the product of the parts of a* with those of b."""
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x


@no_autocast
def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """The sums cancel, so that they need their full precision under autocast, too."""
    return left @ right
