"""Attention that can continue a sequence from a cache: whole, in chunks, or token by token."""

from abc import abstractmethod
from copy import copy
from typing import Unpack

import torch
from torch import Tensor

from longlens.errors import BadInput
from longlens.mixers.common import MultiHead, check_inputs, check_step
from longlens.ops.checks import AttentionOptions
from longlens.ops.smoothing import Side, smooth_values


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
            raise BadInput(f"x must have the cache's batch of {self.key.shape[0]}, got {len(key)}: start a new cache")
        if self.key is not None and self.key.dtype != key.dtype:
            raise BadInput(f"x must give keys of {self.key.dtype} as the cache's, got {key.dtype}: start a new cache")
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
    from it and writes ``attention``: how positions enter the scores. The arguments are those of ``LaSAttention``."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        window: int | None = None,
        side: Side = "past",
        chunk_size: int | None = None,
        bidirectional: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, bias=bias, dropout=dropout, rotary=rotary, device=device, dtype=dtype)
        self.window = window
        self.side: Side = side
        self.chunk_size = chunk_size
        self.bidirectional = bidirectional
        self.reset_parameters()

    @abstractmethod
    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """(B, H, Lq, d) and two of (B, H, Lk, d) -> (B, H, Lq, d), where the queries are the last Lq positions."""

    @property
    def causal(self) -> bool:
        """Whether no output depends on later inputs: a centered window looks ahead."""
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
            raise BadInput("cache needs a causal layer: bidirectional=False and side='past'")
        if mask is not None:
            raise BadInput("cache does not take a mask: decode sequences of equal length together")
        return self._continue(x, cache)

    def step(self, x: Tensor, state: LaSCache | None = None) -> tuple[Tensor, LaSCache]:
        """One token of each sequence, (B, D), and what came before, None at the start -> (B, D) and the next cache. The
        one that was given stays as it is."""
        check_step(x, self.d_model, causal=self.causal)
        state = LaSCache() if state is None else copy(state)  # its tensors never change
        return self(x.unsqueeze(1), cache=state).squeeze(1), state

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return self.attention(query, key, value, **self.attention_options(mask))

    def _continue(self, x: Tensor, cache: LaSCache) -> Tensor:
        """Attend from new tokens to the cached ones and to each other; a new chunk forgets what came before."""
        outputs = []
        while x.shape[1] > 0 or not outputs:
            room = x.shape[1] if self.chunk_size is None else self.chunk_size - len(cache)
            query, key, value = self._project(x[:, :room], start=cache.seen)
            key, value = cache.append(key, value, self.window)
            outputs.append(self._merge(self.attention(query, key, value, dropout_p=self.dropout_p)))
            if self.chunk_size is not None and len(cache) == self.chunk_size:
                cache.clear()
            x = x[:, room:]
        return torch.cat(outputs, dim=1)

    def attention_options(self, mask: Tensor | None) -> AttentionOptions:
        return {
            "smoothing": self.window,
            "side": self.side,
            "chunk_size": self.chunk_size,
            "is_causal": not self.bidirectional,
            "attn_mask": None if mask is None else mask[:, None, None, :],
            "dropout_p": self.dropout_p,
        }
