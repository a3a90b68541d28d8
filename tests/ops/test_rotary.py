"""Rotary positions: a turn of complex numbers, of which scores see the distance alone."""

import math

import pytest
import torch

from longlens import LaSAttention, LaSCache, las_attention
from longlens.ops.rotary import rotate


def vectors(*shape, requires_grad=False):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=requires_grad)


def as_complex_turn(x, start=0, base=10_000.0):
    """x_i + 1j·x_{i + d/2} times exp(1j·position·base^(-2i/d)), one position and pair after another."""
    length, width = x.shape[-2:]
    pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :])
    columns = []
    for position in range(length):
        angles = [(start + position) * base ** (-2 * i / width) for i in range(width // 2)]
        turn = torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles], dtype=torch.complex128)
        columns.append(pairs[..., position, :] * turn)
    turned = torch.stack(columns, dim=-2)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize(("length", "width"), [(1, 2), (7, 6), (63, 16)])
@pytest.mark.parametrize("options", [{}, {"start": 5}, {"start": 1000, "base": 500.0}])
def test_it_is_a_turn_of_complex_numbers(length, width, options):
    x = vectors(2, 3, length, width, requires_grad=True)
    actual, expected = rotate(x, **options), as_complex_turn(x, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, x, grad)[0] for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_scores_depend_on_the_distance_alone():
    """The same query and key everywhere: the score matrix is constant along its diagonals, and not across them."""
    query, key = (vectors(1, 16).expand(31, 16) for _ in range(2))
    scores = rotate(query) @ rotate(key).T
    for distance in range(-30, 31):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert scores[0].unique().numel() == 31


def test_a_common_start_changes_no_score():
    query, key = vectors(2, 31, 16), vectors(2, 31, 16)
    shifted = rotate(query, start=977) @ rotate(key, start=977).mT
    torch.testing.assert_close(shifted, rotate(query) @ rotate(key).mT, rtol=0, atol=1e-11)


def test_the_start_continues_the_sequence():
    x = vectors(2, 31, 16)
    parts = [rotate(part, start) for part, start in zip(x.split([1, 12, 18], dim=-2), (0, 1, 13), strict=True)]
    torch.testing.assert_close(torch.cat(parts, dim=-2), rotate(x), rtol=0, atol=1e-13)


def test_position_0_and_all_norms_are_kept():
    x = vectors(2, 31, 16)
    assert torch.equal(rotate(x)[:, 0], x[:, 0])
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-13)


def test_low_precision_still_counts_positions():
    """bfloat16 cannot tell position 1000 from 1001; angles are made in float32."""
    x = torch.randn(1, 16).expand(5, 16)
    turned = rotate(x.bfloat16(), start=1000)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), rotate(x.bfloat16().float(), start=1000), rtol=2**-8, atol=1e-6)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="rotary positions turn pairs of channels, so the width must be even, got 5"):
        rotate(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="rotary positions need heads of even width, got 12 / 4"):
        LaSAttention(12, 4, rotary=True)


ROTARY = {
    "transformer": {"max_rate": 0.0, "window": None},
    "las": {"max_rate": 0.1},
    "las-chunk": {"max_rate": 0.1, "chunk_size": 7},
    "las-bidirectional": {"max_rate": 0.1, "bidirectional": True},
}


@pytest.mark.parametrize("name", ROTARY)
def test_a_layer_turns_queries_and_keys_but_not_values(name):
    layer = LaSAttention(16, 4, rotary=True, dtype=torch.float64, **ROTARY[name])
    x = vectors(2, 23, 16, requires_grad=True)
    query, key, value = layer.in_proj(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    attended = las_attention(
        as_complex_turn(query),
        as_complex_turn(key),
        value,
        decay=layer.rates,
        smoothing=layer.window,
        chunk_size=layer.chunk_size,
        is_causal=not layer.bidirectional,
        backend="reference",
    )
    expected, actual = layer.out_proj(attended.transpose(1, 2).flatten(2)), layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    plain = LaSAttention(16, 4, dtype=torch.float64, **ROTARY[name])
    plain.load_state_dict(layer.state_dict())
    assert (plain(x) - actual).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["transformer", "las", "las-chunk"])
@pytest.mark.parametrize("sizes", [[1] * 23, [5, 1, 9, 8], [23], [0, 6, 0, 17]])
def test_decoding_in_parts_equals_the_whole(name, sizes):
    layer, x = LaSAttention(16, 4, rotary=True, dtype=torch.float64, **ROTARY[name]), vectors(2, 23, 16)
    cache = LaSCache()
    parts = [layer(part, cache=cache) for part in x.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_the_cache_counts_positions_over_chunks(chunk_size):
    """Cached keys are those of the whole sequence, turned by where they are in it and not in their chunk."""
    layer, x = LaSAttention(16, 4, rotary=True, chunk_size=chunk_size, dtype=torch.float64), vectors(2, 23, 16)
    keys = as_complex_turn(layer.in_proj(x)[..., 16:32].unflatten(-1, (4, 4)).transpose(1, 2))
    cache, seen = LaSCache(), 0
    for part in x.split([4, 1, 6, 3, 5, 4], dim=1):
        layer(part, cache=cache)
        seen += part.shape[1]
        assert cache.seen == seen
        assert len(cache) == (seen if chunk_size is None else seen % chunk_size)
        if len(cache):
            torch.testing.assert_close(cache.key, keys[..., seen - len(cache) : seen, :], rtol=0, atol=1e-12)
