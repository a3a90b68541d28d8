"""The attention of the Reformer (Kitaev, Kaiser & Levskaya, ICLR 2020, "Reformer: The Efficient Transformer").

Queries q (L, d) are keys as well, k = q/|q|. In each of several rounds, a hash with a random R (d, buckets/2) puts
similar ones into the same bucket, argmax([qR; -qR]). Tokens are sorted by bucket, cut into chunks of twice an average
bucket, and attend to those of their bucket in their own chunk and the one before, P_r in round r:

    y = Σ_r Σ_{j ∈ P_r} exp(q·k_j)·v_j / Σ_r Σ_{j ∈ P_r} exp(q·k_j)

There is no 1/√d, as in the authors' code, trax: keys have length 1 already. Many buckets are the n·m pairs of those of
two hashes, which trax can do as well: a single hash, of a number that grows with L, would take O(L²).

Unlike published code, a sequence has the same result however long it is padded: padding is sorted behind all buckets,
their number follows from the longest sequence, the first chunk has none before it, and R is drawn once. And the causal
form is causal: there a token sees as many tokens of its bucket before it as a chunk has. The reference, with all pairs
of tokens, is in ``longlens.ops.lsh``.
"""

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import MultiHead
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.lsh import lsh_attention, lsh_buckets
from longlens.ops.rotary import rotate
from longlens.options import OneOrEven, Probability, Size

SINGLE_HASH = 64  # buckets, up to which one hash takes little time beside the attention


def bucket_factors(count: int) -> tuple[int, ...]:
    """How many buckets one hash has, or each of two, for at least ``count`` together, which is even or 1."""
    if count <= SINGLE_HASH:
        return (count,)
    first = 2 * round(math.sqrt(count) / 2)
    return first, 2 * -(-count // (2 * first))


@register(
    "reformer", "Reformer: attention within the buckets of a hash", Traits(stable=True, normalized=True, cost="L log L")
)
class LSHAttention(MultiHead):
    """Multi-head attention within the buckets of a hash, with queries that are keys as well. (B, L, D) -> (B, L, D).
    8 rounds and chunks of 64 are those of the package reformer-pytorch; across_buckets, which it has on, is not the
    paper's formula.

    Args:
        rounds: Number of rounds of hashing.
        bucket_size: Average number of tokens in a bucket; a chunk of sorted tokens, of which a token sees two, has
            twice as many.
        buckets: Number of buckets of the hash in a round, 1 or even; by default so many that each has bucket_size
            tokens of the longest sequence on average, by two hashes if there are more than 64, and 1 if a chunk has
            the whole sequence.
        across_buckets: See all tokens of the two chunks, as in published code; only with bidirectional.
        distinct: Count a token that is seen in several rounds once, as in the paper's appendix; slower.
        rotary: Rotate queries by their positions (Su et al. 2021), after hashing.
        max_length: Length of the longest sequence; longer ones have fuller buckets.
    """

    parts = 2  # of in_proj: queries, which are keys as well, and values

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        rounds: Size = 8,
        bucket_size: Size = 32,
        buckets: OneOrEven | None = None,
        across_buckets: bool = False,
        distinct: bool = False,
        bidirectional: bool = True,
        bias: bool = True,
        dropout: Probability = 0.0,
        rotary: bool = False,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, heads, bias=bias, dropout=dropout, rotary=rotary, **factory)
        if across_buckets and not bidirectional:
            raise BadInput("across_buckets must be false for a causal layer, got true: later tokens decide the chunks")
        self.chunk = 2 * bucket_size
        count = 1 if max_length <= self.chunk else 2 * -(-max_length // self.chunk)
        self.factors = bucket_factors(count) if buckets is None else (buckets,)
        self.across_buckets, self.distinct = across_buckets, distinct
        self.bidirectional = bidirectional
        half = sum(count // 2 for count in self.factors)
        self.rotations = nn.Buffer(torch.empty(rounds, d_model // heads, half, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.rotations)

    def _project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries are keys as well; their rotation comes after hashing."""
        qk, value = self._split(x)
        return qk, qk, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        buckets = lsh_buckets(query, self.rotations, self.factors)
        how: dict[str, Any] = {"is_causal": not self.bidirectional, "mask": mask, "dropout_p": self.dropout_p}
        how |= {"size": self.chunk, "across_buckets": self.across_buckets, "distinct": self.distinct}
        return lsh_attention(rotate(query) if self.rotary else query, value, buckets, **how)
