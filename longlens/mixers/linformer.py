"""Linformer (Wang et al., 2020: Self-attention with linear complexity).

    y = softmax(Q·(E·K)ᵀ / √d)·(F·V),        Q, K, V of (L, d) for each head, E and F of (k, L)

Keys and values are projected along the sequence, from L tokens to k: linear in the length. E and F are learned for a
longest sequence; a shorter one uses their first columns. Each of the k mixes all tokens, so it cannot be causal.
"""

import math
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import MultiHead
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.decay import pad_heads
from longlens.options import Probability, Size


def linformer_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, key_projection: Tensor, value_projection: Tensor
) -> Tensor:
    """The formula: query, key and value (B, H, L, d), E and F of (H or 1, k, L) -> (B, H, L, d)."""
    key, value = key_projection @ key, value_projection @ value  # (B, H, k, d)
    return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1) @ value


@register(
    "linformer",
    "attention to a projected sequence",
    Traits(stable=True, cost="L"),
    size_note="its projections along the sequence have projected·L parameters",
)
class LinformerAttention(MultiHead):
    """Multi-head self-attention to projections of the sequence. (B, L, D) -> (B, L, D). 256 projections are the paper's
    choice, and one for all is the arena's, whose code projects to 16.

    Args:
        projected: Length k to which keys and values are projected.
        share: Sharing of the projections along the sequence: one for keys and values of all heads (key-value), one for
            keys and one for values (headwise), or two for each head (none).
        max_length: Length of the longest sequence.
    """

    causal = False  # each projection mixes all tokens

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        projected: Size = 256,
        share: Literal["key-value", "headwise", "none"] = "key-value",
        bias: bool = True,
        dropout: Probability = 0.0,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, heads, bias=bias, dropout=dropout, **factory)
        self.projected, self.share = projected, share
        self.max_length = max_length
        count = {"key-value": 1, "headwise": 2, "none": 2 * heads}[share]
        self.projections = nn.Parameter(torch.empty(count, projected, max_length, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Projections along the sequence are Xavier-uniform, too, as in the Long Range Arena."""
        super().reset_parameters()
        for matrix in self.projections:
            nn.init.xavier_uniform_(matrix)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length, width = key.shape[-2:]
        if length > self.max_length:
            raise BadInput(f"x must have at most {self.max_length} tokens, got {length}: choose max_length={length}")
        matrices = self.projections[..., :length].chunk(2)  # E and F of (1 or H, k, L), or only E
        shortened = []  # E·K and F·V, (B, H, k, d), where padding counts as 0
        for x, matrix in zip((key, value), (matrices[0], matrices[-1]), strict=True):
            if len(matrix) == 1:  # all heads are projected alike: as one of the whole width
                x = x.transpose(1, 2).flatten(2).unsqueeze(1)  # (B, 1, L, D)
            if mask is not None:
                x = x.masked_fill(~mask[:, None, :, None], 0.0)
            x = torch.einsum("hkl,bhld->bkhd", matrix, x)
            shortened.append(x.reshape(x.shape[0], self.projected, self.heads, width).transpose(1, 2))
        query, key, value = pad_heads(query, *shortened)
        p, scale = self.dropout_p, width**-0.5
        return F.scaled_dot_product_attention(query, key, value, dropout_p=p, scale=scale)[..., :width]
