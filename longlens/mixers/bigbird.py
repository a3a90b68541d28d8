"""The attention of BigBird (Zaheer et al., NeurIPS 2020, "Big Bird: Transformers for Longer Sequences").

The sequence is cut into blocks of ``block_size`` tokens. A query q (d,) in block i attends to the tokens of some:

    y = Σ_j softmax_j(q·k_j/√d)·v_j,   j in one of the blocks near(i) ∪ first ∪ random(i)

near(i) are ``window_blocks`` blocks around i, random(i) others for each i and each head, and first the global blocks,
which attend to everything themselves. The causal form attends to the past of all this.

Unlike published code, a sequence has the same result however long it is padded: all global blocks are at the beginning,
and the random blocks are chosen once, among those of the longest sequence, of which a shorter one has fewer. The
reference, with a mask (L, L) for each head, is in ``longlens.ops.block_sparse``.
"""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import MultiHead
from longlens.mixers.registry import MAX_LENGTH, Factory, Traits, register
from longlens.ops.block_sparse import block_sparse_attention
from longlens.options import Count, Odd, Probability, Seed, Size


@register("bigbird", "BigBird: attention to near, first and random blocks", Traits(stable=True, cost="L"))
class BlockSparseAttention(MultiHead):
    """Multi-head attention between blocks: those nearby, the first ones, and a few random ones. (B, L, D) -> (B, L, D).
    The defaults are those of the paper's base model (ITC) and of the arena.

    Args:
        block_size: Number of tokens in a block.
        window_blocks: Odd number of blocks around each, itself included.
        global_blocks: Number of first blocks that attend to all and that all attend to.
        random_blocks: Number of random blocks that a block attends to, others in each head and each layer of a model.
        seed: Seed of the random blocks, to which the number of the layer is added.
        max_length: Length of the longest sequence; in longer ones the random blocks repeat.
        number: Place of the layer in its model, from 0.
    """

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        block_size: Size = 64,
        window_blocks: Odd = 3,
        global_blocks: Count = 2,
        random_blocks: Count = 3,
        seed: Seed = 0,
        bidirectional: bool = True,
        bias: bool = True,
        dropout: Probability = 0.0,
        rotary: bool = False,
        max_length: Size = MAX_LENGTH,
        number: Count = 0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, heads, bias=bias, dropout=dropout, rotary=rotary, **factory)
        self.block_size, self.reach = block_size, window_blocks // 2
        self.global_blocks, self.seed = global_blocks, seed + number
        self.bidirectional = bidirectional
        shape, device = (heads, -(-max_length // block_size), random_blocks), factory.get("device")
        self.chosen = nn.Buffer(torch.empty(shape, dtype=torch.int64, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The projections are random. By the seed, each head and block i chooses among the blocks that are neither
        global nor near, without repetition; -1 where there are not enough."""
        super().reset_parameters()
        heads, blocks, count = self.chosen.shape
        generator = torch.Generator("cpu").manual_seed(self.seed)
        number = torch.arange(blocks, device="cpu")
        chosen = torch.full((heads, blocks, count), -1, device="cpu")
        for i in range(blocks):
            possible = number[(number >= self.global_blocks) & ((number - i).abs() > self.reach)]
            shuffled = torch.rand(heads, len(possible), generator=generator, device="cpu").argsort(dim=-1)[:, :count]
            chosen[:, i, : shuffled.shape[1]] = possible[shuffled]
        self.chosen.copy_(chosen)

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
        pattern = self.pattern(-(-query.shape[2] // self.block_size))
        how: dict[str, Any] = {"is_causal": not self.bidirectional, "mask": mask, "dropout_p": self.dropout_p}
        how |= {"block_size": self.block_size, "global_blocks": self.global_blocks}
        return block_sparse_attention(query, key, value, pattern, **how)
