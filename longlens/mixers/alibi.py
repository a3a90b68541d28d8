"""Attention with linear biases, ALiBi (Press, Smith & Lewis, 2022: Train short, test long).

    y_i = Σ_{j<=i} softmax_j(q_i·k_j / √d - m·(i - j)) · v_j,        slopes m = 2^(-8/H), 2^(-16/H), … for H heads

The biases are the only positions that it knows. With smoothing, the weights also pass the moving average of LaS
attention; both in chunks of 128 are rows of the LaS paper's Table 4. (Its Eq. 2 prints the bias divided by √d, too;
here it is Press et al.'s, who do not.)
"""

from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from longlens.mixers.base import Traits, register
from longlens.mixers.las import CachedAttention, Heads, Smooth
from longlens.ops.alibi import alibi_attention, alibi_slopes
from longlens.ops.checks import AttentionOptions


class AlibiAttention(CachedAttention):
    """Causal multi-head self-attention with linear biases. (B, L, D) -> (B, L, D), with the parameters of attention.

    Args:
        d_model: D, a multiple of ``heads``.
        heads: H.
        window: odd window P of the moving average over the weights. None turns smoothing off.
        side: ``"past"``, or ``"centered"``, which looks (P - 1) / 2 steps ahead: for classification only.
        chunk_size: attend within independent blocks of this length.
        bias: of the two projections.
        dropout: of the attention weights, in training.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        window: int | None = None,
        side: str = "past",
        chunk_size: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model, heads, window=window, side=side, chunk_size=chunk_size, bias=bias, dropout=dropout, device=device,
            dtype=dtype,
        )  # fmt: skip
        self.slopes = alibi_slopes(heads)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        return alibi_attention(query, key, value, self.slopes, **options)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, heads={self.heads}, window={self.window}, side={self.side!r}, "
            f"chunk_size={self.chunk_size}, dropout={self.dropout}"
        )


@register("alibi")
class Alibi(Heads):
    summary: ClassVar[str] = "attention with linear biases"
    traits: ClassVar[Traits] = Traits(decays=True, stable=True, cost="L²", state="2·L·D")

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> AlibiAttention:
        options = self.layer_options(d_model)
        return AlibiAttention(d_model, options.pop("heads"), **options, device=device, dtype=dtype)


@register("alibi-smooth")
@dataclass(frozen=True, kw_only=True)
class AlibiSmooth(Smooth, Alibi):
    summary: ClassVar[str] = "ALiBi with the smoothing of LaS"
    traits: ClassVar[Traits] = Traits(
        decays=True, regularized=True, stable=True, cost="L²", state="(2·L + window - 1)·D"
    )
