"""Block-sparse attention against BigBird of transformers, with the random blocks that it chose.

There the first and the last block are global, here the first ones: without a causal mask the order of blocks does not
matter, so the last block is moved to the second place. (In evaluation it takes block 0 again for each random block, and
counts it so often; hence the comparison in training, where it has no dropout here.)
"""

import pytest
import torch

from longlens.ops.block_sparse import block_sparse_attention

package = pytest.importorskip(
    "transformers.models.big_bird.modeling_big_bird", reason="the oracle 'transformers' is not installed"
)

SIZE, HEADS, RANDOM = 4, 3, 2


def build(blocks, monkeypatch):
    """The layer, and a list to which it adds the random blocks that it chooses: (blocks - 2, RANDOM) for each head."""
    config = package.BigBirdConfig(
        hidden_size=12,
        num_attention_heads=HEADS,
        block_size=SIZE,
        num_random_blocks=RANDOM,
        max_position_embeddings=SIZE * blocks,
    )
    layer, chosen = package.BigBirdBlockSparseAttention(config, seed=0).double().train(), []
    choose = layer._bigbird_block_rand_mask_with_head

    def remember(**options):
        chosen.extend(choose(**options))
        return chosen

    monkeypatch.setattr(layer, "_bigbird_block_rand_mask_with_head", remember)
    return layer, chosen


def translate(chosen, blocks):
    """Its choice as our pattern, and the order of blocks that puts its global ones first."""
    order = [0, blocks - 1, *range(1, blocks - 1)]
    rows = torch.full((HEADS, blocks, 5 + RANDOM), -1)
    for h in range(HEADS):
        for place, block in list(enumerate(order))[2:]:
            near = {block - 1, block, block + 1}
            names = {0, blocks - 1} | near | set(chosen[h][block - 1].tolist())
            assert len(names) == len({0, blocks - 1} | near) + RANDOM
            rows[h, place, : len(names)] = torch.tensor([order.index(name) for name in names])
    return rows, (SIZE * torch.tensor(order)[:, None] + torch.arange(SIZE)).flatten()


@pytest.mark.parametrize("lengths", [None, (41, 30)])
@pytest.mark.parametrize("blocks", [11, 13])
def test_outputs_and_gradients(blocks, lengths, monkeypatch):
    layer, chosen = build(blocks, monkeypatch)
    length = SIZE * blocks
    mask = (
        torch.ones(2, length, dtype=torch.bool)
        if lengths is None
        else torch.arange(length) < torch.tensor(lengths)[:, None]
    )
    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    blocked, band, rows, columns = package.BigBirdModel.create_masks_for_block_sparse_attn(mask.double(), SIZE)
    expected = layer(x, band, rows, columns, blocked, blocked)[0]

    pattern, order = translate(chosen, blocks)
    heads = [
        part(x)[:, order].unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (layer.query, layer.key, layer.value)
    ]
    y = block_sparse_attention(
        *heads, pattern, block_size=SIZE, global_blocks=2, mask=None if lengths is None else mask[:, order]
    )
    actual = torch.empty_like(expected).index_copy(1, order, y.transpose(1, 2).flatten(2))

    weight = torch.randn_like(x) * mask.unsqueeze(-1)
    results = [
        (y * mask.unsqueeze(-1), *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()], retain_graph=True))
        for y in (actual, expected)
    ]
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)
