"""Mega: moving average equipped gated attention (Ma et al. 2023).

A damped moving average of N numbers for each channel, as one long convolution, then a single head whose queries and
keys are made of it, and two gates, for D channels, Z = ``shared`` and H = ``expansion``·D:

    x' = silu(k * x + ω ⊙ x),   k[l] = Σ_n p_n·β_n·γ_n·q_n^l / √N,   p = σ(δ),   q = 1 - p·σ(α)     δ, α, β, γ: (D, N)
    z = silu(x'·W_z),   Q = z ⊙ s_Q + o_Q,   K = z ⊙ s_K + o_K                                      (L, Z)
    V = silu(x·W_V),   r = silu(x'·W_r)                                                             (L, H)
    A = softmax(Q·Kᵀ/√Z + bias[j - i])·V,   or f(Q·Kᵀ/n + bias[j - i])·V with n keys                (L, H)
    h = silu(x'·W_h + (r ⊙ A)·U_h),   u = σ(x'·W_u),   y = u ⊙ h + (1 - u) ⊙ x                      (L, D)

f(s) is relu(s)² or laplace, Φ(2√π·(s - √½)) with the normal distribution Φ, which has the same value and slope at √½.

For both sides, a second average with its own parameters runs from the end. Both include the token itself, as in the
code released with the paper.

The residual is part of the layer: y = x + u ⊙ (h - x). A block adds it to what its mixer returns, so this one returns
u ⊙ (h - x). With pre-norm the layer sees norm(x), except that the residual is x as it was, y = x + u ⊙ (h - x) still:
the block gives it as ``residual``.
"""

import math
from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import check_inputs, check_step, hide_padding
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.exponentials import decay_factors, step_exponentials, sum_of_exponentials
from longlens.ops.grow import grow
from longlens.ops.long_conv import long_conv
from longlens.ops.rotary import rotate
from longlens.ops.toeplitz_attention import toeplitz_attention
from longlens.options import Positive, Probability, Size

DENSE_LENGTH = 512  # up to here a matrix of all pairs is about as fast
EMA_PARAMETERS = ("delta", "alpha", "beta", "gamma")


def ema_terms(delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """The damped moving averages k[l] = Σ_n w_n·exp(λ_n·l) of four parameters (D, N): w and λ = log q, (D, N) each."""
    p = torch.sigmoid(delta)
    # log1p keeps the digits of slow averages, whose q is almost 1; q = 0 would have no logarithm.
    forgotten = (p * torch.sigmoid(alpha)).clamp(max=1 - torch.finfo(delta.dtype).eps)
    return p * beta * gamma / math.sqrt(delta.shape[-1]), torch.log1p(-forgotten)


def ema_reference(x: Tensor, delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """k * x of one sequence (L, D), as the recurrence h_t = p·β·x_t + (1 - p·σ(α))·h_{t-1}, y_t = Σ_n γ_n·h_t[n] / √N.
    For both sides, the parameters (2D, N) are those of two averages, of which the second runs from the end."""
    if len(delta) > x.shape[1]:
        past, later = zip(*(parameter.chunk(2) for parameter in (delta, alpha, beta, gamma)), strict=True)
        return ema_reference(x, *past) + ema_reference(x.flip(0), *later).flip(0)
    p, state, outputs = torch.sigmoid(delta), torch.zeros_like(delta), []
    for token in x:
        state = p * beta * token[:, None] + (1 - p * torch.sigmoid(alpha)) * state
        outputs.append((gamma * state).sum(dim=-1) / math.sqrt(delta.shape[-1]))
    return torch.stack(outputs)


def toeplitz(values: Tensor) -> Tensor:
    """(2L - 1,), one value for each distance j - i from 1 - L to L - 1 -> the (L, L) matrix with values[j - i + L - 1]:
    a row of 2L numbers, repeated and cut into rows of 2L - 1, moves on by one from row to row. (The gradient of an
    index would be added up one number at a time.)"""
    length = (values.shape[0] + 1) // 2
    row = torch.cat([values[length - 1 :], values.new_zeros(1), values[: length - 1]])
    return row.repeat(length)[: length * len(values)].view(length, len(values))[:, :length]


class MovingAverage(nn.Module):
    """x' = silu(k * x + ω ⊙ x), (B, L, D) -> (B, L, D)."""

    def __init__(
        self,
        d_model: int,
        size: int,
        *,
        bidirectional: bool,
        truncation: int | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.bidirectional, self.truncation = bidirectional, truncation
        shape = (2 * d_model if bidirectional else d_model, size)
        self.delta, self.alpha = (nn.Parameter(torch.empty(shape, **factory)) for _ in range(2))
        self.beta, self.gamma = (nn.Parameter(torch.empty(shape, **factory)) for _ in range(2))
        self.omega = nn.Parameter(torch.empty(d_model, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the official code, with β of alternating signs."""
        for parameter, std in zip((*self.parts, self.omega), (0.2, 0.2, 0.02, 1.0, 1.0), strict=True):
            nn.init.normal_(parameter, std=std)
        with torch.no_grad():
            self.beta[:, ::2] += 1.0
            self.beta[:, 1::2] -= 1.0

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """δ, α, β, γ: (D, N) each, or (2D, N) for both sides."""
        return self.delta, self.alpha, self.beta, self.gamma

    def kernel(self, length: int) -> Tensor:
        """For both sides, the weight that the second average gives the token itself is added to that of the first."""
        weights, rates = ema_terms(*self.parts)
        kept = min(length, self.truncation or length)
        if not self.bidirectional:
            return F.pad(sum_of_exponentials(weights, rates, kept), (0, length - kept))
        past, later = weights.chunk(2)
        one_step_on = later * rates.chunk(2)[1].exp()
        kernel = sum_of_exponentials(torch.cat([past, one_step_on]), rates, kept)
        kernel = kernel + F.pad(later.sum(dim=-1, keepdim=True), (0, kept - 1, 0, len(later)))
        if kept == self.truncation:  # later inputs begin one step on, so that their last weight is one too many
            kernel = torch.cat([kernel[: len(past)], F.pad(kernel[len(past) :, :-1], (0, 1))])
        return F.pad(kernel, (0, length - kept))

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.kernel(x.shape[1]).chunk(2 if self.bidirectional else 1)
        return F.silu(long_conv(x, *kernels) + self.omega * x)

    def step(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, D) and the N averages of each channel so far, (B, D, N) -> (B, D) and the next averages."""
        weights, rates = ema_terms(*self.parts)
        y, state = step_exponentials(weights, decay_factors(rates), x, state)
        return F.silu(y + self.omega * x), state


@register(
    "mega",
    "moving average and gated attention",
    Traits(
        decays=True,
        special_init=True,
        stable=True,
        gated=True,
        cost="L²",
        state="D·ema_size + L·(shared + expansion·D)",
    ),
    size_note="it has a position bias for each of 2L - 1 distances",
    fixed={"chunk_size": None},
)
@register(
    "mega-chunk",
    "Mega with attention in chunks",
    Traits(
        decays=True,
        special_init=True,
        stable=True,
        gated=True,
        cost="L log L",
        state="D·ema_size + chunk_size·(shared + expansion·D)",
    ),
    needs=("chunk_size",),
    chunk_size=128,
)
class MegaAttention(nn.Module):
    """A moving average, then gated attention of one head. (B, L, D) -> (B, L, D). Defaults as in the official code for
    the Long Range Arena (its model of width 64), but for the values, which are twice as wide as the layer there.

    Args:
        shared: Width Z of queries and keys.
        expansion: Width of the values, as a multiple of the layer's; 2 in the paper.
        ema_size: Numbers N that the moving average keeps for each channel.
        attention: Attention function: softmax as published for text, laplace as for images, or relu2.
        chunk_size: Length of independent chunks, within which tokens attend to each other; none for the whole sequence.
            The moving average runs through all of them.
        truncation: Number of inputs, back to which the moving average reaches on each side; none for all. The official
            code has 1,024, and 4,096 for Path-X.
        dropout: Dropout of x' and of h, as published.
        attention_dropout: Dropout of the attention weights; none as published.
        rotary: Position biases R_i·a · R_j·b of two learned vectors that turn with their positions, instead of a
            parameter for each distance.
        max_length: Longest sequence; without chunks, the one whose distances have a bias each.
    """

    takes_residual = True
    no_decay: ClassVar[tuple[str, ...]] = ("scale", "offset", *(f"average.{part}" for part in EMA_PARAMETERS))

    def __init__(
        self,
        d_model: Size,
        *,
        shared: Size = 32,
        expansion: Positive = 0.5,
        ema_size: Size = 16,
        attention: Literal["softmax", "laplace", "relu2"] = "softmax",
        chunk_size: Size | None = None,
        truncation: Size | None = None,
        bidirectional: bool = True,
        dropout: Probability = 0.0,
        attention_dropout: Probability = 0.0,
        rotary: bool = False,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if rotary and shared % 2:
            raise BadInput(f"shared must be an even number with rotary=True, got {shared}")
        self.d_model, self.shared = d_model, shared
        self.hidden = max(1, round(expansion * d_model))  # H
        self.attention, self.chunk_size = attention, chunk_size
        self.dropout, self.attention_dropout, self.rotary = dropout, attention_dropout, rotary
        self.bidirectional = bidirectional
        self.max_distances = chunk_size or max_length
        self.longest = None if rotary or chunk_size else max_length
        how: dict[str, Any] = {"bidirectional": bidirectional, "truncation": truncation}
        self.average = MovingAverage(d_model, ema_size, **how, **factory)
        self.value_proj = nn.Linear(d_model, self.hidden, **factory)
        self.in_proj = nn.Linear(d_model, 2 * d_model + self.hidden + shared, **factory)
        self.out_proj = nn.Linear(self.hidden, d_model, **factory)
        self.scale = nn.Parameter(torch.empty(2, shared, **factory))  # of queries and keys
        self.offset = nn.Parameter(torch.empty(2, shared, **factory))
        shape = (2, shared) if rotary else (2 * self.max_distances - 1,)
        self.position_bias = nn.Parameter(torch.empty(shape, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the official code: normal with σ = 0.02, and zeros."""
        self.average.reset_parameters()
        projections = (self.value_proj, self.in_proj, self.out_proj)
        for weight in (*(projection.weight for projection in projections), self.scale, self.position_bias):
            nn.init.normal_(weight, std=0.02)
        for bias in (*(projection.bias for projection in projections), self.offset):
            nn.init.zeros_(bias)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """u ⊙ (h - residual), of what a block adds to it, (B, L, D); None for x."""
        check_inputs(x, mask, self.d_model)
        residual = hide_padding(x if residual is None else residual, mask)
        x = hide_padding(x, mask)
        query, key, value, gates = self._project(x, self._drop(self.average(x)))
        return self._gate(residual, self._attend(query, key, value, mask), gates)

    def step(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, *, residual: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The state is the averages (B, D, N), and keys (B, n, Z) and values (B, n, H) of all tokens or the chunk's."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        if self.average.truncation is not None:
            raise BadInput("step needs truncation=None: a moving average that goes on does not forget its first inputs")
        residual = (x if residual is None else residual).unsqueeze(1)
        averaged, average = self.average.step(x, None if state is None else state[0])
        x = x.unsqueeze(1)
        query, key, value, gates = self._project(x, self._drop(averaged.unsqueeze(1)))
        if state is not None:
            key, value = grow(state[1], key), grow(state[2], value)
        length = key.shape[1]
        attended = self._weigh(query, key, value, self._biases(length)[None, :length], None)
        if length == self.chunk_size:
            key, value = key[:, :0], value[:, :0]
        return self._gate(residual, attended, gates).squeeze(1), (average, key, value)

    def kernel(self, length: int) -> Tensor:
        """That of the moving average, without ω."""
        return self.average.kernel(length)

    def _project(self, x: Tensor, averaged: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys (B, L, Z), values (B, L, H), and what the gates need, (B, L, 2D + H)."""
        shared, gates = self.in_proj(averaged).split([self.shared, 2 * self.d_model + self.hidden], dim=-1)
        shared = F.silu(shared)
        query, key = (shared * scale + offset for scale, offset in zip(self.scale, self.offset, strict=True))
        return query, key, F.silu(self.value_proj(x)), gates

    def _gate(self, residual: Tensor, attended: Tensor, gates: Tensor) -> Tensor:
        reset, update, hidden = gates.split([self.hidden, self.d_model, self.d_model], dim=-1)
        hidden = F.silu(hidden + self.out_proj(F.silu(reset) * attended))
        return torch.sigmoid(update) * (self._drop(hidden) - residual)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """(B, L, Z) twice and (B, L, H) -> (B, L, H): the whole, or all full chunks at once and then the last one."""
        length, size = query.shape[1], self.chunk_size
        if size is None or length <= size:
            return self._attend_all(query, key, value, mask=mask)
        full = length - length % size
        first = [part[:, :full].reshape(-1, size, part.shape[-1]) for part in (query, key, value)]
        rest = [part[:, full:] for part in (query, key, value)]
        attended = self._attend_all(*first, mask=None if mask is None else mask[:, :full].reshape(-1, size))
        attended = attended.reshape(query.shape[0], full, value.shape[-1])
        if full == length:
            return attended
        return torch.cat([attended, self._attend_all(*rest, mask=None if mask is None else mask[:, full:])], dim=1)

    def _attend_all(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        length = query.shape[1]
        if self.attention == "softmax" and length > DENSE_LENGTH and not (self.attention_dropout and self.training):
            arguments = (query, key, value, self._biases(length))
            return toeplitz_attention(*arguments, is_causal=not self.bidirectional, mask=mask).to(value.dtype)
        allowed = None if mask is None else mask.unsqueeze(1)  # (B, 1, L)
        if not self.bidirectional:
            past = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            allowed = past if allowed is None else allowed & past
        return self._weigh(query, key, value, toeplitz(self._biases(length)), allowed)

    def _biases(self, length: int) -> Tensor:
        """(2·length - 1,): of the keys from length - 1 steps back to as many steps later."""
        if self.rotary:
            first, second = self.position_bias
            return rotate(second.expand(max(0, 2 * length - 1), -1), start=1 - length) @ first
        if length > self.max_distances:
            raise BadInput(
                f"x must have at most {self.max_distances} tokens, those that have position biases, got {length}: "
                "build the layer with a larger max_length, or choose rotary=True"
            )
        return self.position_bias[self.max_distances - length : self.max_distances + length - 1]

    def _weigh(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, allowed: Tensor | None) -> Tensor:
        """Attention with a bias (Lq, Lk), where ``allowed``, (Lq, Lk) or (B, 1 or Lq, Lk), is True; None for all."""
        bias, dropout = bias.to(query.dtype), self.attention_dropout if self.training else 0.0
        if self.attention == "softmax":
            if allowed is not None:
                allowed = allowed | ~allowed.any(dim=-1, keepdim=True)  # padding that sees nothing sees padding
                bias = bias.masked_fill(~allowed, -math.inf)
            query, key, value, bias = (part.unsqueeze(-3) for part in (query, key, value, bias))
            return F.scaled_dot_product_attention(query, key, value, bias, dropout).squeeze(-3)
        count = key.shape[1] if allowed is None else allowed.sum(dim=-1, keepdim=True).clamp(min=1)
        scores = query @ key.transpose(1, 2) / count + bias
        if self.attention == "laplace":
            weights = 0.5 * (1 + torch.erf((scores - math.sqrt(0.5)) * math.sqrt(2 * math.pi)))
        else:
            weights = F.relu(scores).square()
        weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        return F.dropout(weights, dropout) @ value


def mega_reference(layer: MegaAttention, x: Tensor) -> Tensor:
    """x + layer(x) of one sequence (L, D), by the formula above, token by token."""
    averaged = F.silu(ema_reference(x, *layer.average.parts) + layer.average.omega * x)
    z, r, u, h = layer.in_proj(averaged).split([layer.shared, layer.hidden, layer.d_model, layer.d_model], dim=-1)
    query, key = (F.silu(z) * layer.scale[n] + layer.offset[n] for n in range(2))
    value, size, rows = F.silu(layer.value_proj(x)), layer.chunk_size or len(x), []
    for i in range(len(x)):
        start = i - i % size
        seen = torch.arange(start, min(start + size, len(x)) if layer.bidirectional else i + 1, device=x.device)
        scores, bias = key[seen] @ query[i], _bias_reference(layer, i, seen)
        if layer.attention == "softmax":
            weights = torch.softmax(scores / math.sqrt(layer.shared) + bias, dim=0)
        else:
            scores = scores / len(scores) + bias
            laplace = torch.special.ndtr((scores - math.sqrt(1 / 2)) / math.sqrt(1 / (4 * math.pi)))
            weights = laplace if layer.attention == "laplace" else torch.relu(scores) ** 2
        rows.append(weights @ value[seen])
    h = F.silu(h + layer.out_proj(F.silu(r) * torch.stack(rows)))
    u = torch.sigmoid(u)
    return u * h + (1 - u) * x


def _bias_reference(layer: MegaAttention, i: int, keys: Tensor) -> Tensor:
    """bias[j - i] of the keys j, (n,), that a query i sees."""
    if layer.rotary:
        a, b = layer.position_bias
        return rotate(b.expand(len(keys), -1), start=int(keys[0])) @ rotate(a[None], start=i)[0]
    return layer.position_bias[layer.max_distances - 1 + keys - i]
