"""The Reformer's attention: its projections around the dense reference, and what is fixed once it is built."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.registry import create_mixer
from longlens.ops.lsh import lsh_attention_reference, lsh_buckets
from longlens.ops.rotary import rotate


def build(**options):
    options = {"heads": 4, "bucket_size": 3, "rounds": 3, "max_length": 50} | options
    return create_mixer("reformer", 16, dtype=torch.float64, **options)


def dense(layer, x, rotary=False, **options):
    """The layer by its formula: hash, turn, attend to what is near in any order of tokens, cut into chunks of twice an
    average bucket of 3."""
    qk, value = (
        layer.in_proj(x)[..., part].unflatten(-1, (4, 4)).transpose(1, 2) for part in (slice(16), slice(16, 32))
    )
    buckets = lsh_buckets(qk, layer.rotations)
    y = lsh_attention_reference(rotate(qk) if rotary else qk, value, buckets, size=6, **options)
    return F.linear(y.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)


@pytest.mark.parametrize("length", [23, 101])
@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, {}),
        ({"bidirectional": False}, {"is_causal": True}),
        ({"across_buckets": True}, {"across_buckets": True}),
        ({"distinct": True, "rotary": True}, {"distinct": True, "rotary": True}),
    ],
)
def test_outputs_and_gradients_are_those_of_the_formula(options, formula, length):
    layer, x = build(**options), torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
    weight, results = torch.randn_like(x), []
    for y in (layer(x), dense(layer, x, **formula)):
        results.append((y, *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])))
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)


def test_buckets_follow_from_the_longest_sequence():
    """A chunk has 6 tokens, twice as many as a bucket has on average; a chunk of all tokens needs no buckets."""
    lengths = {5: 1, 6: 1, 7: 4, 12: 4, 13: 6, 50: 18, 192: 64}
    assert {length: build(max_length=length).factors for length in lengths} == {n: (k,) for n, k in lengths.items()}
    assert build(buckets=8).rotations.shape == (3, 4, 4)
    assert build(buckets=684).rotations.shape == (3, 4, 342)
    assert create_mixer("reformer", 16, max_length=1024).factors == (32,), "chunks of 64"


def test_many_buckets_are_those_of_two_hashes():
    """The time of one would grow with the square of the length."""
    for length in (193, 1000, 4096, 16384, 65536, 1_000_000):
        first, second = build(max_length=length, rounds=1).factors
        assert first % 2 == second % 2 == 0
        assert 0 <= first * second - length / 3 <= 2 * first
        assert first + second <= 2.3 * (length / 3) ** 0.5
    layer, x = build(max_length=400), torch.randn(1, 90, 16, dtype=torch.float64)
    qk = layer.in_proj(x)[..., :16].unflatten(-1, (4, 4)).transpose(1, 2)
    first, second = layer.rotations.split([count // 2 for count in layer.factors], dim=-1)
    buckets = layer.factors[1] * lsh_buckets(qk, first) + lsh_buckets(qk, second)
    value = layer.in_proj(x)[..., 16:].unflatten(-1, (4, 4)).transpose(1, 2)
    expected = layer.out_proj(lsh_attention_reference(qk, value, buckets, size=6).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_short_sequences_are_plain_attention_to_all_others():
    """One bucket covers them, so that all rounds are the same."""
    layer, x = build(max_length=6), torch.randn(2, 6, 16, dtype=torch.float64)
    qk, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.in_proj(x).chunk(2, dim=-1))
    others = ~torch.eye(6, dtype=torch.bool)
    y = F.scaled_dot_product_attention(qk, F.normalize(qk, dim=-1), value, attn_mask=others, scale=1.0)
    torch.testing.assert_close(layer(x), layer.out_proj(y.transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)


def test_a_token_alone_sees_itself():
    layer, x = build(), torch.randn(2, 1, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.out_proj(layer.in_proj(x)[..., 16:]), rtol=0, atol=1e-12)


def test_rotations_stay_as_they_were_drawn():
    layer, x = build(), torch.randn(2, 40, 16, dtype=torch.float64)
    first = layer(x)
    assert torch.equal(layer.train()(x), layer.eval()(x))
    other = build()
    assert not torch.equal(other.rotations, layer.rotations)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), first)
    layer.reset_parameters()
    assert not torch.equal(other.rotations, layer.rotations)


def test_dropout_in_training_alone():
    layer, x = build(dropout=0.5), torch.randn(2, 40, 16, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": 3}, "divide the width of the layer, got heads=3 and a width of 16"),
        ({"heads": 16, "rotary": True}, "rotary positions need heads of even width, got 16 / 16"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"bucket_size": 0}, "bucket_size must be a whole number of at least 1, got 0"),
        ({"buckets": 5}, "buckets must be 1 or an even number of at least 2 or none, got 5"),
        ({"buckets": 0}, "buckets must be 1 or an even number of at least 2 or none, got 0"),
        ({"across_buckets": True, "bidirectional": False}, "across_buckets must be false for a causal layer"),
        ({"dropout": 1.5}, "dropout must be a number of at least 0 and below 1, got 1.5"),
    ],
)
def test_options_that_cannot_be(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(**options)
