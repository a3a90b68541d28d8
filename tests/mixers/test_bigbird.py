"""BigBird's attention: its pattern of blocks, and the layer as attention with that pattern for a mask."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.registry import create_mixer
from longlens.models.model import create_model
from longlens.ops.block_sparse import block_sparse_attention_reference
from longlens.ops.rotary import rotate
from longlens.tasks.base import Spec


def build(**options):
    options = {"heads": 4, "block_size": 5, "max_length": 60} | options
    return create_mixer("bigbird", 16, dtype=torch.float64, **options)


def named(layer, blocks):
    """For each head and block the blocks that it attends to, as sets; fails if one is named twice."""
    sets = []
    for head in layer.pattern(blocks).tolist():
        rows = [[block for block in row if 0 <= block < blocks] for row in head]
        assert all(len(row) == len(set(row)) for row in rows)
        sets.append([set(row) for row in rows])
    return sets


def test_a_block_attends_to_near_first_and_random_blocks():
    layer = build()
    rows = named(layer, 12)
    for head in rows:
        for i, row in enumerate(head[2:], start=2):
            near = {i - 1, i, i + 1} & set(range(12))
            assert near | {0, 1} <= row
            assert len(row - near - {0, 1}) == 3
    assert rows[0] != rows[1], "heads have random blocks of their own"


def test_every_block_can_be_a_random_one():
    drawn = [set() for _ in range(12)]
    for seed in range(60):
        for i, row in enumerate(build(seed=seed).chosen.unbind(dim=1)):
            drawn[i] |= set(row.flatten().tolist())
    for i, blocks in enumerate(drawn[2:], start=2):
        assert blocks == set(range(2, 12)) - {i - 1, i, i + 1}


def test_few_blocks_leave_no_choice():
    """Of five blocks, two are global, and three near block 3, of which block 2 has only two."""
    layer = build(max_length=25)
    assert layer.chosen[:, 2:4].tolist() == [[[4, -1, -1], [-1, -1, -1]]] * 4
    assert [row[2:4] for row in named(layer, 5)] == [[{0, 1, 2, 3, 4}] * 2] * 4


def test_the_pattern_does_not_depend_on_the_length_of_a_batch():
    layer = build()
    assert torch.equal(layer.pattern(7), layer.pattern(12)[:, :7])


def test_longer_sequences_repeat_the_random_blocks():
    layer = build()
    for head in named(layer, 40):
        for i, row in enumerate(head[2:], start=2):
            assert {0, 1} | ({i - 1, i, i + 1} & set(range(40))) <= row
            assert len(row) <= 8
    assert layer(torch.randn(1, 200, 16, dtype=torch.float64)).isfinite().all()


def test_layers_of_a_model_have_other_random_blocks():
    """The place of a layer is part of its seed."""
    spec = Spec(inputs="tokens", size=9, head="classify", outputs=2, max_length=200, metric="accuracy")
    model = create_model(spec, "bigbird", width=16, depth=3, heads=4, block_size=5, seed=3)
    for number, block in enumerate(model.blocks):
        assert torch.equal(block.mixer.chosen, build(max_length=200, seed=3 + number).chosen)
    first, second, third = (block.mixer.chosen for block in model.blocks)
    assert (first != second).any(dim=-1).float().mean() > 0.9
    assert (second != third).any(dim=-1).float().mean() > 0.9


def test_the_seed_fixes_the_random_blocks():
    layer, same, other = build(), build(), build(seed=1)
    assert torch.equal(layer.chosen, same.chosen)
    assert not torch.equal(layer.chosen, other.chosen)
    x = torch.randn(2, 60, 16, dtype=torch.float64)
    assert torch.equal(layer.train()(x), layer.eval()(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    chosen = layer.chosen.clone()
    layer.reset_parameters()
    assert torch.equal(layer.chosen, chosen)


def test_blocks_survive_the_meta_device():
    with torch.device("meta"):
        layer = build()
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.chosen, build().chosen)


@pytest.mark.parametrize("length", [23, 58])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": False},
        {"window_blocks": 1, "global_blocks": 0, "random_blocks": 1},
        {"window_blocks": 5, "global_blocks": 1, "random_blocks": 0, "bidirectional": False},
    ],
)
def test_outputs_and_gradients_are_those_of_attention_with_a_mask(options, length):
    layer, x = build(**options), torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
    query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, dim=-1))
    expected = block_sparse_attention_reference(
        query,
        key,
        value,
        layer.pattern(-(-length // 5)),
        block_size=5,
        global_blocks=options.get("global_blocks", 2),
        is_causal=not options.get("bidirectional", True),
    )
    weight = torch.randn_like(x)
    results = []
    for y in (layer(x), layer.out_proj(expected.transpose(1, 2).flatten(2))):
        results.append((y, *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()], retain_graph=True)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_block_that_covers_the_sequence_is_plain_attention(bidirectional):
    layer = build(block_size=64, bidirectional=bidirectional, rotary=True)
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, dim=-1))
    y = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=not bidirectional)
    torch.testing.assert_close(layer(x), layer.out_proj(y.transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)


def test_dropout_in_training_alone():
    layer, x = build(dropout=0.5), torch.randn(2, 40, 16, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"window_blocks": 2}, "window_blocks must be an odd number of at least 1, got 2"),
        ({"window_blocks": -1}, "window_blocks must be an odd number of at least 1, got -1"),
        ({"global_blocks": -1}, "global_blocks must be a whole number of at least 0, got -1"),
        ({"random_blocks": -1}, "random_blocks must be a whole number of at least 0, got -1"),
        ({"dropout": -0.5}, "dropout must be a number of at least 0 and below 1, got -0.5"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\^63 - 1, got -1"),
        ({"heads": 3}, "divide the width of the layer"),
    ],
)
def test_options_that_cannot_be(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(**options)
