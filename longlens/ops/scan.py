"""Linear recurrences: h_t = a_t ⊙ h_{t-1} + b_t, real or complex, in O(L) and in parallel over blocks."""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_SHORT = 32  # so many steps are done one after the other


def linear_scan(decay: Tensor, inputs: Tensor, *, initial: Tensor | None = None, reverse: bool = False) -> Tensor:
    """All states h (B, L, N) of h_t = decay_t ⊙ h_{t-1} + inputs_t.

    decay: (N,), the same in every step, or (B, L, N).
    inputs: (B, L, N).
    initial: (B, N), the state before the first step; by default 0.
    reverse: run from the last step to the first.
    """
    _check(decay, inputs, initial)
    dtype = torch.promote_types(decay.dtype, inputs.dtype)
    decay, inputs = decay.to(dtype), inputs.to(dtype)
    if inputs.shape[1] == 0:
        return inputs.clone()
    if initial is not None:
        first = inputs.shape[1] - 1 if reverse else 0
        start = (decay if decay.ndim == 1 else decay[:, first]) * initial
        inputs = torch.cat(
            [inputs[:, :first], (inputs[:, first] + start)[:, None], inputs[:, first + 1 :]], dim=1
        )  # fmt: skip
    return _Scan.apply(decay, inputs, reverse)


def linear_scan_reference(
    decay: Tensor, inputs: Tensor, *, initial: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """The same, step by step."""
    length = inputs.shape[1]
    state = torch.zeros_like(inputs[:, 0]) if initial is None else initial
    states: list[Tensor] = [state] * length
    for t in reversed(range(length)) if reverse else range(length):
        state = (decay if decay.ndim == 1 else decay[:, t]) * state + inputs[:, t]
        states[t] = state
    return torch.stack(states, dim=1)


class _Scan(torch.autograd.Function):
    """The gradient of a scan is a scan in the other direction: only the states are kept for it."""

    @staticmethod
    def forward(ctx, decay: Tensor, inputs: Tensor, reverse: bool) -> Tensor:
        states = _scan(decay, inputs, reverse)
        ctx.save_for_backward(decay, states)
        ctx.reverse = reverse
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        decay, states = ctx.saved_tensors
        grad = grad.contiguous()
        if decay.ndim == 1:
            of_inputs = _scan(decay.conj(), grad, not ctx.reverse)
        else:  # what reaches step t comes through the decay of the step after it
            of_inputs = _scan(_shift(decay.conj(), not ctx.reverse), grad, not ctx.reverse)
        of_decay = None
        if ctx.needs_input_grad[0]:
            if decay.ndim == 1:
                now, before = (of_inputs[:, :-1], states[:, 1:]) if ctx.reverse else (of_inputs[:, 1:], states[:, :-1])
                of_decay = torch.einsum("bln,bln->n", now, before.conj())
            else:
                of_decay = of_inputs * _shift(states, ctx.reverse).conj()
        return of_decay, of_inputs if ctx.needs_input_grad[1] else None, None


def _shift(x: Tensor, reverse: bool) -> Tensor:
    """The entry of the step before, in the direction of the scan; 0 for the first."""
    zero = torch.zeros_like(x[:, :1])
    return torch.cat([x[:, 1:], zero], dim=1) if reverse else torch.cat([zero, x[:, :-1]], dim=1)


def _scan(decay: Tensor, inputs: Tensor, reverse: bool) -> Tensor:
    if reverse:
        decay = decay if decay.ndim == 1 else decay.flip(1)
        return _scan(decay, inputs.flip(1), False).flip(1)
    batch, length, width = inputs.shape
    if length <= _SHORT:
        return _steps(decay, inputs[:, None].clone())[:, 0]
    # Blocks of about √L: all of them step by step, side by side; then what each block hands to the next, which is a
    # scan again; then what reaches each step from before its block.
    block = 1 << round(math.log2(length) / 2)
    blocks = -(-length // block)
    inside = inputs.new_zeros(batch, blocks * block, width)
    inside[:, :length] = inputs
    inside = inside.unflatten(1, (blocks, block))
    if decay.ndim == 1:
        states = _steps(decay, inside)
        powers = _steps(decay, decay.expand(1, 1, block, width) * _first(decay, block))[0, 0]  # a, a², …
        carry = _scan(powers[-1], states[:, :, -1].contiguous(), False)
    else:
        padded = decay.new_ones(batch, blocks * block, width)
        padded[:, :length] = decay
        padded = padded.unflatten(1, (blocks, block))
        states, powers = _steps(padded, inside), padded.cumprod(dim=2)
        carry = _scan(powers[:, :, -1].contiguous(), states[:, :, -1].contiguous(), False)
        powers = powers[:, 1:]
    states[:, 1:].addcmul_(powers.expand_as(states[:, 1:]), carry[:, :-1, None])
    return states.flatten(1, 2)[:, :length]


def _first(decay: Tensor, block: int) -> Tensor:
    """1 for the first step, 0 for the others."""
    return (torch.arange(block, device=decay.device) == 0).to(decay.dtype)[:, None]


def _steps(decay: Tensor, states: Tensor) -> Tensor:
    """In place, (B, blocks, T, N): step by step in all blocks at once."""
    if decay.ndim == 3:
        decay = decay[:, None]
    for t in range(1, states.shape[2]):
        states[:, :, t].addcmul_(decay if decay.ndim == 1 else decay[:, :, t], states[:, :, t - 1])
    return states


def _check(decay: Tensor, inputs: Tensor, initial: Tensor | None) -> None:
    if inputs.ndim != 3:
        raise ValueError(f"inputs must have the shape (batch, length, width), got {tuple(inputs.shape)}")
    if decay.shape not in (inputs.shape[-1:], inputs.shape):
        raise ValueError(
            f"decay must have the shape ({inputs.shape[-1]},) or that of inputs, {tuple(inputs.shape)}, "
            f"got {tuple(decay.shape)}"
        )
    if initial is not None and initial.shape != (inputs.shape[0], inputs.shape[2]):
        raise ValueError(
            f"initial must have the shape ({inputs.shape[0]}, {inputs.shape[2]}), got {tuple(initial.shape)}"
        )
