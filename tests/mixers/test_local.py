"""Local attention: the formula with a mask of blocks, its special cases, padding and steps."""

import pytest
import torch
import torch.nn.functional as F

from longlens.errors import BadInput
from longlens.mixers.local import local_attention, local_attention_reference, strided_attention
from longlens.mixers.registry import create_mixer

SIDES = pytest.mark.parametrize("is_causal", [False, True])


def build(**options):
    return create_mixer("local", 12, heads=3, dtype=torch.float64, **options)


def heads(length):
    return [torch.randn(2, 3, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("attention", [local_attention, local_attention_reference])
def test_a_case_by_hand(attention):
    """Equal scores, so that a token is the mean of those that it sees: five of them, in blocks of two."""
    query, key = torch.zeros(2, 1, 1, 5, 4, dtype=torch.float64)
    value = torch.tensor([1.0, 3.0, 10.0, 20.0, 60.0], dtype=torch.float64).view(1, 1, 5, 1)
    mask = torch.tensor([[True, False, True, True, True]])
    for options, expected in (
        ({}, [2, 2, 15, 15, 60]),
        ({"is_causal": True}, [1, 2, 10, 15, 60]),
        ({"mask": mask}, [1, 1, 15, 15, 60]),
        ({"neighbors": 1}, [8.5, 8.5, 18.8, 18.8, 30]),
        ({"neighbors": 1, "is_causal": True}, [1, 2, 14 / 3, 8.5, 30]),
        ({"neighbors": 1, "mask": mask}, [31 / 3, 31 / 3, 22.75, 22.75, 30]),
    ):
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(attention(query, key, value, 2, **options).flatten(), expected, rtol=0, atol=1e-12)


@SIDES
@pytest.mark.parametrize("neighbors", [0, 1, 2])
@pytest.mark.parametrize(("length", "block_size"), [(23, 5), (20, 5), (1, 5), (5, 8), (23, 1)])
def test_it_is_attention_with_a_mask_of_blocks(length, block_size, neighbors, is_causal):
    inputs = heads(length)
    actual = local_attention(*inputs, block_size, neighbors=neighbors, is_causal=is_causal)
    expected = local_attention_reference(*inputs, block_size, neighbors=neighbors, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, inputs, grad) for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@SIDES
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "max_length"), [(23, 23), (20, 20), (7, 20), (2, 20), (31, 20)])
def test_strided_blocks_are_the_columns_of_the_reshaped_sequence(length, max_length, masked, is_causal):
    """With rows of n = max_length // 5 + 1 tokens under each other, a token sees those above and below it."""
    layer = build(block_size=5, strided=True, max_length=max_length, bidirectional=not is_causal)
    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, length) < 0.7 if masked else torch.ones(2, length, dtype=torch.bool)
    n = max_length // 5 + 1
    seen = torch.tensor([[(t - s) % n == 0 for s in range(length)] for t in range(length)])
    seen = (seen.tril() if is_causal else seen) & mask[:, None, None, :]
    seen = seen | (~seen.any(dim=-1, keepdim=True) & torch.eye(length, dtype=torch.bool))  # padding sees itself
    parts = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, dim=-1))
    y = F.scaled_dot_product_attention(*parts, attn_mask=seen)
    results = []
    for output in (layer(x, mask=mask if masked else None), layer.out_proj(y.transpose(1, 2).flatten(2))):
        output = output[mask]
        gradients = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
        results.append((output, gradients[0][mask], *gradients[1:]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@SIDES
@pytest.mark.parametrize(("length", "stride"), [(23, 5), (20, 5), (3, 7)])
def test_strided_attention_is_its_reference(length, stride, is_causal):
    inputs = heads(length)
    actual = strided_attention(*inputs, stride, is_causal=is_causal)
    expected = local_attention_reference(*inputs, 1, stride=stride, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)


def test_strided_blocks_have_neither_neighbors_nor_steps():
    with pytest.raises(BadInput, match="neighbors must be 0 with strided=True, got 1"):
        build(strided=True, neighbors=1)
    with pytest.raises(BadInput, match="step needs strided=False"):
        build(strided=True, bidirectional=False).step(torch.randn(2, 12, dtype=torch.float64))


@SIDES
def test_a_block_that_covers_the_sequence_is_plain_attention(is_causal):
    inputs = heads(23)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    for options in ({"block_size": 23}, {"block_size": 64}, {"block_size": 8, "neighbors": 2}):
        actual = local_attention(*inputs, **options, is_causal=is_causal)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("neighbors", [0, 1])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_the_layer_is_its_projections_around_the_formula(neighbors, bidirectional, rotary):
    options = {"block_size": 4, "neighbors": neighbors, "bidirectional": bidirectional, "rotary": rotary}
    layer = create_mixer("local", 16, heads=4, dtype=torch.float64, **options)
    x = torch.randn(2, 23, 16, dtype=torch.float64, requires_grad=True)
    attended = local_attention_reference(*layer._project(x), 4, neighbors=neighbors, is_causal=not bidirectional)
    expected = F.linear(attended.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (layer(x), expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("neighbors", [0, 1])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_changes_nothing(neighbors, bidirectional):
    options = {"block_size": 4, "neighbors": neighbors, "bidirectional": bidirectional}
    layer = create_mixer("local", 16, **options, dtype=torch.float64)
    lengths = (23, 9, 1, 0)
    x = torch.randn(4, 23, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(23) < torch.tensor(lengths)[:, None]
    together = layer(torch.where(mask[..., None], x, 1e3), mask=mask)
    for row, length in enumerate(lengths):
        alone = layer(x[row : row + 1, :length])[0]
        torch.testing.assert_close(together[row, :length], alone, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(together.square().sum(), (x, *layer.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("neighbors", [0, 1, 2])
@pytest.mark.parametrize("rotary", [False, True])
def test_step_by_step_equals_the_whole_sequence_and_forgets(neighbors, rotary):
    options = {"block_size": 4, "neighbors": neighbors, "bidirectional": False, "rotary": rotary}
    layer = create_mixer("local", 16, heads=4, dtype=torch.float64, **options)
    x, state, outputs = torch.randn(2, 23, 16, dtype=torch.float64), None, []
    for t in range(23):
        output, state = layer.step(x[:, t], state)
        outputs.append(output)
        assert state[0][0].shape[-2] == min(t + 1, t % 4 + 1 + 4 * neighbors), "only the blocks in reach"
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-12)


def test_a_step_leaves_the_state_as_it_was():
    layer = create_mixer("local", 16, block_size=4, bidirectional=False, dtype=torch.float64)
    first, second = torch.randn(2, 2, 16, dtype=torch.float64)
    _, state = layer.step(first)
    once, twice = layer.step(second, state)[0], layer.step(second, state)[0]
    assert torch.equal(once, twice)


def test_only_the_causal_one_steps():
    with pytest.raises(ValueError, match="step needs a causal layer"):
        create_mixer("local", 16).step(torch.randn(2, 16))


def test_errors_name_what_is_allowed():
    for options, message in (
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"neighbors": -1}, "neighbors must be a whole number of at least 0, got -1"),
        ({"heads": 3}, "divide the width of the layer, got heads=3 and a width of 16"),
        ({"dropout": -0.1}, "dropout must be a number of at least 0 and below 1, got -0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            create_mixer("local", 16, **options)


@pytest.mark.parametrize("neighbors", [0, 1])
def test_dropout_only_in_training(neighbors):
    layer = create_mixer("local", 16, block_size=4, neighbors=neighbors, dropout=0.5)
    x = torch.randn(2, 23, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
