"""LaS attention in linear time: exact nearby, a running state for the far past.

The decay shrinks far *scores* to 0, not far weights: with x_ij = exp(-a(i-j))·s_ij small, exp(x_ij) ≈ 1 + x_ij, so that
the far keys of a query enter only through sums over them,

    Σ_j exp(x_ij)·v_j  ≈  Σ_j v_j  +  q_i·exp(-a(i-c)) · Σ_j exp(-a(c-j))·k_j ⊗ v_j,       and likewise with v_j = 1.

The second sum is a state of size d×d that decays from block to block: linear attention with retention. With a near
window of W keys, the first W queries attend to all keys before them. The others are cut into blocks of B: block b,
which begins at W + b·B, attends exactly to itself and the W keys before it, and to the keys before b·B through the
state. That is O(L·W) for each head, and every far key is more than W away. ``windows.py`` chooses W, with a proof.
Of the orders of the expansion only the first is offered: the zeroth, which needs no state, takes a window twice as long
and saves what 33 keys cost; the second takes two thirds of the window, and a state of d²(d+1)/2 numbers.

With a·W = 40 the far scores are 0 in any dtype: so the exact path uses it, too, for heads that decay steeply.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longlens.ops.checks import at_least_float32, no_autocast, working_dtype
from longlens.ops.decay import decay_weights, widest_dtype
from longlens.ops.union import union_attention, union_backward

FOLDED = 2**22  # numbers of folded keys in one call of the kernel: 16 MiB
MOST = 0.999  # far scores beyond it could make a weight 1 + x negative
BLOCKS = (64, 512)  # sizes of blocks. Smaller ones are slower; larger ones make the near field longer


def block_size(rate: float) -> int:
    """B for a head: a power of two of about a sixth of the usual window, 3 / a."""
    smallest, largest = BLOCKS
    return min(largest, max(smallest, 2 ** int(math.log2(max(0.75 / rate, 1.0)))))


class _Run(NamedTuple):
    """Some blocks of one size, for one call of the kernel."""

    first: int  # the number of the first block
    amount: int
    size: int  # B, or less for the last block
    start: int  # where the first block begins
    window: int  # W

    def blocks(self, x: Tensor) -> Tensor:
        """(N, L, ·) -> (amount, N, size, ·), a view."""
        return x[:, self.start : self.stop].unflatten(1, (self.amount, self.size)).transpose(0, 1)

    def windows(self, x: Tensor) -> Tensor:
        """(N, L, ·) -> (amount, N, W + size, ·), a view: each block with the W keys before it."""
        near = x[:, self.start - self.window : self.stop]
        return near.unfold(1, self.window + self.size, self.size).mT.transpose(0, 1)

    @property
    def stop(self) -> int:
        return self.start + self.amount * self.size


class _Heads(NamedTuple):
    """Heads (and sequences) of one window and one size of blocks, which go through all calls together."""

    query: Tensor  # (N, L, d)
    key: Tensor
    value: Tensor  # (N, L, dv), smoothed
    rates: Tensor  # (N,)
    mask: Tensor | None  # (N, L, 1), True for keys that count
    window: int
    block: int
    scale: float
    dtype: torch.dtype

    @property
    def length(self) -> int:
        return self.query.shape[1]

    @property
    def blocks(self) -> int:
        """How many blocks there are, the last one counted if it is shorter."""
        return -(-(self.length - self.window) // self.block) if self.window < self.length else 0

    def runs(self) -> Iterator[_Run]:
        width = self.query.shape[0] * (self.window + self.block) * self.query.shape[-1]
        at_once, whole = max(1, FOLDED // width), max(0, self.length - self.window) // self.block
        for first in range(0, whole, at_once):
            count = min(at_once, whole - first)
            yield _Run(first, count, self.block, self.window + first * self.block, self.window)
        if whole < self.blocks:
            start = self.window + whole * self.block
            yield _Run(whole, 1, self.length - start, start, self.window)

    def near(self, run: _Run | None) -> tuple[Any, ...]:
        """What ``union_attention`` gets for the blocks of a run, or for the first W queries."""
        if run is None:
            tensors = (x[None, :, : self.window] for x in (self.query, self.key, self.value))
            mask = None if self.mask is None else self.mask[None, :, : self.window].mT
            return *tensors, self.rates, mask, None
        mask = None if self.mask is None else run.windows(self.mask).mT
        return run.blocks(self.query), run.windows(self.key), run.windows(self.value), self.rates, mask, None

    def folded_query(self, run: _Run) -> Tensor:
        """q_i, weighted by the decay since the end of the far keys: (amount, N, size, d)."""
        return at_least_float32(run.blocks(self.query)) * self.query_weights(run)

    def query_weights(self, run: _Run) -> Tensor:
        step = torch.arange(run.size, device=self.rates.device)
        return decay_weights(self.rates, -(self.window + step), self.query.dtype) * self.scale

    def far_keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all blocks but the last, (n - 1, N, B, ·), and the decay of keys to the end of theirs."""
        run = _Run(0, max(0, self.blocks - 1), self.block, 0, self.window)
        key, value = (run.blocks(at_least_float32(x)) for x in (self.key, self.value))
        if self.mask is not None:
            key, value = (x * run.blocks(self.mask) for x in (key, value))
        step = torch.arange(self.block, device=self.rates.device)
        return key, value, decay_weights(self.rates, step - self.block, self.query.dtype)

    def retention(self) -> Tensor:
        """How much of a state is left after a block, (N, 1, 1)."""
        return decay_weights(self.rates, torch.tensor([-self.block], device=self.rates.device), self.query.dtype)

    def states(self) -> tuple[Tensor, Tensor]:
        """Σ exp(-a(c-j))·k_j ⊗ (v_j, 1), (n, N, d, dv + 1), and Σ (v_j, 1), (n, N, 1, dv + 1), over the far keys j < c
        of each block."""
        key, value, weights = self.far_keys()
        states = key.new_zeros(self.blocks, key.shape[1], key.shape[-1], value.shape[-1] + 1)
        sums = value.new_zeros(self.blocks, value.shape[1], 1, value.shape[-1] + 1, dtype=widest_dtype(value.device))
        if len(key) > 0:
            weighted = key * weights
            states[1:, ..., :-1] = weighted.mT @ value
            states[1:, ..., -1] = weighted.sum(-2)
            sums[1:, ..., :-1] = value.sum(-2, keepdim=True)
            present = None if self.mask is None else self.mask[:, : len(key) * self.block]
            counts = self.block if present is None else present.unflatten(1, (-1, self.block)).sum(2).transpose(0, 1)
            sums[1:, ..., -1] = counts  # (n - 1, N, 1)
        accumulate(states, self.retention())
        return states, sums.cumsum(0).to(states.dtype)  # sums of a million values, in float64


def accumulate(states: Tensor, kept: Tensor) -> Tensor:
    """states[b] += kept·states[b - 1], one block after the other, in place."""
    for before, state in pairwise(states):
        state.addcmul_(before, kept)
    return states


def far_field(query: Tensor, states: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output (…, dv), log-sum-exp (…) of the far keys, and whether their sum of weights was cut off."""
    far = torch.matmul(query, states).add_(sums)  # (m, N, B, dv + 1)
    count = sums[..., -1:]
    least = (1 - MOST) * count.clamp_min(1.0)
    total = torch.maximum(far[..., -1:], least)  # positive, also for scores beyond the expansion
    lse = torch.where(count > 0, torch.log(total), -torch.inf).squeeze(-1)
    return far[..., :-1] / total, lse, far[..., -1:] < least


def _forward(heads: _Heads) -> tuple[Tensor, Tensor]:
    """Output (N, L, dv) and log-sum-exp (N, L)."""
    rest = True, heads.scale, heads.dtype
    output = torch.empty(*heads.query.shape[:2], heads.value.shape[-1], dtype=heads.dtype, device=heads.query.device)
    lse = torch.empty(heads.query.shape[:2], dtype=working_dtype(heads.dtype), device=heads.query.device)
    first = union_attention(*heads.near(None), None, None, *rest)
    output[:, : heads.window], lse[:, : heads.window] = first[0][0], first[1][0]
    states, sums = heads.states()
    for run in heads.runs():
        which = slice(run.first, run.first + run.amount)
        far_output, far_lse, _ = far_field(heads.folded_query(run), states[which], sums[which])
        run_output, run_lse = union_attention(*heads.near(run), far_output, far_lse, *rest)
        run.blocks(output).copy_(run_output)
        run.blocks(lse.unsqueeze(-1)).copy_(run_lse.unsqueeze(-1))
    return output, lse


def _backward(
    heads: _Heads, grad: Tensor, output: Tensor, lse: Tensor, learn_rates: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients to query, key, value (N, L, ·), in float32 at least, and to the rates (N,)."""
    rest, window = (True, heads.scale, heads.dtype, learn_rates), heads.window
    grads = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (heads.query, heads.key, heads.value)]
    *parts, grad_rates = union_backward(
        grad[None, :, :window], *heads.near(None), output[None, :, :window], lse[None, :, :window], *rest
    )
    for total, part in zip(grads, parts, strict=True):
        total[:, :window] += part[0]
    far_query = torch.zeros_like(grads[0])
    states, sums = heads.states()
    grad_states, grad_sums = torch.zeros_like(states), torch.zeros_like(sums)
    for run in heads.runs():
        which = slice(run.first, run.first + run.amount)
        run_grad, run_output, run_lse = (run.blocks(x) for x in (grad, output, lse.unsqueeze(-1)))
        dq, dk, dv, dr = union_backward(run_grad, *heads.near(run), run_output, run_lse.squeeze(-1), *rest)
        run.blocks(grads[0]).add_(dq)
        for index, (key_part, value_part) in enumerate(zip(dk, dv, strict=True)):  # windows overlap
            keys = slice(run.start - window + index * run.size, run.start + (index + 1) * run.size)
            grads[1][:, keys] += key_part
            grads[2][:, keys] += value_part
        grad_rates += dr

        # Of the numerator and the denominator of a row: its weights are exp(-lse) of their own sum.
        query = heads.folded_query(run)
        clamped = far_field(query, states[which], sums[which])[2]
        run_grad, run_output = at_least_float32(run_grad), at_least_float32(run_output)
        total = -(run_grad * run_output).sum(-1, keepdim=True)
        weight = torch.where(sums[which][..., -1:] > 0, torch.exp(-run_lse), 0.0)  # rows may have no far key at all
        far_grad = torch.cat([run_grad, total.masked_fill(clamped, 0.0)], dim=-1) * weight
        run.blocks(far_query).copy_(far_grad @ states[which].mT * heads.query_weights(run))
        grad_states[which] = query.mT @ far_grad
        grad_sums[which] = far_grad.sum(-2, keepdim=True)
    far_key, far_value = _far_key_gradients(heads, grad_states, grad_sums)
    keys = slice(0, far_key.shape[1])
    grads[0] += far_query
    grads[1][:, keys] += far_key
    grads[2][:, keys] += far_value
    if learn_rates:  # d/da of exp(-a(i-c)) and exp(a(j-c))
        position = torch.arange(heads.length, device=lse.device, dtype=grad_rates.dtype) - heads.length / 2
        grad_rates -= (far_query * heads.query).sum(-1).to(position) @ position
        grad_rates += (far_key * heads.key[:, keys]).sum(-1).to(position) @ position[keys]
    return grads[0], grads[1], grads[2], grad_rates


def _far_key_gradients(heads: _Heads, grad_states: Tensor, grad_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to the keys and values of all blocks but the last, two of (N, (n - 1)·B, ·)."""
    key, value, weights = heads.far_keys()
    states = accumulate(grad_states.flip(0), heads.retention()).flip(0)[1:]  # of the block after each
    sums = grad_sums.flip(0).cumsum(0).flip(0)[1:]
    grad_key = torch.matmul(value, states[..., :-1].mT).add_(states[..., -1].unsqueeze(-2)) * weights
    grad_value = torch.matmul(key * weights, states[..., :-1]).add_(sums[..., :-1])
    grads = [x.transpose(0, 1).flatten(1, 2) for x in (grad_key, grad_value)]
    if heads.mask is not None:
        grads = [x * heads.mask[:, : x.shape[1]] for x in grads]
    return grads[0], grads[1]


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor,
    key_mask: Tensor | None,
    windows: Sequence[int],
    scale: float,
    dtype: torch.dtype,
) -> Iterator[tuple[list[int], _Heads]]:
    """Heads of (B, H, L, ·) with the same window and size of blocks, and their numbers."""
    groups: dict[tuple[int, int], list[int]] = {}
    for head, (window, rate) in enumerate(zip(windows, rates.tolist(), strict=True)):
        window = min(window, query.shape[2])
        groups.setdefault((window, block_size(rate) if window < query.shape[2] else 1), []).append(head)
    if key_mask is not None:
        key_mask = key_mask.expand(*query.shape[:2], 1, query.shape[2])
    for (window, block), numbers in groups.items():
        q, k, v = (_take(x, numbers) for x in (query, key, value))
        mask = None if key_mask is None else _take(key_mask.mT, numbers)
        yield numbers, _Heads(q, k, v, rates[numbers].repeat(len(query)), mask, window, block, scale, dtype)


def _take(x: Tensor, numbers: list[int]) -> Tensor:
    """Some heads of (B, H, L, ·), as (B·h, L, ·)."""
    return (x if len(numbers) == x.shape[1] else x[:, numbers]).flatten(0, 1)


@torch.library.custom_op("longlens::linear_attention", mutates_args=())
@no_autocast
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor,
    key_mask: Tensor | None,
    windows: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Causal LaS attention (B, H, L, dv) of values that are smoothed already, with products in ``dtype``, and the
    log-sum-exp of the scores, (B, H, L). ``windows`` (H,) are the near windows of the heads; a head whose window is as
    long as the sequence is exact. Keys whose ``key_mask`` (B or 1, H or 1, 1, L) is False do not count. It is an
    operator of its own, so that torch.compile need not know the windows to trace it."""
    output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=dtype, device=query.device)
    lse = torch.empty(query.shape[:-1], dtype=working_dtype(dtype), device=query.device)
    for numbers, heads in _grouped(query, key, value, rates, key_mask, windows.tolist(), scale, dtype):
        for whole, part in zip((output, lse), _forward(heads), strict=True):
            whole[:, numbers] = part.unflatten(0, (-1, len(numbers)))
    return output, lse


@torch.library.custom_op("longlens::linear_attention_backward", mutates_args=())
@no_autocast
def _linear_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor,
    key_mask: Tensor | None,
    windows: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    dtype: torch.dtype,
    learn_rates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    grad_rates = torch.empty(query.shape[1], dtype=widest_dtype(query.device), device=query.device)
    for numbers, heads in _grouped(query, key, value, rates, key_mask, windows.tolist(), scale, dtype):
        grad_part, output_part, lse_part = (_take(x, numbers) for x in (grad, output, lse))
        *parts, part_rates = _backward(heads, grad_part, output_part, lse_part, learn_rates)
        for whole, part in zip(grads, parts, strict=True):
            whole[:, numbers] = part.unflatten(0, (-1, len(numbers))).to(whole.dtype)
        grad_rates[numbers] = part_rates.unflatten(0, (-1, len(numbers))).sum(0)
    return grads[0], grads[1], grads[2], grad_rates


@linear_attention.register_fake
def _(query, key, value, rates, key_mask, windows, scale, dtype):
    output = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=dtype)
    return output, query.new_empty(query.shape[:-1], dtype=working_dtype(dtype))


@_linear_backward.register_fake
def _(grad, query, key, value, rates, key_mask, windows, output, lse, scale, dtype, learn_rates):
    grads = (x.new_empty(x.shape) for x in (query, key, value))
    return *grads, query.new_empty(query.shape[1], dtype=widest_dtype(query.device))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.dtype = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: None):
    if grad is None:
        return (None,) * 8
    learn_rates = ctx.needs_input_grad[3]
    *grads, grad_rates = _linear_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.dtype, learn_rates)
    grad_rates = grad_rates.to(ctx.saved_tensors[3].dtype) if learn_rates else None
    return *grads, grad_rates, None, None, None, None


linear_attention.register_autograd(_gradients, setup_context=_setup_context)
