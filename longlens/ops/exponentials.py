"""Kernels that are sums of exponentials, as those of all diagonal state spaces, and the recurrence that they are:

k[l] = Re Σ_n w_n·exp(λ_n·l)      x_t = exp(λ) ⊙ x_{t-1} + u_t,   y_t = Re Σ_n w_n·x_t[n]
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sum_of_exponentials(weights: Tensor, rates: Tensor, length: int) -> Tensor:
    """The kernels (D, length) of weights w (D, N) and rates λ (G, N), real or complex. Channel c has the rates c mod G,
    so G is D for rates of its own, and 1 for the same in all channels.

    With l = p·T + q it is a product of matrices, (D/G·P, N) by (N, T), for each of the G: far fewer exponentials than
    N·L for each channel, and no tensor of size D·N·L. Half precision is computed in float32.
    """
    _check(weights, rates, length)
    dtype = torch.promote_types(torch.promote_types(weights.dtype, rates.dtype), torch.float32)
    weights, rates = weights.to(dtype), rates.to(dtype)
    if length == 0:
        return weights.real[:, :0]
    return _SumOfExponentials.apply(weights, rates, length)


def sum_of_exponentials_reference(weights: Tensor, rates: Tensor, length: int) -> Tensor:
    """The same by its definition."""
    steps = torch.arange(length, device=rates.device, dtype=rates.real.dtype)
    rates = rates.repeat(weights.shape[0] // rates.shape[0], 1)
    return (weights.unsqueeze(-1) * torch.exp(rates.unsqueeze(-1) * steps)).real.sum(dim=-2)


def step_exponentials(weights: Tensor, rates: Tensor, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One step of the recurrence whose convolution kernels these are: inputs (B, D) and a state (B, D, N), None at the
    start -> outputs (B, D) and the next state. The rates are those of each channel, (D, N), or of all, (1, N). A state
    is in float32 at the least, outputs are in the dtype of the inputs."""
    inputs = exact(x).unsqueeze(-1)
    state = inputs if state is None else torch.exp(rates) * state + inputs
    return (weights * state).real.sum(dim=-1).to(x.dtype), state


def exact(x: Tensor) -> Tensor:
    """In float32 at the least: half precision has no complex numbers, and too few digits for powers of a decay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_complex(parameter: Tensor) -> Tensor:
    """(..., 2), real and imaginary parts -> (...), complex numbers, exact as above."""
    return torch.view_as_complex(exact(parameter).contiguous())


def log_uniform_(log_dt: Tensor, dt_min: float, dt_max: float) -> Tensor:
    """Fill with log Δ, for step sizes Δ between the two, uniform on a logarithmic scale."""
    if not 0 < dt_min <= dt_max < math.inf:
        raise ValueError(f"dt_min and dt_max must be positive and in order, got {dt_min} and {dt_max}")
    return torch.nn.init.uniform_(log_dt, math.log(dt_min), math.log(dt_max))


class _SumOfExponentials(torch.autograd.Function):
    """Its gradients are sums over the same exponentials, so that only their tables are kept:

    ∂w_n* = Σ_l g[l]·exp(λ_n·l),   ∂λ_n* = w_n·Σ_l l·g[l]·exp(λ_n·l)
    """

    @staticmethod
    def forward(ctx, weights: Tensor, rates: Tensor, length: int) -> Tensor:
        groups, modes = rates.shape
        weights = weights.reshape(-1, groups, modes).transpose(0, 1).contiguous()  # (G, D/G, N)
        shared = weights.shape[1]
        block = min(1 << round(math.log2(length * shared) / 2), 1 << (length - 1).bit_length())
        fine = _powers(rates, 1, block)  # (G, T, N)
        coarse = _powers(rates, block, -(-length // block))  # (G, P, N)
        left = (weights.unsqueeze(2) * coarse.unsqueeze(1)).flatten(1, 2)  # (G, D/G·P, N)
        kernels = _matmul(_parts(left.conj_physical()), _parts(fine).mT)
        ctx.save_for_backward(weights, fine, coarse)
        ctx.length = length
        return kernels.reshape(groups, shared, -1)[..., :length].transpose(0, 1).reshape(-1, length)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, fine, coarse = ctx.saved_tensors
        (groups, shared, modes), block, blocks = weights.shape, fine.shape[1], coarse.shape[1]
        padded = grad.new_zeros(groups, shared, blocks * block)
        padded[..., : ctx.length] = grad.reshape(shared, groups, ctx.length).transpose(0, 1)
        rows, columns = padded.view(groups, shared * blocks, block), _parts(fine)

        def sum_fine(rows: Tensor) -> Tensor:
            return _from_parts(_matmul(rows, columns), fine).view(groups, shared, blocks, modes)

        plain, of_rates = sum_fine(rows), None
        of_weights = (plain * coarse.unsqueeze(1)).sum(dim=2).conj_physical()
        if ctx.needs_input_grad[1]:
            steps = torch.arange(max(block, blocks), device=grad.device, dtype=grad.dtype)
            moments = sum_fine(rows * steps[:block]) + block * steps[:blocks, None] * plain
            of_rates = (weights * (moments * coarse.unsqueeze(1)).sum(dim=2)).sum(dim=1).conj_physical()
        return of_weights.transpose(0, 1).reshape(-1, modes), of_rates, None


def _powers(rates: Tensor, step: int, count: int) -> Tensor:
    """exp(λ·step·k) for k < count, (G, count, N), as products of exp(λ·step·2^j): faster than as many exponentials, and
    more exact than the exponential of a large angle that has been rounded."""
    table = rates.new_empty(rates.shape[0], count, rates.shape[1])
    table[:, 0] = 1
    size = 1
    while size < count:
        added = table[:, size : 2 * size]
        torch.mul(table[:, : added.shape[1]], _exp(rates * (step * size)).unsqueeze(1), out=added)
        size *= 2
    return table


def _exp(x: Tensor) -> Tensor:
    """torch.exp, which is six times slower than this for complex numbers on a CPU."""
    return torch.polar(x.real.exp(), x.imag) if x.is_complex() else x.exp()


def _parts(x: Tensor) -> Tensor:
    """(…, N) -> (…, 2N), the real and imaginary parts of complex numbers side by side. Then Re(a·b) summed over N is
    the product of the parts of a* with those of b."""
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x


def _from_parts(parts: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(parts.unflatten(-1, (-1, 2))) if like.is_complex() else parts


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """In full precision under autocast too: the sums cancel."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _check(weights: Tensor, rates: Tensor, length: int) -> None:
    if rates.ndim != 2 or weights.ndim != 2 or weights.shape[1] != rates.shape[1] or weights.shape[0] % rates.shape[0]:
        raise ValueError(
            "weights must have the shape (channels, N) and rates (groups, N) for a number of groups that divides that "
            f"of channels, got {tuple(weights.shape)} and {tuple(rates.shape)}"
        )
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
