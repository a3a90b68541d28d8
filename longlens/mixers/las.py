"""The Local and Smooth (LaS) attention layer (Zimerman & Wolf, ICML 2024), and the variants that the paper compares.

    y = AP(softmax(mask(exp(-a·D) ⊙ QKᵀ/√d)))·V,   D[i, j] = i - j, one rate a for each head, AP a moving average

Without decay it is S-attention, without smoothing L-attention. ``longlens.ops.reference`` is the formula, written out.
"""

from typing import Literal, Unpack

import torch
from torch import Tensor

from longlens.errors import BadInput
from longlens.mixers.cache import LaSCache
from longlens.mixers.common import CachedAttention, check_heads
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import AttentionOptions
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.options import NonNegative, Odd, Positive, Probability, Size

PART = 512  # tokens that go together through a cache whose far past is folded


@register(
    "l-attention",
    "LaS without smoothing",
    Traits(decays=True, stable=True, cost="L²", state="2·L·D"),
    fixed={"window": None, "side": "past", "bidirectional": False},
)
@register(
    "s-attention",
    "LaS without decay",
    Traits(regularized=True, stable=True, cost="L²", state="(2·L + window - 1)·D"),
    fixed={"max_rate": 0.0, "schedule": "exp-uniform", "bidirectional": False, "tolerance": None},
    needs=("window",),
)
@register(
    "las",
    "local and smooth attention",
    Traits(decays=True, regularized=True, stable=True, cost="L²", state="(2·L + window - 1)·D"),
    fixed={"bidirectional": False},
    needs=("window",),
)
@register(
    "las-chunk",
    "LaS in chunks: linear in L",
    Traits(decays=True, regularized=True, stable=True, cost="L", state="(2·chunk_size + window - 1)·D"),
    fixed={"bidirectional": False},
    needs=("window", "chunk_size"),
    chunk_size=128,
)
@register(
    "las-bidirectional",
    "LaS to both sides",
    Traits(decays=True, regularized=True, stable=True, cost="L²"),
    fixed={"bidirectional": True, "tolerance": None},
    needs=("window",),
)
class LaSAttention(CachedAttention):
    """Multi-head self-attention whose scores decay with distance and whose weights are smoothed. (B, L, D) ->
    (B, L, D), with the parameters of attention. With ``max_rate=0`` and ``window=None`` it *is* plain causal attention.
    It is called as ``layer(x, mask=tokens)``; ``replace_attention`` serves models with ``nn.MultiheadAttention``.

    Args:
        embed_dim: Width D, a multiple of the number of heads.
        num_heads: Number of heads H. The first head never decays, unless the schedule is positive.
        max_rate: Decay rate B of the last head: a score at distance n is multiplied by exp(-B·n); 0 turns decay off.
        schedule: Spacing of the decay rates a: exp(-a) runs evenly from 1 to exp(-B) (exp-uniform), the same without
            the 1, so that all heads decay (positive), or is B·c / (H - 1) in head c, as the paper prints it (literal).
        tolerance: Largest error, relative to the largest smoothed value, of attention in linear time, for heads where
            it is faster than the exact form, and of decoding with a cache that does not grow; exact by default.
    """

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 8,
        *,
        max_rate: NonNegative = 1e-3,
        window: Odd | None = 5,
        side: Literal["past", "centered"] = "past",
        chunk_size: Size | None = None,
        bidirectional: bool = False,
        bias: bool = True,
        schedule: Literal["exp-uniform", "positive", "literal"] = "exp-uniform",
        dropout: Probability = 0.0,
        rotary: bool = False,
        tolerance: Positive | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        check_heads(embed_dim, num_heads, "num_heads")
        if schedule == "literal" and not 0 < max_rate < 1:
            raise BadInput(f"max_rate must be a number between 0 and 1 for schedule=literal, got {max_rate}")
        if tolerance is not None and (bidirectional or dropout > 0):
            wanted = "bidirectional=False" if bidirectional else "dropout=0"
            raise BadInput(f"tolerance must be None unless {wanted}, got {tolerance}: the linear form has no other")
        super().__init__(embed_dim, num_heads, bias=bias, dropout=dropout, rotary=rotary, **factory)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.max_rate, self.schedule = max_rate, schedule
        self.window, self.side = window, side
        self.chunk_size, self.bidirectional = chunk_size, bidirectional
        self.tolerance, self.part = tolerance, None if tolerance is None else PART
        self.reset_parameters()
        # Plain numbers, not a buffer: nothing to broadcast, to cast to bfloat16, or to lose on the meta device.
        rates = decay_rates(num_heads, max_rate, schedule, device="cpu", dtype=torch.float32)
        self.rates: tuple[float, ...] = tuple(rates.tolist())

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        linear = self.tolerance is not None and query.shape[2] == key.shape[2]  # not after the cache of a chunk
        how = {"backend": "linear", "tolerance": self.tolerance} if linear else {}
        return las_attention(query, key, value, **(options | {"decay": self.rates}), **how)

    def proceed(self, query: Tensor, key: Tensor, value: Tensor, cache: LaSCache) -> Tensor:
        if self.tolerance is None or self.chunk_size is not None:  # a chunk is bounded already
            return super().proceed(query, key, value, cache)
        return cache.attend(query, key, value, self.window, self.rates, self.tolerance)
