"""The oracle itself, against a case done by hand, torch's own operators, and the facts of the paper."""

import math

import pytest
import torch
import torch.nn.functional as F

from longlens import decay_rates, las_attention, las_attention_reference


@pytest.mark.parametrize("function", [las_attention, las_attention_reference])
def test_four_tokens_by_hand(function):
    """One head of width 1, halving scores at each step (a = ln 2), smoothing over 3 keys of the past.

    Scores after the decay, row by row:  1 | 1 0 | 0 0 0 | 1/8 0 1 1.   Smoothed values: 1/3 1 2 3.
    """
    query = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=torch.float64).view(1, 1, 4, 1)
    key = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64).view(1, 1, 4, 1)
    value = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 4, 1)
    output = function(query, key, value, decay=[math.log(2)], smoothing=3, scale=1.0)
    e, eighth = math.e, math.exp(1 / 8)
    by_hand = [
        1 / 3,
        (e / 3 + 1) / (e + 1),
        (1 / 3 + 1 + 2) / 3,
        (eighth / 3 + 1 + 2 * e + 3 * e) / (eighth + 1 + 2 * e),
    ]
    torch.testing.assert_close(output.flatten(), torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=1e-15)


def tensors(length=9):
    return [torch.randn(2, 3, length, 4, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_without_decay_and_smoothing_it_is_torch_attention(is_causal):
    query, key, value = tensors()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    actual = las_attention_reference(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-15)


def test_centered_pooling_is_torch_average_pooling():
    query, key, value = tensors()
    _, plain = las_attention_reference(query, key, value, decay=[0, 0.1, 0.5], return_weights=True)
    output, pooled = las_attention_reference(
        query, key, value, decay=[0, 0.1, 0.5], smoothing=5, side="centered", return_weights=True
    )
    expected = F.avg_pool1d(plain.flatten(0, 1), 5, stride=1, padding=2, count_include_pad=True).view_as(plain)
    torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(output, expected @ value, rtol=0, atol=1e-15)


def test_the_first_row_loses_mass_unless_renormalized():
    query, key, value = tensors()
    sums = {}
    for name, options in {
        "past": {},
        "centered": {"side": "centered"},
        "re-masked": {"side": "centered", "pooling": "re-masked"},
        "renormalized": {"side": "centered", "pooling": "renormalized"},
        "before-softmax": {"side": "centered", "pooling": "before-softmax"},
    }.items():
        _, weights = las_attention_reference(query, key, value, smoothing=3, return_weights=True, **options)
        sums[name] = weights.sum(-1)
    ones = torch.ones_like(sums["past"])
    first = {name: rows[0, 0, 0].item() for name, rows in sums.items()}
    assert first == pytest.approx(
        {"past": 1 / 3, "centered": 2 / 3, "re-masked": 1 / 3} | dict.fromkeys(("renormalized", "before-softmax"), 1.0)
    )
    torch.testing.assert_close(sums["renormalized"], ones)
    torch.testing.assert_close(sums["before-softmax"], ones)
    assert (sums["centered"] <= ones + 1e-12).all()


def test_re_masked_weights_do_not_leak():
    query, key, value = tensors()
    _, weights = las_attention_reference(
        query, key, value, smoothing=5, side="centered", pooling="re-masked", return_weights=True
    )
    assert torch.equal(weights, weights.tril())


def test_decay_raises_far_negative_scores_to_a_uniform_weight():
    """Scores shrink toward 0, not to minus infinity: a far key is neither preferred nor excluded."""
    length = 200
    query = torch.ones(1, 1, length, 1, dtype=torch.float64)
    key = torch.full((1, 1, length, 1), -3.0, dtype=torch.float64)
    value = torch.zeros_like(key)
    _, weights = las_attention_reference(query, key, value, decay=[0.1], scale=1.0, return_weights=True)
    last = weights[0, 0, -1]
    assert last[-1] < last[-20] < last[0], "a negative score far away weighs more than the same score nearby"
    assert last[0] / last[50] == pytest.approx(1.0, abs=1e-3)


def test_the_literal_schedule_turns_heads_into_averages():
    """Seven of eight heads see only their own token's score; the others all weigh the same."""
    query, key, value = (torch.randn(1, 8, 64, 16, dtype=torch.float64) for _ in range(3))
    rates = decay_rates(8, 1e-3, "literal")
    _, weights = las_attention_reference(query, key, value, decay=rates, return_weights=True)
    others = weights[0, 1:, -1, :-1]
    assert (others.amax(-1) / others.amin(-1) < 1.01).all()
    assert (weights[0, 0, -1].max() / weights[0, 0, -1].min()) > 2


def test_weights_reproduce_the_output():
    query, key, value = tensors()
    mask = torch.rand(2, 1, 1, 9) < 0.7
    options = {"decay": [0, 0.1, 0.5], "smoothing": 3, "chunk_size": 4, "attn_mask": mask}
    output, weights = las_attention_reference(query, key, value, return_weights=True, **options)
    torch.testing.assert_close(weights @ value, output, rtol=0, atol=1e-15)


def test_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match=r"pooling must be one of after-softmax, re-masked.*got 'max'"):
        las_attention_reference(*tensors(), smoothing=3, pooling="max")
