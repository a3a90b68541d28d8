"""Linformer (Wang et al., 2020: Self-attention with linear complexity).

    y = softmax(Q·(E·K)ᵀ / √d)·(F·V),        Q, K, V of (L, d) for each head, E and F of (k, L)

Keys and values are projected along the sequence, from L tokens to k, and the queries attend to those: linear in the
length. E and F are learned for a longest sequence; a shorter one uses their first columns. Each of the k mixes all
tokens, so it cannot be causal.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import MultiHead
from longlens.ops.checks import check_share
from longlens.ops.kernels import pad_heads

SHARES = ("key-value", "headwise", "none")


class LinformerAttention(MultiHead):
    """Multi-head self-attention to projections of the sequence. (B, L, D) -> (B, L, D).

    Args:
        d_model: D, a multiple of ``heads``.
        heads: H.
        projected: k, the length to which keys and values are projected.
        share: ``"key-value"``: one projection for keys and values of all heads, ``"headwise"``: one for keys and one
            for values, ``"none"``: two for each head.
        max_length: of a sequence.
        bias: of the two projections.
        attention_dropout: of the attention weights, in training.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        projected: int = 256,
        share: str = "key-value",
        max_length: int = MAX_LENGTH,
        bias: bool = True,
        attention_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, number in (("projected", projected), ("max_length", max_length)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if share not in SHARES:
            raise ValueError(f"share must be one of {', '.join(SHARES)}, got {share!r}")
        check_share("attention_dropout", attention_dropout)
        super().__init__(d_model, heads, bias=bias, device=device, dtype=dtype)
        self.projected, self.share, self.max_length, self.dropout = projected, share, max_length, attention_dropout
        count = {"key-value": 1, "headwise": 2, "none": 2 * heads}[share]
        self.projections = nn.Parameter(torch.empty(count, projected, max_length, device=device, dtype=dtype))
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
            raise ValueError(
                f"x has {length} tokens, the layer is for {self.max_length} at most: build it with max_length={length}"
            )
        key, value = self._shorten(key, value, mask)
        query, key, value = pad_heads(query, key, value)
        dropout_p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, scale=width**-0.5)[..., :width]

    def _shorten(self, key: Tensor, value: Tensor, mask: Tensor | None) -> list[Tensor]:
        """E·K and F·V: two of (B, H, L, d) -> two of (B, H, k, d). Padding counts as 0."""
        length = key.shape[-2]
        matrices = self.projections[..., :length].chunk(2)  # E and F of (1 or H, k, L), or only E
        shortened = []
        for x, matrix in zip((key, value), (matrices[0], matrices[-1]), strict=True):
            if len(matrix) == 1:  # all heads are projected alike: as one of the whole width
                x = x.transpose(1, 2).flatten(2).unsqueeze(1)  # (B, 1, L, D)
            if mask is not None:
                x = x.masked_fill(~mask[:, None, :, None], 0.0)
            x = torch.einsum("hkl,bhld->bkhd", matrix, x)
            shortened.append(x.reshape(len(x), self.projected, self.heads, self.d_model // self.heads).transpose(1, 2))
        return shortened

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, heads={self.heads}, projected={self.projected}, share={self.share!r}, "
            f"max_length={self.max_length}, dropout={self.dropout}"
        )


@register("linformer")
@dataclass(frozen=True, kw_only=True)
class Linformer(Config):
    """Attention to projections of the sequence. 256 of them are the paper's choice, and sharing one projection is the
    Long Range Arena's (whose code projects to 16).

    Args:
        heads: number of heads.
        projected: length k to which keys and values are projected.
        share: one projection for keys and values of all heads, or for each of the two (headwise), or none shared.
        bias: of the two projections of the width.
        attention_dropout: of the attention weights, in training.
    """

    heads: int = 8
    projected: int = 256
    share: Literal["key-value", "headwise", "none"] = "key-value"
    bias: bool = True
    attention_dropout: float = 0.0

    summary: ClassVar[str] = "attention to a projected sequence"
    traits: ClassVar[Traits] = Traits(stable=True, cost="L")
    size_note: ClassVar[str] = "its projections along the sequence have projected·L parameters"

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> LinformerAttention:
        return LinformerAttention(d_model, **asdict(self), max_length=max_length, device=device, dtype=dtype)

    def looks_ahead(self) -> str | None:
        return "it mixes all tokens before it attends, and cannot be causal"
