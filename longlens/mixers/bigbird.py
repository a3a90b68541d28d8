"""The attention of BigBird (Zaheer et al., NeurIPS 2020, "Big Bird: Transformers for Longer Sequences").

The sequence is cut into blocks of ``block_size`` tokens. A query q (d,) in block i attends to the tokens of some:

    y = Σ_j softmax_j(q·k_j/√d)·v_j,   j in one of the blocks near(i) ∪ first ∪ random(i)

near(i) are ``window_blocks`` blocks around i, random(i) others for each i and each head, and first the global blocks,
which attend to everything themselves.

Unlike published code, a sequence has the same result however long it is padded, in training as in evaluation. So all
global blocks are at the beginning: after padding, the last block is another one. And the random blocks are chosen once,
among those of the longest sequence, of which a shorter one has fewer. The causal form attends to the past of all this.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longlens.mixers.base import MAX_LENGTH, Config, Traits, register
from longlens.mixers.common import MultiHead
from longlens.ops.block_sparse import block_sparse_attention
from longlens.ops.checks import check_share


def choose_blocks(heads: int, blocks: int, *, count: int, first: int, reach: int, seed: int) -> Tensor:
    """For each head and query block i, ``count`` of the blocks from ``first`` on that are more than ``reach`` away from
    i, without repetition; -1 where there are not so many: (heads, blocks, count)."""
    generator = torch.Generator("cpu").manual_seed(seed)
    number = torch.arange(blocks, device="cpu")
    chosen = torch.full((heads, blocks, count), -1, device="cpu")
    for i in range(blocks):
        possible = number[(number >= first) & ((number - i).abs() > reach)]
        shuffled = torch.rand(heads, len(possible), generator=generator, device="cpu").argsort(dim=-1)[:, :count]
        chosen[:, i, : shuffled.shape[1]] = possible[shuffled]
    return chosen


class BlockSparseAttention(MultiHead):
    """Multi-head attention between blocks: those nearby, the first ones, and a few random ones.

    Args:
        d_model: D, a multiple of ``heads``.
        heads: H.
        block_size: tokens of a block.
        window_blocks: an odd number of blocks around each, itself included.
        global_blocks: at the beginning, which attend to all and which all attend to.
        random_blocks: for each block, other ones for each head.
        seed: of the random blocks.
        max_length: the longest sequence. In longer ones the random blocks repeat.
        bidirectional: see both sides.
        bias: of the two projections.
        attention_dropout: of the attention weights, in training.
        rotary: turn queries and keys by their positions.
    """

    chosen: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        block_size: int = 64,
        window_blocks: int = 3,
        global_blocks: int = 2,
        random_blocks: int = 3,
        seed: int = 0,
        max_length: int = MAX_LENGTH,
        bidirectional: bool = True,
        bias: bool = True,
        attention_dropout: float = 0.0,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if window_blocks < 1 or window_blocks % 2 == 0:
            raise ValueError(f"window_blocks must be an odd number of at least 1, got {window_blocks}")
        if global_blocks < 0 or random_blocks < 0:
            raise ValueError(
                f"global_blocks and random_blocks must be at least 0, got {global_blocks} and {random_blocks}"
            )
        check_share("attention_dropout", attention_dropout)
        super().__init__(d_model, heads, bias=bias, rotary=rotary, device=device, dtype=dtype)
        self.block_size, self.reach, self.global_blocks = block_size, window_blocks // 2, global_blocks
        self.seed, self.bidirectional, self.dropout = seed, bidirectional, attention_dropout
        blocks = -(-max_length // block_size)
        self.register_buffer("chosen", torch.empty(heads, blocks, random_blocks, dtype=torch.int64, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The projections are random, and the random blocks follow from the seed."""
        super().reset_parameters()
        heads, blocks, count = self.chosen.shape
        first, reach = self.global_blocks, self.reach
        self.chosen.copy_(choose_blocks(heads, blocks, count=count, first=first, reach=reach, seed=self.seed))

    def pattern(self, blocks: int) -> Tensor:
        """What each block attends to unless it is global: (H, blocks, K), the numbers of blocks, or -1 for none."""
        own = torch.arange(blocks, device=self.chosen.device)[:, None]
        first = torch.arange(self.global_blocks, device=own.device).expand(blocks, -1)
        near = own + torch.arange(-self.reach, (self.reach if self.bidirectional else 0) + 1, device=own.device)
        near = near.masked_fill(near < self.global_blocks, -1)
        far = self.chosen[:, own.squeeze(1) % self.chosen.shape[1]]
        far = far.masked_fill((far - own).abs() <= self.reach, -1)  # possible only where the random blocks repeat
        return torch.cat([torch.cat([first, near], dim=1).expand(self.heads, -1, -1), far], dim=2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return block_sparse_attention(
            query,
            key,
            value,
            self.pattern(-(-query.shape[2] // self.block_size)),
            block_size=self.block_size,
            global_blocks=self.global_blocks,
            is_causal=not self.bidirectional,
            mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, heads={self.heads}, block_size={self.block_size}, window_blocks={2 * self.reach + 1}, "
            f"global_blocks={self.global_blocks}, random_blocks={self.chosen.shape[2]}, seed={self.seed}, "
            f"bidirectional={self.bidirectional}, dropout={self.dropout}, rotary={self.rotary}"
        )


@register("bigbird")
@dataclass(frozen=True, kw_only=True)
class BigBird(Config):
    """Attention between blocks: those nearby, the first ones, and a few random ones. The defaults are those of the
    paper's base model (ITC) and of the arena: blocks of 64 tokens, 3 around each, 2 global and 3 random ones.

    Args:
        heads: number of heads.
        block_size: tokens of a block.
        window_blocks: odd number of blocks around each, itself included.
        global_blocks: number of first blocks that attend to all and that all attend to.
        random_blocks: number of random blocks that a block attends to, others in each head.
        seed: of the random blocks.
        bidirectional: see both sides.
        bias: of the two projections.
        attention_dropout: of the attention weights, in training.
        rotary: turn queries and keys by their positions.
    """

    heads: int = 8
    block_size: int = 64
    window_blocks: int = 3
    global_blocks: int = 2
    random_blocks: int = 3
    seed: int = 0
    bidirectional: bool = True
    bias: bool = True
    attention_dropout: float = 0.0
    rotary: bool = False

    summary: ClassVar[str] = "BigBird: attention to near, first and random blocks"
    traits: ClassVar[Traits] = Traits(stable=True, cost="L")

    def build(self, d_model, *, max_length=MAX_LENGTH, device=None, dtype=None) -> BlockSparseAttention:
        return BlockSparseAttention(d_model, max_length=max_length, **asdict(self), device=device, dtype=dtype)
