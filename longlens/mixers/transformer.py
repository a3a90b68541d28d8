"""The attention of a Transformer (Vaswani et al. 2017): y = softmax(mask(QKᵀ/√d))·V in each of H heads."""

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from longlens.mixers.common import MultiHead, check_causal, check_inputs, check_step
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.decay import hide_keys, pad_heads
from longlens.ops.grow import grow
from longlens.options import Probability, Size


@register("transformer", "plain attention", Traits(stable=True, cost="L²", state="2·L·D"))
class CausalAttention(MultiHead):
    """Multi-head self-attention, causal unless it is to see both sides. (B, L, D) -> (B, L, D)."""

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        bidirectional: bool = False,
        bias: bool = True,
        dropout: Probability = 0.0,
        rotary: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, heads, bias=bias, dropout=dropout, rotary=rotary, **factory)
        self.bidirectional = bidirectional
        self.reset_parameters()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        width, scale = query.shape[-1], query.shape[-1] ** -0.5
        if mask is not None:  # as one more column of q and k, since torch's fast kernels take no mask beside is_causal
            query, key = hide_keys(query * scale, key, mask[:, None, None, :])
            value, scale = value.masked_fill(~mask[:, None, :, None], 0.0), 1.0  # a row without tokens sees zeros
        query, key, value = pad_heads(query, key, value)
        how = {"dropout_p": self.dropout_p, "is_causal": not self.bidirectional, "scale": scale}
        return F.scaled_dot_product_attention(query, key, value, **how)[..., :width]

    def step(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The state is the keys and values (B, H, n, d) so far."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        query, key, value = self._project(x.unsqueeze(1), start=0 if state is None else state[0].shape[-2])
        if state is not None:
            key, value = grow(state[0], key), grow(state[1], value)
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout_p)
        return self._merge(attended).squeeze(1), (key, value)

    def prefill(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        check_causal("prefill", not self.bidirectional)
        check_inputs(x, None, self.d_model)
        query, key, value = self._project(x)
        return self._merge(self.attend(query, key, value, None)), (key, value)
