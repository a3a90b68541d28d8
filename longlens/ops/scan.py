"""Linear recurrences: h_t = a_t ⊙ h_{t-1} + b_t, real or complex, in O(L) and in parallel over blocks.

Shapes: B sequences of L steps and N independent numbers; P blocks of T steps.
"""

import math
from typing import Any

import torch
from torch import Tensor

from longlens.ops.checks import once_differentiable

_SHORT = 32  # up to this length the steps are done one after the other


def linear_scan(decay: Tensor, inputs: Tensor, *, reverse: bool = False) -> Tensor:
    """All states of h_t = decay_t ⊙ h_{t-1} + inputs_t, (B, L, N), from h = 0 before the first step, or for ``reverse``
    after the last, for inputs (B, L, N) and decay (B, L, N), or (N,) if it is the same in every step."""
    if inputs.ndim != 3:
        raise ValueError(f"inputs must have the shape (batch, length, width), got {tuple(inputs.shape)}")
    if decay.shape not in (inputs.shape[2:], inputs.shape):
        shapes = f"({inputs.shape[2]},) or that of inputs, {tuple(inputs.shape)}"
        raise ValueError(f"decay must have the shape {shapes}, got {tuple(decay.shape)}")
    dtype = torch.promote_types(decay.dtype, inputs.dtype)
    return _Scan.apply(decay.to(dtype), inputs.to(dtype), reverse) if inputs.shape[1] else inputs.to(dtype).clone()


def linear_scan_reference(decay: Tensor, inputs: Tensor, *, reverse: bool = False) -> Tensor:
    """The same, step by step."""
    length, state = inputs.shape[1], torch.zeros_like(inputs[:, 0])
    states: list[Tensor] = [state] * length
    for t in reversed(range(length)) if reverse else range(length):
        state = (decay if decay.ndim == 1 else decay[:, t]) * state + inputs[:, t]
        states[t] = state
    return torch.stack(states, dim=1)


class _Scan(torch.autograd.Function):
    """The gradient of a scan is a scan in the other direction: only the states are kept for it."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, inputs: Tensor, reverse: bool) -> Tensor:
        states = _scan(decay, inputs, reverse)
        ctx.save_for_backward(decay, states)
        ctx.reverse = reverse
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        decay, states = ctx.saved_tensors
        grad, constant, backward = grad.contiguous(), decay.ndim == 1, not ctx.reverse
        # What reaches step t comes through the decay of the step after it.
        grad_inputs = _scan(decay.conj() if constant else _previous(decay.conj(), backward), grad, backward)
        grad_decay = None
        if ctx.needs_input_grad[0] and constant:
            late, early = (slice(None, -1), slice(1, None)) if ctx.reverse else (slice(1, None), slice(None, -1))
            grad_decay = torch.einsum("bln,bln->n", grad_inputs[:, late], states[:, early].conj())
        elif ctx.needs_input_grad[0]:
            grad_decay = grad_inputs * _previous(states, ctx.reverse).conj()
        return grad_decay, grad_inputs if ctx.needs_input_grad[1] else None, None


def _previous(x: Tensor, reverse: bool) -> Tensor:
    """The entry of the step before, in the direction of the scan; 0 for the first."""
    zero = torch.zeros_like(x[:, :1])
    return torch.cat([x[:, 1:], zero], dim=1) if reverse else torch.cat([zero, x[:, :-1]], dim=1)


def _scan(decay: Tensor, inputs: Tensor, reverse: bool) -> Tensor:
    if reverse:
        decay = decay if decay.ndim == 1 else decay.flip(1)
        return _scan(decay, inputs.flip(1), False).flip(1)
    length = inputs.shape[1]
    if length <= _SHORT:
        return _step_through(decay if decay.ndim == 1 else decay[:, None], inputs[:, None].clone())[:, 0]
    steps = 1 << round(math.log2(length) / 2)  # T, about √L

    # All blocks step by step, side by side, as if each began with a state of 0.
    states = _blocks(inputs, steps, fill=0.0)  # (B, P, T, N)
    if decay.ndim == 1:
        states = _step_through(decay, states)
        factors = decay.expand(steps, -1).cumprod(dim=0)  # a, a², …, a^T: (T, N)
        last = factors[-1]  # (N,)
    else:
        decay = _blocks(decay, steps, fill=1.0)
        states, factors = _step_through(decay, states), decay.cumprod(dim=2)  # a_1, a_1·a_2, … in each block
        last, factors = factors[:, :, -1].contiguous(), factors[:, 1:]  # (B, P, N) and (B, P - 1, T, N)

    # The states at the ends of the blocks, (B, P, N), which is a scan again; then what reaches each step from before
    # its block.
    ends = _scan(last, states[:, :, -1].contiguous(), False)
    states[:, 1:].addcmul_(factors.expand_as(states[:, 1:]), ends[:, :-1, None])
    return states.flatten(1, 2)[:, :length]


def _blocks(x: Tensor, steps: int, fill: float) -> Tensor:
    """A copy of (B, L, N) as (B, P, T, N), filled up after the end."""
    batch, length, width = x.shape
    count = -(-length // steps)
    padded = x.new_full((batch, count * steps, width), fill)
    padded[:, :length] = x
    return padded.unflatten(1, (count, steps))


def _step_through(decay: Tensor, states: Tensor) -> Tensor:
    """In place, (B, P, T, N): step by step in all blocks at once. decay: (N,) or (B, P, T, N)."""
    for t in range(1, states.shape[2]):
        states[:, :, t].addcmul_(decay if decay.ndim == 1 else decay[:, :, t], states[:, :, t - 1])
    return states
