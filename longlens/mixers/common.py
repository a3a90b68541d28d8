"""What several layers share: the check of their inputs, the projections of attention, whole or continued from a cache,
and the frame around a long convolution."""

import math
from abc import abstractmethod
from copy import copy
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.cache import LaSCache
from longlens.mixers.registry import Factory
from longlens.ops.checks import AttentionOptions, working_dtype
from longlens.ops.last import attend_last
from longlens.ops.long_conv import long_conv
from longlens.ops.rotary import rotate
from longlens.ops.smoothing import Side


def check_inputs(x: Tensor, mask: Tensor | None, d_model: int) -> None:
    """Refuse what is not (B, L, D) with a boolean mask (B, L) or None."""
    _check_numbers(x)
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a Tensor, got a {type(mask).__name__}")
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise BadInput(f"x must have the shape (batch, length, {d_model}), got {tuple(x.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
        raise BadInput(
            f"mask must be boolean with the shape (batch, length) = {tuple(x.shape[:2])}, True for tokens, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )


def check_step(x: Tensor, d_model: int, *, causal: bool) -> None:
    """Refuse what is not one token of each sequence, (B, D)."""
    check_causal("step", causal)
    _check_numbers(x)
    if x.ndim != 2 or x.shape[-1] != d_model:
        raise BadInput(f"x must have the shape (batch, {d_model}) in a step, got {tuple(x.shape)}")


def check_causal(what: str, causal: bool) -> None:
    if not causal:
        raise BadInput(f"{what} needs a causal layer: this one sees both sides")


def _check_numbers(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got a {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {x.dtype}")


def check_heads(d_model: int, heads: int, name: str = "heads") -> None:
    if heads < 1 or d_model % heads:  # a layer of one's own may say int where it means Size
        raise BadInput(f"{name} must divide the width of the layer, got {name}={heads} and a width of {d_model}")


def check_order(**limits: float) -> None:
    (low, smaller), (high, larger) = limits.items()
    if smaller > larger:
        raise BadInput(f"{low} must be at most {high}, got {low}={smaller} and {high}={larger}")


def log_uniform_(log_dt: Tensor, dt_min: float, dt_max: float) -> Tensor:
    """Fill with log Δ, for step sizes Δ between the two, uniform on a logarithmic scale."""
    check_order(dt_min=dt_min, dt_max=dt_max)
    return nn.init.uniform_(log_dt, math.log(dt_min), math.log(dt_max))


def hide_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, L, D) with 0 in the place of padding."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, D) -> (B, H, L, d)"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, L, d) -> (B, L, D)"""
    return x.transpose(1, 2).flatten(2)


def has_kernel(layer: nn.Module) -> bool:
    """Whether a layer is, or contains, a convolution that can be looked at."""
    return callable(getattr(layer, "kernel", None))


def has_attention(layer: nn.Module) -> bool:
    """Whether a layer has weights that can be looked at."""
    return callable(getattr(layer, "attention_weights", None))


class Dropout(nn.Dropout):
    """(B, L, D) -> (B, L, D), as torch's; if it is tied, all positions of a sequence lose the same channels."""

    def __init__(self, p: float, tied: bool = False):
        super().__init__(p)
        self.tied = tied

    def forward(self, input: Tensor) -> Tensor:
        if self.tied and self.training and self.p > 0:
            return input * super().forward(torch.ones_like(input[:, :1]))
        return super().forward(input)


class MultiHead(nn.Module):
    """Queries, keys and values of several heads, and a projection of what they attend to. A layer derives from it and
    writes ``attend``."""

    parts = 3  # of in_proj: queries, keys and values

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_heads(d_model, heads)
        if rotary and d_model // heads % 2:
            raise BadInput(f"rotary positions need heads of even width, got {d_model} / {heads}")
        self.d_model, self.heads = d_model, heads
        self.dropout, self.rotary = dropout, rotary
        self.in_proj = nn.Linear(d_model, self.parts * d_model, bias=bias, **factory)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, **factory)

    @property
    def dropout_p(self) -> float:
        """Dropout of the attention weights, in training alone."""
        return self.dropout if self.training else 0.0

    def reset_parameters(self) -> None:
        """As ``nn.MultiheadAttention``: Xavier-uniform projections of the input, biases 0. A layer calls it at the end
        of its ``__init__``, and extends it with what else it has."""
        nn.init.xavier_uniform_(self.in_proj.weight)
        self.out_proj.reset_parameters()
        for projection in (self.in_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)  # what is not a number there would still be one after a weight of 0
        return self._merge(self.attend(*self._project(x), mask))

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Three of (B, H, L, d) and a mask (B, L) or None -> (B, H, L, d)."""

    @torch.no_grad()
    def attention_weights(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The weights (B, H, L, L) that multiply the values, for pictures, not for speed. What a head gives is linear
        in its values, so a 1 in the place of a value shows the weights of its position."""
        check_inputs(x, mask, self.d_model)
        layer = copy(self)
        layer.training = False  # no dropout
        query, key, value = self._project(hide_padding(x, mask))
        length, width = value.shape[-2:]
        columns = []
        for first in range(0, max(length, 1), width):  # as many positions at a time as a value has numbers
            ones = torch.eye(length, width, device=value.device, dtype=value.dtype).roll(first, dims=0)
            ones[:first] = 0.0  # what has gone around the end
            columns.append(layer.attend(query, key, ones.expand_as(value), mask))
        return torch.cat(columns, dim=-1)[..., :length]

    def _project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, D) -> three of (B, H, L, d)"""
        query, key, value = self._split(x)
        if self.rotary:
            query, key = rotate(query, start), rotate(key, start)
        return query, key, value

    def _split(self, x: Tensor) -> list[Tensor]:
        """(B, L, D) -> each projection, (B, H, L, d)"""
        return [split_heads(part, self.heads) for part in self.in_proj(x).chunk(self.parts, dim=-1)]

    def _merge(self, attended: Tensor) -> Tensor:
        return self.out_proj(merge_heads(attended))


class CachedAttention(MultiHead):
    """Attention of smoothed values, whole or in chunks, that can also continue a sequence from a cache. A layer derives
    from it, sets these options, and writes ``attention``: how positions enter the scores."""

    rates: tuple[float, ...] = ()  # of the decay, one for each head
    slopes: tuple[float, ...] = ()  # of linear biases
    window: int | None
    side: Side
    chunk_size: int | None
    bidirectional = False
    part: int | None = None  # tokens that go together through a cache; None: all

    @abstractmethod
    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """(B, H, Lq, d) and two of (B, H, Lk, d) -> (B, H, Lq, d), where the queries are the last Lq positions."""

    @property
    def causal(self) -> bool:
        """Whether no output depends on later inputs: a centered window looks ahead."""
        return not self.bidirectional and (self.side == "past" or self.window in (None, 1))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, cache: LaSCache | None = None) -> Tensor:
        """As other layers, or after what is in a cache: in any number of parts, a sequence gives the same as whole. A
        new chunk forgets what came before.

        Args:
            x: Tokens, (B, L, D), which attend to each other: there is no other query, key or value.
            mask: (B, L), True for tokens, False for padding, which no token then sees; None if all are tokens.
            cache: The tokens before those of ``x``, which are added to it; None for a whole sequence.
        """
        if cache is None:
            return super().forward(x, mask=mask)
        check_inputs(x, mask, self.d_model)
        if not isinstance(cache, LaSCache):
            raise TypeError(f"cache must be a LaSCache, got a {type(cache).__name__}")
        if not self.causal:
            raise BadInput("cache needs a causal layer: bidirectional=False and side='past'")
        if mask is not None:
            raise BadInput("cache does not take a mask: decode sequences of equal length together")
        outputs = []
        while x.shape[1] > 0 or not outputs:
            room = self.part if self.chunk_size is None else self.chunk_size - len(cache)
            query, key, value = self._project(x[:, :room], start=cache.seen)
            outputs.append(self._merge(self.proceed(query, key, value, cache)))
            if self.chunk_size is not None and len(cache) == self.chunk_size:
                cache.clear()
            x = x[:, room:] if room is not None else x[:, :0]
        return torch.cat(outputs, dim=1)

    def proceed(self, query: Tensor, key: Tensor, value: Tensor, cache: LaSCache) -> Tensor:
        """Attention of tokens that follow those of a cache, (B, H, n, d)."""
        key, value = cache.append(key, value, self.window)
        if query.shape[-2] != 1 or self.dropout_p > 0:
            return self.attention(query, key, value, dropout_p=self.dropout_p)
        like = {"dtype": working_dtype(query.dtype), "device": query.device}
        rates, slopes = (torch.tensor(given, **like) if any(given) else None for given in (self.rates, self.slopes))
        output, _ = attend_last(query, key, value, query.shape[-1] ** -0.5, rates=rates, slopes=slopes)
        return output.to(query.dtype)

    def step(self, x: Tensor, state: LaSCache | None = None) -> tuple[Tensor, LaSCache]:
        """The state is a cache, and the one that was given stays as it is."""
        check_step(x, self.d_model, causal=self.causal)
        state = LaSCache() if state is None else copy(state)  # its tensors never change
        return self(x.unsqueeze(1), cache=state).squeeze(1), state

    def prefill(self, x: Tensor) -> tuple[Tensor, LaSCache]:
        cache = LaSCache()
        return self(x, cache=cache), cache

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return self.attention(
            query,
            key,
            value,
            smoothing=self.window,
            side=self.side,
            chunk_size=self.chunk_size,
            is_causal=not self.bidirectional,
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout_p,
        )


class Convolution(nn.Module):
    """y = out(drop(gelu(k * x + skip ⊙ x))), the frame that S4 and its successors have around their kernels, with
    out(u) = a ⊙ σ(b) for the two halves a, b of a projection of u, or the projection itself (``output="linear"``). For
    both sides there is a second kernel for later inputs. Of C kernels for each channel (``channels``), each has a skip
    of its own, and ``out`` projects what all of them give. The dropout is tied over time, as in all publications. A
    layer derives from it and writes ``kernel``."""

    def __init__(
        self,
        d_model: int,
        *,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        channels: int = 1,
        dropout: float = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.d_model, self.channels = d_model, channels
        self.bidirectional, self.output = bidirectional, output
        self.skip = nn.Parameter(torch.empty(channels * d_model, **factory))
        self.dropout = Dropout(dropout, tied=True)
        self.out_proj = nn.Linear(channels * d_model, d_model * (2 if output == "glu" else 1), **factory)

    @property
    def kernels(self) -> int:
        """How many kernels there are: C·D, or 2·C·D for both sides."""
        return self.channels * self.d_model * (2 if self.bidirectional else 1)

    def reset_parameters(self) -> None:
        """A layer calls it at the end of its ``__init__``, and extends it with the parameters of its kernel."""
        nn.init.normal_(self.skip)
        self.out_proj.reset_parameters()

    @abstractmethod
    def kernel(self, length: int) -> Tensor:
        """(C·D, length): the weights of the inputs 0, 1, … steps back; for both sides (2·C·D, length), of which the
        last half are the weights of the inputs 1, 2, … steps later."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        x = x.repeat(1, 1, self.channels) if self.channels > 1 else x
        kernels = self.kernel(x.shape[1]).chunk(2 if self.bidirectional else 1)
        return self._out(long_conv(x, *kernels) + self.skip * x)

    def _out(self, y: Tensor) -> Tensor:
        y = self.out_proj(self.dropout(F.gelu(y)))
        return F.glu(y, dim=-1) if self.output == "glu" else y


class StateSpace(Convolution):
    """A convolution whose kernel is that of a linear recurrence, so that it can also run step by step. A layer derives
    from it and writes ``kernel``, ``constants`` and ``recur``."""

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """(B, D) and what came before, None at the start -> (B, D) and the next state: the constants, which the first
        step computes for all sequences and steps, and the past of each sequence."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        constants, past = (self.constants(), None) if state is None else state
        y, past = self.recur(x, past, *constants)
        return self._out((y + self.skip * x).unsqueeze(1)).squeeze(1), (constants, past)

    @abstractmethod
    def constants(self) -> tuple[Any, ...]:
        """What steps need of the parameters."""

    @abstractmethod
    def recur(self, x: Tensor, past: Any, *constants: Any) -> tuple[Tensor, Any]:
        """A step of the kernel alone: (B, D) and the past, None at the start -> (B, D) and the next past."""


def sinusoids(length: int, width: int, device: torch.device | None = None) -> Tensor:
    """(length, width): sines of geometrically falling frequencies, then their cosines (Vaswani et al. 2017)."""
    half = (width + 1) // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / half))
    angles = torch.arange(length, device=device)[:, None] * rates  # (L, half)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
