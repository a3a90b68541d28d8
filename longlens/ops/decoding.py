"""Decoding of LaS attention with a bounded memory: the near keys of some heads, and states for those before them.

The linear form (``linear.py``) one part of a sequence after the other. Near keys are folded into the states as soon as
the error that this could bring to any later query is within a tolerance. Later queries are not known, so it is bounded
(as in ``windows.py``) for all that are at most ``MARGIN`` times as long as the longest so far,

    Σ_far x_j² ≤ scale²·‖q‖²·λ_max(S),       Z ≥ n·exp(-scale·‖q‖·‖Σ_j exp(-a(i-j))·k_j‖ / n)   over the n keys so far,

and both get better with distance. When a query comes, its own bound is computed from it: 2Δ / (Z - Δ), where Z - Δ is
the sum of its weights. So the bound of every output is known, whatever queries come; those that are longer than
foreseen may exceed the tolerance, which the cache tells.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longlens.ops.checks import at_least_float32, no_autocast, without_autocast
from longlens.ops.decay import decay_weights, widest_dtype
from longlens.ops.last import attend_last
from longlens.ops.linear import block_size, far_field
from longlens.ops.union import union_attention
from longlens.ops.windows import score_bound

MARGIN = 1.25  # how much longer later queries may be than the longest so far


class Past(NamedTuple):
    """What h heads remember. States are relative to the first near key, and are never changed in place."""

    rates: Tensor  # (h,), in float64
    block: int  # how many keys are folded at once; 0: never, as a head does not decay
    key: Tensor  # (B, h, n, d), near
    value: Tensor  # (B, h, n, dv), smoothed
    state: Tensor  # (B, h, d, dv + 1): Σ exp(-a(c-j))·k_j ⊗ (v_j, 1) over the far keys
    sums: Tensor  # (B, h, 1, dv + 1), in float64: Σ (v_j, 1)
    square: Tensor  # (B, h, d, d): Σ exp(-2a(c-j))·k_j ⊗ k_j
    norm: Tensor  # (B, h): max exp(-a(c-j))·‖k_j‖
    longest: Tensor  # (B, h): ‖q‖ so far
    folded: int = 0  # far keys
    try_at: int = 0  # number of near keys at which folding is tried again

    @staticmethod
    def empty(rates: Sequence[float], key: Tensor, value: Tensor) -> "Past":
        """Before the first of tokens that are like these."""
        (batch, heads, _, dim), width, like = key.shape, value.shape[-1], at_least_float32(key)
        wide = {"dtype": widest_dtype(key.device), "device": key.device}
        state, sums = like.new_zeros(batch, heads, dim, width + 1), torch.zeros(batch, heads, 1, width + 1, **wide)
        square, norm = like.new_zeros(batch, heads, dim, dim), like.new_zeros(batch, heads)
        block = block_size(max(rates)) if min(rates) > 0 else 0
        near = key[..., :0, :], value[..., :0, :]
        return Past(torch.tensor(rates, **wide), block, *near, state, sums, square, norm, norm)

    def append(self, key: Tensor, value: Tensor) -> "Past":
        key, value = (torch.cat([old, new], dim=-2) for old, new in ((self.key, key), (self.value, value)))
        return self._replace(key=key, value=value)

    @no_autocast
    def attend(self, query: Tensor, scale: float) -> tuple[Tensor, "Past", float]:
        """The output of the last tokens' queries (B, h, Lq, d), and its bound, relative to max|v|."""
        count = query.shape[-2]
        if count == 0 or self.block == 0:
            return self._attend(query, scale, None, None)[0], self, 0.0
        norms = at_least_float32(query).norm(dim=-1)
        past = self._replace(longest=torch.maximum(self.longest, norms.amax(-1)))
        if self.folded == 0:
            return self._attend(query, scale, None, None)[0], past, 0.0
        place = torch.arange(self.key.shape[-2] - count, self.key.shape[-2], device=query.device)
        folded = at_least_float32(query) * self._weights(-place) * scale
        far_output, far_lse, _ = far_field(folded, self.state, self.sums.to(self.state.dtype))
        output, lse = self._attend(query, scale, far_output, far_lse)
        squares = ((folded @ self.square) * folded).sum(-1)
        lost = score_bound(squares, folded.norm(dim=-1) * self.norm.unsqueeze(-1))
        bound = 2 * (lost * (-lse).exp()).amax().item()
        return output, past, bound

    def _attend(
        self, query: Tensor, scale: float, far_output: Tensor | None, far_lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of near keys, joined with those of far ones."""
        if query.shape[-2] != 1:
            near = query, self.key, self.value, self.rates, None, None
            return union_attention(*near, far_output, far_lse, True, scale, query.dtype)
        output, scores = attend_last(query, self.key, self.value, scale, rates=self.rates)
        lse = scores.logsumexp(-1)
        if far_output is not None and far_lse is not None:
            near, lse = lse, torch.logaddexp(lse, far_lse)
            output = output * (near - lse).exp().unsqueeze(-1) + far_output * (far_lse - lse).exp().unsqueeze(-1)
        return output.to(query.dtype), lse

    def _weights(self, exponents: Tensor) -> Tensor:
        """exp(a·x), (h, n, 1)."""
        return decay_weights(self.rates, exponents, self.key.dtype)

    def fold(self, scale: float, tolerance: float) -> "Past":
        """Fold the oldest near keys, block by block, as long as no later query can lose more than the tolerance."""
        past, block = self, self.block
        if block == 0 or past.key.shape[-2] < max(past.try_at, 2 * block):
            return past
        with without_autocast(self.key.device.type):
            while past.key.shape[-2] > block and (tried := past._folded(block))._risk(scale) <= tolerance:
                past = tried
        return past._replace(try_at=past.key.shape[-2] + block)

    def _folded(self, count: int) -> "Past":
        """With the first near keys in the states."""
        key, value = (at_least_float32(x[..., :count, :]) for x in (self.key, self.value))
        weighted = key * self._weights(torch.arange(count, device=key.device) - count)
        kept = self._weights(torch.tensor([-count], device=key.device))  # (h, 1, 1)
        new = torch.cat([weighted.mT @ value, weighted.sum(-2).unsqueeze(-1)], dim=-1)
        values = value.sum(-2, keepdim=True)
        sums = torch.cat([values, values.new_full((*values.shape[:-1], 1), count)], dim=-1)
        return self._replace(
            key=self.key[..., count:, :].clone(),  # so that the memory of the others is freed
            value=self.value[..., count:, :].clone(),
            state=self.state * kept + new,
            sums=self.sums + sums,
            square=self.square * kept.square() + weighted.mT @ weighted,
            norm=torch.maximum(self.norm * kept[..., 0, 0], weighted.norm(dim=-1).amax(-1)),
            folded=self.folded + count,
        )

    def _risk(self, scale: float) -> float:
        """What any later query may lose, if it is not much longer than those before; relative to max|v|."""
        count = self.key.shape[-2]
        to_query = self._weights(torch.tensor([-count], device=self.key.device))[..., 0, 0]  # (h,)
        query = MARGIN * scale * self.longest
        near = (at_least_float32(self.key) * self._weights(torch.arange(count, device=query.device) - count)).sum(-2)
        mean = (self.state[..., -1] * to_query.unsqueeze(-1) + near).norm(dim=-1)
        keys = self.folded + count
        weights = keys * torch.exp(-query * mean / keys)
        largest = torch.linalg.eigvalsh(self.square)[..., -1].clamp_min(0.0)
        lost = score_bound((query * to_query).square() * largest, query * to_query * self.norm)
        part = (lost / weights).amax().item()
        return 2 * part / (1 - part) if part < 1 else math.inf
