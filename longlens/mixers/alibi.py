"""Attention with linear biases, ALiBi (Press, Smith & Lewis, 2022: Train short, test long).

    y_i = Σ_{j<=i} softmax_j(q_i·k_j / √d - m·(i - j)) · v_j,        slopes m = 2^(-8/H), 2^(-16/H), … for H heads

With smoothing, the weights also pass the moving average of LaS attention; both in chunks of 128 are rows of the LaS
paper's Table 4. (Its Eq. 2 divides the bias by √d, too; Press et al. do not.) The reference is in ``longlens.ops``.
"""

from typing import Literal, Unpack

from torch import Tensor

from longlens.mixers.common import CachedAttention
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.alibi import alibi_attention, alibi_slopes
from longlens.ops.checks import AttentionOptions
from longlens.options import Odd, Probability, Size


@register(
    "alibi",
    "attention with linear biases",
    Traits(decays=True, stable=True, cost="L²", state="2·L·D"),
    fixed={"window": None, "side": "past"},
)
@register(
    "alibi-smooth",
    "ALiBi with the smoothing of LaS",
    Traits(decays=True, regularized=True, stable=True, cost="L²", state="(2·L + window - 1)·D"),
    needs=("window",),
    window=5,
)
class AlibiAttention(CachedAttention):
    """Causal multi-head self-attention with linear biases. (B, L, D) -> (B, L, D), with the parameters of attention."""

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        window: Odd | None = None,
        side: Literal["past", "centered"] = "past",
        chunk_size: Size | None = None,
        bias: bool = True,
        dropout: Probability = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, heads, bias=bias, dropout=dropout, **factory)
        self.window, self.side = window, side
        self.chunk_size, self.slopes = chunk_size, alibi_slopes(heads)
        self.reset_parameters()

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        return alibi_attention(query, key, value, self.slopes, **options)
