"""The arena's Reformer: against loops over tokens, against all pairs of tokens, and what is fixed once it is built."""

import math

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.reformer_arena import sorted_attention, sorted_attention_reference
from longlens.mixers.registry import create_mixer
from longlens.ops.lsh import lsh_buckets


def vectors(length, requires_grad=True):
    return [torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=requires_grad) for _ in range(2)]


def token_by_token(qk, value, buckets, size, tokens):
    """One head of one sequence, with lists: sort, cut, look at the chunk before, of which the first has the last."""
    order = sorted(tokens, key=lambda t: (buckets[t], t))
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    outputs = torch.zeros_like(value)
    for place, chunk in enumerate(chunks):
        seen = sorted({*chunk, *chunks[place - 1]})
        for t in chunk:
            scores = torch.stack([qk[t] @ qk[u] * math.sqrt(qk.shape[-1]) for u in seen])
            outputs[t] = scores.softmax(dim=0) @ value[seen]
    return outputs


@pytest.mark.parametrize("attention", [sorted_attention, sorted_attention_reference])
@pytest.mark.parametrize("size", [1, 3, 4, 9, 20])
@pytest.mark.parametrize("masked", [True, False])
def test_the_formula_token_by_token(attention, size, masked):
    qk, value = vectors(13, requires_grad=False)
    buckets = torch.randint(4, (2, 3, 13))
    mask = torch.rand(2, 13) < 0.7 if masked else torch.ones(2, 13, dtype=torch.bool)
    mask[:, 0] = True
    actual = attention(qk, value, buckets, size, mask if masked else None)
    for b in range(2):
        tokens = mask[b].nonzero().flatten().tolist()
        for h in range(3):
            expected = token_by_token(qk[b, h], value[b, h], buckets[b, h].tolist(), size, tokens)
            torch.testing.assert_close(actual[b, h, tokens], expected[tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [1, 6, 12, 23, 67])
def test_outputs_and_gradients_are_those_of_all_pairs(length, masked):
    qk, value = vectors(length)
    buckets, mask = torch.randint(4, (2, 3, length)), None
    weight, results = torch.randn(2, 3, length, 4, dtype=torch.float64), []
    if masked:
        mask = torch.rand(2, length) < 0.7
        mask[:, 0] = True
        weight *= mask[:, None, :, None]
    for attention in (sorted_attention, sorted_attention_reference):
        y = attention(qk, value, buckets, 6, mask)
        y = y if mask is None else y.masked_fill(~mask[:, None, :, None], 0.0)
        results.append((y, *torch.autograd.grad((y * weight).sum(), (qk, value))))
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [10, 23, 101])
def test_the_layer_is_its_formula(length):
    """q = W₁x and v = W₂x without a bias, buckets of q, and no projection of what comes out."""
    layer = create_mixer("reformer-arena", 16, heads=4, max_length=50, dtype=torch.float64)
    x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
    first, second = layer.in_proj.weight.chunk(2)
    qk, value = ((x @ part.T).unflatten(-1, (4, 4)).transpose(1, 2) for part in (first, second))
    buckets = torch.cat([qk @ layer.rotations[0], -qk @ layer.rotations[0]], dim=-1).argmax(dim=-1)
    assert buckets.max() <= 9
    expected = sorted_attention_reference(qk, value, buckets, 6).transpose(1, 2).flatten(2)
    actual = layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    upstream = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], upstream) for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
    assert [name for name, _ in layer.named_parameters()] == ["in_proj.weight"]


def test_a_chunk_is_a_tenth_of_the_longest_sequence():
    """The arena fills up to the next multiple of 10, a whole 10 if the length is one."""
    for length in (1, 9, 10, 11, 1024, 1025, 2000, 4001):
        filled = next(n for n in range(length + 1, length + 11) if n % 10 == 0)
        assert create_mixer("reformer-arena", 16, max_length=length).chunk == filled // 10
    assert create_mixer("reformer-arena", 16, max_length=24, buckets=4).chunk == 7


def test_rotations_are_the_same_in_all_heads_and_layers_and_whatever_the_seed():
    first, second = (create_mixer("reformer-arena", 16, heads=4) for _ in range(2))
    assert first.rotations.shape == (1, 4, 5)
    assert torch.equal(first.rotations, second.rotations)
    assert not torch.equal(first.in_proj.weight, second.in_proj.weight)
    x = torch.randn(3, 4, 90, 4)
    assert lsh_buckets(x, first.rotations).unique().tolist() == list(range(10))


def test_projections_start_as_xavier_says():
    weight = create_mixer("reformer-arena", 64).in_proj.weight
    bound = math.sqrt(6 / (64 + 64))
    assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_what_is_only_padding_is_a_number():
    layer, x = create_mixer("reformer-arena", 16, max_length=30), torch.randn(2, 23, 16, requires_grad=True)
    mask = torch.arange(23) < torch.tensor([[23], [0]])
    y = layer(x, mask=mask)
    assert y.isfinite().all()
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads must divide the width of the layer, got heads=3 and a width of 16"),
        ({"buckets": 5}, "buckets must be an even number of at least 2, got 5"),
        ({"bidirectional": False}, "mixer 'reformer-arena' has no option 'bidirectional'"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("reformer-arena", 16, **options)
