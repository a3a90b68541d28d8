"""The Local and Smooth (LaS) attention layer (Zimerman & Wolf, ICML 2024), and the variants that the paper compares.

    y = AP(softmax(mask(exp(-a·D) ⊙ QKᵀ/√d)))·V,   D[i, j] = i - j, one rate a for each head, AP a moving average

Without decay it is S-attention, without smoothing L-attention, without both the attention of a Transformer.
"""

from abc import abstractmethod
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import MultiHead, check_heads, check_inputs, check_step
from longlens.ops.checks import AttentionOptions, check_chunk_size, check_share
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.ops.smoothing import check_side, smooth_values


class LaSCache:
    """What a layer remembers between the steps of decoding: keys and smoothed values of all tokens so far (of the
    current chunk, for LaS-chunk), and the last few values as they were, which the next tokens' smoothing needs.

    Start with an empty one for each layer and sequence: ``layer(x, cache=cache)``.
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None  # (B, H, n, d)
        self.value: Tensor | None = None  # (B, H, n, d), smoothed
        self.recent: Tensor | None = None  # (B, H, <= P - 1, d), not smoothed
        self.seen = 0  # tokens so far, those of earlier chunks included

    def __len__(self) -> int:
        return 0 if self.key is None else self.key.shape[-2]

    def append(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; return those of all tokens."""
        if self.key is not None and self.key.shape[0] != key.shape[0]:
            raise ValueError(
                f"x has a batch of {key.shape[0]}, the cache one of {self.key.shape[0]}: start a new cache"
            )
        if self.key is not None and self.key.dtype != key.dtype:
            raise ValueError(f"x gives keys of {key.dtype}, the cache holds {self.key.dtype}: start a new cache")
        if window is not None:
            values = _extend(self.recent, value)
            self.recent = values[..., max(values.shape[-2] - window + 1, 0) :, :].clone()
            value = smooth_values(values, window)[..., values.shape[-2] - value.shape[-2] :, :]
        self.key, self.value = _extend(self.key, key), _extend(self.value, value)
        self.seen += key.shape[-2]
        return self.key, self.value

    def clear(self) -> None:
        """Forget the tokens of a chunk, though not how many there were."""
        self.key = self.value = self.recent = None


def _extend(past: Tensor | None, new: Tensor) -> Tensor:
    return new.contiguous() if past is None else torch.cat([past, new], dim=-2)


class CachedAttention(MultiHead):
    """Attention of smoothed values, whole or in chunks, that can also continue a sequence from a cache. A layer derives
    from it and writes ``attention``: how positions enter the scores.

    Args:
        d_model: D, a multiple of ``heads``.
        heads: H.
        window: odd window P of the moving average over the weights. None turns smoothing off.
        side: ``"past"``, or ``"centered"``, which looks (P - 1) / 2 steps ahead: for classification only.
        chunk_size: attend within independent blocks of this length.
        bidirectional: attend to both sides.
        dropout: of the attention weights, in training.
        bias, rotary: see ``MultiHead``.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        window: int | None = None,
        side: str = "past",
        chunk_size: int | None = None,
        bidirectional: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        is_window = isinstance(window, int) and not isinstance(window, bool) and window > 0 and window % 2 == 1
        if window is not None and not is_window:
            raise ValueError(f"window must be an odd number of at least 1, or None, got {window!r}")
        check_side(side)
        check_chunk_size(chunk_size)
        check_share("dropout", dropout)
        super().__init__(d_model, heads, bias=bias, rotary=rotary, device=device, dtype=dtype)
        self.window = window
        self.side = side
        self.chunk_size = chunk_size
        self.bidirectional = bidirectional
        self.dropout = dropout
        self.reset_parameters()

    @abstractmethod
    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """(B, H, Lq, d) and two of (B, H, Lk, d) -> (B, H, Lq, d), where the queries are the last Lq positions."""

    @property
    def causal(self) -> bool:
        return not self.bidirectional and (self.side == "past" or self.window in (None, 1))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, cache: LaSCache | None = None) -> Tensor:
        """Attend over ``x`` (B, L, D).

        mask: (B, L) boolean, True for tokens, False for padding, which no token then attends to.
        cache: what came before ``x``; the tokens of ``x`` are added to it. Feeding a sequence in any number of parts
            gives the same as feeding it whole.
        """
        if cache is None:
            return super().forward(x, mask=mask)
        check_inputs(x, mask, self.d_model)
        if not isinstance(cache, LaSCache):
            raise TypeError(f"cache must be a LaSCache, got a {type(cache).__name__}")
        if not self.causal:
            raise ValueError("cache needs a causal layer: bidirectional=False and side='past'")
        if mask is not None:
            raise ValueError("cache does not take a mask: decode sequences of equal length together")
        return self._continue(x, cache)

    def step(self, x: Tensor, state: LaSCache | None = None) -> tuple[Tensor, LaSCache]:
        """One token of each sequence, (B, D), and what came before, None at the start -> (B, D) and the next cache. The
        one that was given stays as it is."""
        check_step(x, self.d_model, causal=self.causal)
        state = LaSCache() if state is None else copy(state)  # its tensors never change
        return self(x.unsqueeze(1), cache=state).squeeze(1), state

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return self.attention(query, key, value, **self._options(mask))

    def _continue(self, x: Tensor, cache: LaSCache) -> Tensor:
        """Attend from new tokens to the cached ones and to each other; a new chunk forgets what came before."""
        outputs = []
        while x.shape[1] > 0 or not outputs:
            room = x.shape[1] if self.chunk_size is None else self.chunk_size - len(cache)
            query, key, value = self._project(x[:, :room], start=cache.seen)
            key, value = cache.append(key, value, self.window)
            outputs.append(self._merge(self.attention(query, key, value, dropout_p=self._dropout_p())))
            if self.chunk_size is not None and len(cache) == self.chunk_size:
                cache.clear()
            x = x[:, room:]
        return torch.cat(outputs, dim=1)

    def _options(self, mask: Tensor | None) -> AttentionOptions:
        return {
            "smoothing": self.window,
            "side": self.side,
            "chunk_size": self.chunk_size,
            "is_causal": not self.bidirectional,
            "attn_mask": None if mask is None else mask[:, None, None, :],
            "dropout_p": self._dropout_p(),
        }

    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0


class LaSAttention(CachedAttention):
    """Multi-head self-attention whose scores decay with distance and whose weights are smoothed.

    (B, L, D) -> (B, L, D). It has the parameters of plain attention and no others: the decay rates follow from
    ``num_heads`` and ``max_rate``. With ``max_rate=0`` and ``window=None`` it *is* plain causal attention.

    Args:
        embed_dim: D, a multiple of ``num_heads``.
        num_heads: H. The first head never decays.
        max_rate: the rate B of the last head: a score at distance n is multiplied by exp(-B·n). 0 turns decay off.
        window: odd window P of the moving average over the weights. None turns smoothing off.
        side: ``"past"``, or ``"centered"``, which looks (P - 1) / 2 steps ahead: for classification only.
        chunk_size: attend within independent blocks of this length (LaS-chunk: 128).
        bidirectional: attend to both sides.
        bias: of the two projections.
        schedule: the spacing of the rates, see ``decay_rates``.
        dropout: of the attention weights, in training.
        rotary: turn queries and keys by their positions (Su et al. 2021).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_rate: float = 1e-3,
        window: int | None = 5,
        side: str = "past",
        chunk_size: int | None = None,
        bidirectional: bool = False,
        bias: bool = True,
        schedule: str = "exp-uniform",
        dropout: float = 0.0,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rates = decay_rates(num_heads, max_rate, schedule, device="cpu", dtype=torch.float32)
        if not isinstance(embed_dim, int) or embed_dim < 1 or embed_dim % num_heads != 0:
            raise ValueError(f"embed_dim must be a multiple of num_heads = {num_heads}, got {embed_dim!r}")
        super().__init__(
            embed_dim, num_heads, window=window, side=side, chunk_size=chunk_size, bidirectional=bidirectional,
            bias=bias, dropout=dropout, rotary=rotary, device=device, dtype=dtype,
        )  # fmt: skip
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.max_rate = max_rate
        self.schedule = schedule
        # Plain numbers, not a buffer: nothing to broadcast, to cast to bfloat16, or to lose on the meta device.
        self.rates: tuple[float, ...] = tuple(rates.tolist())

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        return las_attention(query, key, value, **(options | {"decay": self.rates}))

    def attention_weights(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The weights (B, H, L, L) that multiply the values, by the paper's formula: for pictures, not for speed."""
        check_inputs(x, mask, self.d_model)
        options: AttentionOptions = self._options(mask) | {"decay": self.rates, "dropout_p": 0.0}
        _, weights = las_attention_reference(*self._project(x), return_weights=True, **options)
        return weights

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, max_rate={self.max_rate}, window={self.window}, "
            f"side={self.side!r}, chunk_size={self.chunk_size}, bidirectional={self.bidirectional}, "
            f"schedule={self.schedule!r}, dropout={self.dropout}, rotary={self.rotary}"
        )


@dataclass(frozen=True, kw_only=True)
class Heads(Config):
    """Attention of several heads.

    Args:
        heads: number of heads.
        bias: of the two projections.
        attention_dropout: of the attention weights, in training.
        chunk_size: length of independent chunks; by default the whole sequence is one.
    """

    heads: int = 8
    bias: bool = True
    attention_dropout: float = 0.0
    chunk_size: int | None = None

    def layer_options(self, d_model: int) -> dict[str, Any]:
        """By the names that a layer of torch has. What is not possible is said by the names of the options."""
        check_heads(d_model, self.heads)
        check_share("attention_dropout", self.attention_dropout)
        options = asdict(self)
        return options | {"dropout": options.pop("attention_dropout")}


@dataclass(frozen=True, kw_only=True)
class Attention(Heads):
    """Attention of several heads.

    Args:
        rotary: turn queries and keys by their positions.
    """

    rotary: bool = False

    bidirectional: ClassVar[bool] = False

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> LaSAttention:
        options = {"max_rate": 0.0, "window": None}  # what a variant has no option for is turned off
        options |= self.layer_options(d_model) | {"bidirectional": self.bidirectional, "device": device, "dtype": dtype}
        return LaSAttention(d_model, options.pop("heads"), **options)


@dataclass(frozen=True, kw_only=True)
class Local(Attention):
    """Attention whose scores decay with distance.

    Args:
        max_rate: the decay rate B of the last head.
        schedule: the spacing of the rates.
    """

    max_rate: float = 1e-3
    schedule: Literal["exp-uniform", "literal"] = "exp-uniform"


@dataclass(frozen=True, kw_only=True)
class Smooth(Heads):
    """Attention whose weights are smoothed along the sequence.

    Args:
        window: odd length P of the moving average.
        side: past, or centered as in the paper, which looks (P - 1) / 2 steps ahead.
    """

    window: int = 5
    side: Literal["past", "centered"] = "past"

    def looks_ahead(self) -> str | None:
        if self.side == "past" or self.window <= 1:
            return None
        ahead = (self.window - 1) // 2
        return f"smoothing with side='centered' and window={self.window} looks {ahead} ahead: choose side='past'"


@register("transformer")
class Transformer(Attention):
    summary: ClassVar[str] = "plain causal attention"
    traits: ClassVar[Traits] = Traits(stable=True, cost="L²", state="2·L·D")


@register("l-attention")
class LAttention(Local):
    summary: ClassVar[str] = "LaS without smoothing"
    traits: ClassVar[Traits] = Traits(decays=True, stable=True, cost="L²", state="2·L·D")


@register("s-attention")
@dataclass(frozen=True, kw_only=True)
class SAttention(Smooth, Attention):
    summary: ClassVar[str] = "LaS without decay"
    traits: ClassVar[Traits] = Traits(regularized=True, stable=True, cost="L²", state="(2·L + window - 1)·D")


@register("las")
@dataclass(frozen=True, kw_only=True)
class LaS(Smooth, Local):
    summary: ClassVar[str] = "local and smooth attention"
    traits: ClassVar[Traits] = Traits(
        decays=True, regularized=True, stable=True, cost="L²", state="(2·L + window - 1)·D"
    )


@register("las-chunk")
@dataclass(frozen=True, kw_only=True)
class LaSChunk(LaS):
    """Local and smooth attention in independent chunks.

    Args:
        chunk_size: their length.
    """

    chunk_size: int = 128

    summary: ClassVar[str] = "LaS in chunks: linear in L"
    traits: ClassVar[Traits] = Traits(
        decays=True, regularized=True, stable=True, cost="L", state="(2·chunk_size + window - 1)·D"
    )


@register("las-bidirectional")
class LaSBidirectional(LaS):
    summary: ClassVar[str] = "LaS to both sides"
    traits: ClassVar[Traits] = Traits(decays=True, regularized=True, stable=True, cost="L²")
    bidirectional: ClassVar[bool] = True

    def looks_ahead(self) -> str | None:
        return "it attends to both sides"
