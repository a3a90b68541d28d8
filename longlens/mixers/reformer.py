"""The attention of the Reformer (Kitaev, Kaiser & Levskaya, ICLR 2020, "Reformer: The Efficient Transformer").

Queries q (L, d) are keys as well, k = q/|q|. In each of several rounds, a hash with a random R (d, buckets/2) puts
similar ones into the same bucket, argmax([qR; -qR]). Tokens are sorted by bucket, cut into chunks of ``bucket_size``,
and attend to those of their bucket in their own chunk and the one before, P_r in round r (see ``longlens.ops.lsh``):

    y = Σ_r Σ_{j ∈ P_r} exp(q·k_j/√d)·v_j / Σ_r Σ_{j ∈ P_r} exp(q·k_j/√d)

Unlike published code, a sequence has the same result however long it is padded: padding is sorted behind all buckets,
their number follows from the longest sequence, the first chunk has none before it, and R is drawn once. And the causal
form is causal: there a token sees the last ``bucket_size`` tokens of its bucket before it.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import check_heads, check_inputs, hide_padding
from longlens.ops.checks import check_share
from longlens.ops.lsh import lsh_attention, lsh_buckets
from longlens.ops.rotary import rotate


class LSHAttention(nn.Module):
    """Multi-head attention within the buckets of a hash, with queries that are keys as well.

    Args:
        d_model: D, a multiple of ``heads``.
        heads: H.
        rounds: of hashing.
        bucket_size: the length of a chunk.
        buckets: of each round, 1 or an even number; by default so many that ``bucket_size`` tokens of the longest
            sequence are in one on average.
        max_length: the longest sequence; longer ones have fuller buckets.
        across_buckets: see all tokens of the two chunks, whatever their bucket.
        distinct: count a token that is seen in several rounds once.
        bidirectional: see both sides.
        bias: of the two projections.
        attention_dropout: of the attention weights, in training.
        rotary: turn queries by their positions, after hashing.
    """

    rotations: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        rounds: int = 8,
        bucket_size: int = 64,
        buckets: int | None = None,
        max_length: int = MAX_LENGTH,
        across_buckets: bool = False,
        distinct: bool = False,
        bidirectional: bool = True,
        bias: bool = True,
        attention_dropout: float = 0.0,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(d_model, heads)
        if rotary and d_model // heads % 2:
            raise ValueError(f"rotary positions need heads of even width, got {d_model} / {heads}")
        if rounds < 1 or bucket_size < 1:
            raise ValueError(f"rounds and bucket_size must be at least 1, got {rounds} and {bucket_size}")
        if buckets is None:
            longest = max_length
            buckets = 1 if longest <= bucket_size else 2 * -(-longest // (2 * bucket_size))
        if buckets != 1 and (buckets < 1 or buckets % 2):
            raise ValueError(f"buckets must be 1 or an even number, got {buckets}")
        if across_buckets and not bidirectional:
            raise ValueError("across_buckets needs bidirectional=True: later tokens decide which buckets share a chunk")
        check_share("attention_dropout", attention_dropout)
        self.d_model, self.heads, self.bucket_size, self.buckets = d_model, heads, bucket_size, buckets
        self.across_buckets, self.distinct, self.bidirectional = across_buckets, distinct, bidirectional
        self.dropout, self.rotary = attention_dropout, rotary
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        rotations = torch.empty(rounds, d_model // heads, buckets // 2, device=device, dtype=dtype)
        self.register_buffer("rotations", rotations)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.MultiheadAttention``: Xavier-uniform projections of the input, biases 0; and new rotations."""
        nn.init.xavier_uniform_(self.in_proj.weight)
        self.out_proj.reset_parameters()
        for projection in (self.in_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        nn.init.normal_(self.rotations)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        parts = self.in_proj(x).chunk(2, dim=-1)
        qk, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, H, L, d)
        buckets = lsh_buckets(qk, self.rotations)
        y = lsh_attention(
            rotate(qk) if self.rotary else qk,
            value,
            buckets,
            size=self.bucket_size,
            is_causal=not self.bidirectional,
            across_buckets=self.across_buckets,
            distinct=self.distinct,
            mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, heads={self.heads}, rounds={len(self.rotations)}, bucket_size={self.bucket_size}, "
            f"buckets={self.buckets}, across_buckets={self.across_buckets}, distinct={self.distinct}, "
            f"bidirectional={self.bidirectional}, dropout={self.dropout}, rotary={self.rotary}"
        )


@register("reformer")
@dataclass(frozen=True, kw_only=True)
class Reformer(Config):
    """Attention within the buckets of a hash. The defaults are those of the package reformer-pytorch, but for
    across_buckets, where the paper's formula decides.

    Args:
        heads: number of heads.
        rounds: number of hash rounds.
        bucket_size: length of a chunk of sorted tokens, of which a token sees two.
        buckets: number of buckets in a round, 1 or even; by default the longest sequence / bucket_size.
        across_buckets: see all tokens of the two chunks, as in published code; only with bidirectional.
        distinct: count a token that is seen in several rounds once, as in the paper's appendix; slower.
        bidirectional: see both sides.
        bias: of the two projections.
        attention_dropout: of the attention weights, in training.
        rotary: turn queries by their positions, after hashing.
    """

    heads: int = 8
    rounds: int = 8
    bucket_size: int = 64
    buckets: int | None = None
    across_buckets: bool = False
    distinct: bool = False
    bidirectional: bool = True
    bias: bool = True
    attention_dropout: float = 0.0
    rotary: bool = False

    summary: ClassVar[str] = "Reformer: attention within the buckets of a hash"
    traits: ClassVar[Traits] = Traits(stable=True, normalized=True, cost="L log L")

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> LSHAttention:
        return LSHAttention(d_model, max_length=max_length, **asdict(self), device=device, dtype=dtype)
