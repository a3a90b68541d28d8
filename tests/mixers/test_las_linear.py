"""LaS layers with a tolerance: linear time, and decoding with a cache that does not grow."""

import math
import warnings
from copy import copy

import pytest
import torch

from longlens import LaSAttention, LaSCache, las_attention
from longlens.errors import BadInput
from longlens.mixers.registry import create_mixer
from longlens.ops import decoding, windows

LENGTH, TOLERANCE = 600, 1e-3


def layers(**options):
    """A layer with a tolerance, and the same one without. Values are not changed after attention."""
    torch.manual_seed(0)
    options = {"max_rate": 0.15, "schedule": "positive", "dtype": torch.float64} | options
    layer, exact = LaSAttention(16, 4, tolerance=TOLERANCE, **options), LaSAttention(16, 4, **options)
    torch.nn.init.eye_(layer.out_proj.weight)
    exact.load_state_dict(layer.state_dict())
    return layer, exact


def sequence(size=1.0):
    return size * torch.randn(2, LENGTH, 16, dtype=torch.float64)


def decode(layer, x, sizes, cache):
    with torch.no_grad():
        return torch.cat([layer(part, cache=cache) for part in x.split(sizes, dim=1)], dim=1)


def largest_value(layer, x):
    return layer._project(x)[2].abs().max().item()


def test_a_layer_in_linear_time(monkeypatch):
    monkeypatch.setattr(windows, "SHORT", 0)
    (layer, exact), x = layers(), sequence()
    mask = torch.rand(2, LENGTH) > 0.2
    for given in (None, mask):
        error = (layer(x, mask=given) - exact(x, mask=given))[mask].abs().max()
        assert 1e-12 < error <= TOLERANCE * largest_value(layer, x)


@pytest.mark.parametrize("sizes", [1, [100, 1, 250, 249], LENGTH], ids=["tokens", "parts", "whole"])
@pytest.mark.parametrize("options", [{}, {"rotary": True, "window": None}, {"schedule": "exp-uniform"}])
def test_decoding_keeps_the_tolerance_and_its_bound(sizes, options):
    (layer, exact), x, cache = layers(**options), sequence(), LaSCache()
    error = (decode(layer, x, sizes, cache) - exact(x)).abs().max().item()
    assert 1e-12 < error <= cache.bound * largest_value(layer, x)
    assert 0 < cache.bound <= TOLERANCE
    assert len(cache) == cache.seen == LENGTH
    kept = [past.key.shape[2] for past in cache.pasts]
    assert (max(kept) == LENGTH) == (options.get("schedule") == "exp-uniform"), "a head of rate 0 keeps all"
    assert min(kept) < LENGTH / 3


def test_the_cache_does_not_grow():
    (layer, exact), x = layers(), torch.randn(1, 3000, 16, dtype=torch.float64)
    caches, sizes = (LaSCache(), LaSCache()), []
    for part in x.split(250, dim=1):
        for model, cache in zip((layer, exact), caches, strict=True):
            decode(model, part, 250, cache)
        sizes.append([cache.nbytes for cache in caches])
    assert max(sizes[6:])[0] <= max(sizes[:6])[0], "after the window it is as large as ever"
    assert sizes[-1][1] == 2 * 3000 * 16 * 8 + 4 * 16 * 8, "keys, values and the last four values"
    assert sizes[-1][0] < sizes[-1][1] / 4


def test_a_state_is_left_as_it_was():
    """Beams share the beginning of a sequence."""
    (layer, _), x, cache = layers(), sequence(), LaSCache()
    decode(layer, x[:, :550], 550, cache)
    before = copy(cache)
    ends = []
    for _ in range(2):
        state, outputs = before, []
        with torch.no_grad():
            for token in x[:, 550:].unbind(1):
                output, state = layer.step(token, state)
                outputs.append(output)
        ends.append(torch.stack(outputs, 1))
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    torch.testing.assert_close(ends[0], decode(layer, x[:, 550:], 1, cache), rtol=0, atol=0)


def test_a_query_longer_than_foreseen_is_warned_of():
    rates, (query, key, value) = (0.1, 0.15), torch.randn(3, 1, 2, 400, 8, dtype=torch.float64)
    query[..., -1, :] *= 2e4
    key[..., 300:, :] = 0.0  # or near scores would be so large that far weights are nothing
    cache = LaSCache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for parts in zip(*(x[..., :-1, :].split(50, dim=2) for x in (query, key, value)), strict=True):
            cache.attend(*parts, None, rates, TOLERANCE)
    assert cache.bound <= TOLERANCE
    with pytest.warns(UserWarning, match=r"the output may be off by .* above tolerance=0\.001: a query is more than"):
        last = cache.attend(*(x[..., -1:, :] for x in (query, key, value)), None, rates, TOLERANCE)
    assert cache.bound > TOLERANCE
    error = (last - las_attention(query, key, value, decay=rates)[..., -1:, :]).abs().max().item()
    assert error <= cache.bound * value.abs().max()


def test_what_any_later_query_may_lose_is_at_least_what_those_that_come_do():
    """The promise of folding, for queries up to the margin in the worst direction."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 1, 1, 300, 6, dtype=torch.float64)
    past = decoding.Past.empty([0.05], key, value).append(key, value)
    query = torch.randn(1, 1, 300, 6, dtype=torch.float64)
    past = past.attend(query, 0.4)[1]._folded(200)
    risk = past._risk(0.4)
    assert 0 < risk < math.inf
    axis = torch.linalg.eigh(past.square)[1][..., -1:].mT
    others = torch.randn(1, 1, 50, 6, dtype=torch.float64)
    for direction in (axis, -axis, *others.split(1, dim=2)):
        token = direction / direction.norm() * past.longest[..., None, None] * decoding.MARGIN
        later = past.append(torch.randn_like(token), torch.randn_like(token))
        assert later.attend(token, 0.4)[2] <= risk


def test_states_are_the_sums_of_what_was_folded():
    key, value = torch.randn(2, 2, 1, 90, 6, dtype=torch.float64)
    past = decoding.Past.empty([0.05], key, value).append(key, value)
    for count in (20, 1, 39):
        past = past._folded(count)
    weights = torch.exp(-0.05 * (60 - torch.arange(60.0, dtype=torch.float64)))[:, None]
    far, values = key[..., :60, :] * weights, torch.nn.functional.pad(value[..., :60, :], (0, 1), value=1.0)
    expected = far.mT @ values, values.sum(-2, keepdim=True), far.mT @ far, far.norm(dim=-1).amax(-1)
    torch.testing.assert_close((past.state, past.sums, past.square, past.norm), expected)
    assert past.folded == 60
    assert torch.equal(past.key, key[..., 60:, :])


def test_chunks_have_a_cache_of_their_own():
    (layer, exact), x, cache = layers(chunk_size=50), sequence(), LaSCache()
    torch.testing.assert_close(decode(layer, x, 1, cache), exact(x))
    assert cache.pasts == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be a number above 0 or none, got 0.0"),
        ({"tolerance": 0.1, "dropout": 0.1}, "tolerance must be None unless dropout=0, got 0.1"),
        ({"tolerance": 0.1, "bidirectional": True}, "tolerance must be None unless bidirectional=False, got 0.1"),
    ],
)
def test_bad_construction(options, message):
    with pytest.raises(BadInput, match=message):
        LaSAttention(16, 4, **options)


def test_bad_input_and_options_of_mixers():
    (layer, _), x, cache = layers(), sequence(), LaSCache()
    decode(layer, x, 300, cache)
    with pytest.raises(BadInput, match="x must have the cache's batch of 2, got 1: start a new cache"):
        layer(x[:1], cache=cache)
    assert len(cache) == LENGTH, "a refused step leaves the cache as it was"
    with torch.no_grad():
        assert layer(x[:, :0], cache=cache).shape == (2, 0, 16)
    mixer = create_mixer("las", d_model=16, heads=4, tolerance=0.01, schedule="positive")
    assert mixer.tolerance == 0.01
    assert min(mixer.rates) > 0
    with pytest.raises(BadInput, match="tolerance"):
        create_mixer("las-bidirectional", d_model=16, heads=4, tolerance=0.01)
