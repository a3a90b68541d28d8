"""The Reformer of the Long Range Arena (Tay et al., 2021), whose code is another layer than the Reformer's own.

Queries q (L, d) are keys as well, as they are. One hash, argmax([qR; -qR]) with a random R (d, n/2), puts them into n
buckets. Tokens are sorted by bucket, then by position, and cut into n chunks of S = ⌊L / n⌋ + 1 tokens. A token sees
all tokens of its own chunk, itself included, and of the chunk before, which for the first chunk is the last:

    y_i = Σ_j softmax_j(√d·q_i·q_j)·v_j,   chunk(j) ∈ {chunk(i), chunk(i) - 1 mod n}

Scores are multiplied by √d, and there is no projection of the output. R is the same in all heads and layers. Since a
chunk is a share of the sequence, time grows with L².

There is no mask in the arena. Here a sequence has the same result however long it is padded: L is the longest sequence,
padding is sorted behind all buckets and not seen, and the last chunk is the last that has a token.
"""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import check_heads, check_inputs, hide_padding, merge_heads, split_heads
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.lsh import lsh_buckets
from longlens.options import Even, Size

_PADDING = torch.iinfo(torch.int64).max  # the bucket of padding, which sorts behind all others


def sorted_attention(qk: Tensor, value: Tensor, buckets: Tensor, size: int, mask: Tensor | None) -> Tensor:
    """Attention among chunks of ``size`` tokens that are sorted by bucket: queries that are keys as well, and values,
    (B, H, L, d), buckets (B, H, L), and a mask (B, L) or None -> (B, H, L, d)."""
    batch, heads, length, width = qk.shape
    if qk.numel() == 0:
        return value.clone()
    size = min(size, length)  # a chunk that holds all tokens need not be longer
    count = -(-length // size)
    tokens = torch.full((batch,), length, device=qk.device) if mask is None else mask.sum(dim=-1)
    if mask is not None:
        buckets = buckets.masked_fill(~mask.unsqueeze(1), _PADDING)
    order = torch.argsort(buckets, dim=-1, stable=True).unsqueeze(-1).expand(-1, -1, -1, width)  # who is at each place
    query, value = (F.pad(x.gather(2, order), (0, 0, 0, count * size - length)) for x in (qk, value))
    query, value = (x.unflatten(2, (count, size)) for x in (query, value))  # (B, H, n, S, d)

    last = (tokens - 1).clamp(min=0) // size
    every = torch.arange(batch, device=qk.device)

    def and_previous(chunks: Tensor) -> Tensor:
        """(B, H, n, S, d) -> (B, H·n, 2S, d): the rows of the chunk before, then its own."""
        before = torch.cat([chunks[every, :, last].unsqueeze(2), chunks[:, :, :-1]], dim=2)
        return torch.cat([before, chunks], dim=3).flatten(1, 2)

    seen = None
    if mask is not None or count * size > length:
        seen = torch.arange(count * size, device=qk.device) < tokens[:, None]  # of the places
        seen = and_previous(seen.view(batch, 1, count, size, 1).expand(-1, heads, -1, -1, -1)).mT  # (B, H·n, 1, 2S)
        seen = seen | ~seen.any(dim=-1, keepdim=True)  # padding among itself, of which nothing is kept
    key, value = and_previous(query), and_previous(value)
    attended = F.scaled_dot_product_attention(
        query.flatten(1, 2), key, value, attn_mask=seen, scale=math.sqrt(width)
    )  # (B, H·n, S, d)
    attended = attended.unflatten(1, (heads, count)).flatten(2, 3)[:, :, :length]
    return torch.empty_like(attended).scatter(2, order, attended)


def sorted_attention_reference(
    qk: Tensor, value: Tensor, buckets: Tensor, size: int, mask: Tensor | None = None
) -> Tensor:
    """The same with all pairs of tokens, (B, H, L, L): rows see columns. Those that see none give NaN."""
    time = torch.arange(qk.shape[2], device=qk.device)
    token = torch.ones(len(qk), len(time), dtype=torch.bool, device=qk.device) if mask is None else mask
    row, column, present = buckets.unsqueeze(-1), buckets.unsqueeze(-2), token[:, None, None, :]
    before = present & ((column < row) | ((column == row) & (time < time[:, None])))
    chunk = before.sum(dim=-1) // size  # (B, H, L)
    last = (token.sum(dim=-1) - 1).view(-1, 1, 1, 1) // size
    row, column = chunk.unsqueeze(-1), chunk.unsqueeze(-2)
    seen = (column == row) | (column == row - 1) | ((row == 0) & (column == last))
    scores = qk @ qk.mT * math.sqrt(qk.shape[-1])
    return scores.masked_fill(~(seen & present), -math.inf).softmax(dim=-1) @ value


@register(
    "reformer-arena",
    "Reformer of the Long Range Arena: attention among sorted chunks",
    Traits(stable=True, cost="L²"),
)
class SortedAttention(nn.Module):
    """Multi-head attention among chunks of tokens that are sorted by a hash, with queries that are keys as well, and
    without an output projection. (B, L, D) -> (B, L, D). Ten buckets are those of the arena, in all its tasks.

    Args:
        buckets: Number of buckets of the hash, even, and of chunks that the longest sequence is cut into.
        max_length: Length of the longest sequence.
    """

    causal = False  # all tokens decide the chunks

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        buckets: Even = 10,
        max_length: Size = MAX_LENGTH,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_heads(d_model, heads)
        self.d_model, self.heads = d_model, heads
        self.chunk = max_length // buckets + 1
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=False, **factory)  # queries and values
        self.rotations = nn.Buffer(torch.empty(1, d_model // heads, buckets // 2, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier-uniform projections, and the same rotations in every layer, as in the arena's code."""
        for weight in self.in_proj.weight.chunk(2):
            nn.init.xavier_uniform_(weight)
        generator = torch.Generator("cpu").manual_seed(0)
        self.rotations.copy_(torch.randn(self.rotations.shape, generator=generator, device="cpu"))

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        qk, value = (split_heads(part, self.heads) for part in self.in_proj(hide_padding(x, mask)).chunk(2, dim=-1))
        buckets = lsh_buckets(qk, self.rotations).squeeze(2)  # (B, H, L)
        return merge_heads(sorted_attention(qk, value, buckets, self.chunk, mask))
