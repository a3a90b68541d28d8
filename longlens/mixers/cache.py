"""What attention remembers between the steps of decoding."""

import math
from itertools import chain
from typing import TYPE_CHECKING
from warnings import warn

import torch
from torch import Tensor

from longlens.errors import BadInput
from longlens.ops.checks import at_least_float32
from longlens.ops.grow import grow
from longlens.ops.smoothing import smooth_values

if TYPE_CHECKING:
    from longlens.ops.decoding import Past

Rates = tuple[float, ...]


class LaSCache:
    """What a layer remembers between the steps of decoding, ``layer(x, cache=cache)``: keys and smoothed values of all
    tokens so far (of the current chunk, for LaS-chunk), and the last few values as they were, which the next tokens'
    smoothing needs. Start with an empty one for each layer and sequence.

    For a layer with a ``tolerance``, heads that decay keep only near keys and values, and states of fixed size for
    those before them. ``bound`` is then the largest error that any output so far may have, relative to the largest
    smoothed value: it is computed for each query that comes, and one that takes it beyond the tolerance is warned of.
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None  # (B, H, n, d)
        self.value: Tensor | None = None  # (B, H, n, d), smoothed
        self.recent: Tensor | None = None  # (B, H, <= P - 1, d), not smoothed
        self.pasts: tuple[Past, ...] = ()  # in the place of key and value: one for heads that decay about as fast
        self.seen = 0  # tokens so far, those of earlier chunks included
        self.bound = 0.0

    def __len__(self) -> int:
        return self.seen if self.pasts else 0 if self.key is None else self.key.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that it holds."""
        held = [self.key, self.value, self.recent, *chain.from_iterable(self.pasts)]
        return sum(x.nbytes for x in held if isinstance(x, Tensor))

    def append(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; return those of all tokens."""
        value = self._smooth(key, value, window, self.key)
        self.key, self.value = _extend(self.key, key), _extend(self.value, value)
        self.seen += key.shape[-2]
        return self.key, self.value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, rates: Rates, tolerance: float
    ) -> Tensor:
        """Add the keys and values of new tokens, (B, H, n, d), and attend to all of them, within a tolerance, by heads
        of these rates; then fold what has become far."""
        from longlens.ops.decoding import MARGIN, Past  # few need it

        value = self._smooth(key, value, window, self.pasts[0].key if self.pasts else None)
        scale, groups, output = key.shape[-1] ** -0.5, _alike(rates), torch.empty_like(value)
        pasts = list(self.pasts)
        for index, heads in enumerate(groups):
            q, k, v = (x[:, heads] for x in (query, key, value))
            if not self.pasts:
                pasts.append(Past.empty([rates[head] for head in heads], k, v))
            output[:, heads], past, bound = pasts[index].append(k, v).attend(q, scale)
            pasts[index] = past.fold(scale, tolerance)
            if bound > max(tolerance, self.bound):
                warn(
                    f"the output may be off by {bound:.1g} of the largest value, above tolerance={tolerance:g}: a "
                    f"query is more than {MARGIN} times as long as those before it",
                    stacklevel=4,
                )
            self.bound = max(self.bound, bound)
        self.pasts = tuple(pasts)
        self.seen += key.shape[-2]
        return output

    def _smooth(self, key: Tensor, value: Tensor, window: int | None, past: Tensor | None) -> Tensor:
        """The smoothed values of new tokens."""
        if past is not None and past.shape[0] != key.shape[0]:
            raise BadInput(f"x must have the cache's batch of {past.shape[0]}, got {len(key)}: start a new cache")
        if past is not None and past.dtype != key.dtype:
            raise BadInput(f"x must give keys of {past.dtype} as the cache's, got {key.dtype}: start a new cache")
        if window is None:
            return value
        values = value if self.recent is None else torch.cat([self.recent, value], dim=-2)
        self.recent = values[..., max(values.shape[-2] - window + 1, 0) :, :].clone()
        if value.shape[-2] == 1:  # whose window these are
            return (at_least_float32(values).sum(-2, keepdim=True) / window).to(value.dtype)
        return smooth_values(values, window)[..., values.shape[-2] - value.shape[-2] :, :]

    def clear(self) -> None:
        """Forget the tokens of a chunk, though not how many there were."""
        self.key = self.value = self.recent = None


def _alike(rates: Rates) -> list[list[int]]:
    """Heads whose rates lie between the same powers of two: their windows are about as long, and they share one."""
    groups: dict[int, list[int]] = {}
    for head, rate in enumerate(rates):
        groups.setdefault(math.frexp(rate)[1] if rate > 0 else -9999, []).append(head)
    return list(groups.values())


def _extend(past: Tensor | None, new: Tensor) -> Tensor:
    return new.contiguous() if past is None else grow(past, new)
