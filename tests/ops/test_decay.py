import math

import pytest
import torch

from longlens import decay_rates
from longlens.ops.decay import decay_weights, max_exponent, widest_dtype


def test_exp_uniform_is_evenly_spaced_after_exp():
    rates = decay_rates(8, 1e-3, dtype=torch.float64)
    expected = torch.linspace(1.0, math.exp(-1e-3), 8, dtype=torch.float64)
    torch.testing.assert_close(torch.exp(-rates), expected, rtol=0, atol=1e-15)
    assert rates[0] == 0
    assert rates[1] == pytest.approx(0.000143, abs=1e-6)
    assert rates[-1] == 1e-3


def test_positive_has_no_zero():
    rates = decay_rates(8, 1e-3, "positive", dtype=torch.float64)
    expected = torch.linspace(1.0, math.exp(-1e-3), 9, dtype=torch.float64)[1:]
    torch.testing.assert_close(torch.exp(-rates), expected, rtol=0, atol=1e-15)
    assert rates.min() == pytest.approx(1.25e-4, abs=1e-7)
    assert decay_rates(1, 0.1, "positive").tolist() == pytest.approx([0.1])


def test_what_the_last_head_keeps_of_a_score():
    """FACTS: 0.88 at distance 128, 0.36 at 1024, 0.13 at 2048."""
    last = decay_rates(8, 1e-3)[-1].item()
    assert [round(math.exp(-last * n), 2) for n in (128, 1024, 2048)] == [0.88, 0.36, 0.13]


def test_literal_is_as_printed():
    rates = decay_rates(8, 1e-3, "literal", dtype=torch.float64)
    torch.testing.assert_close(torch.exp(-rates[1:]), 1e-3 * torch.arange(1, 8, dtype=torch.float64) / 7)
    assert rates[0] == 0
    assert rates[1:].min() == pytest.approx(6.9, abs=0.01)
    assert rates[1:].max() == pytest.approx(8.85, abs=0.01)


def test_dtype_device_and_a_single_head():
    assert decay_rates(4, 0.1).dtype == torch.get_default_dtype()
    assert decay_rates(4, 0.1, dtype=torch.float16, device="meta").device.type == "meta"
    assert decay_rates(1, 0.1).tolist() == [0.0]
    assert decay_rates(3, 0.0).tolist() == [0.0, 0.0, 0.0]
    assert decay_rates(2, 1e6).tolist() == [0.0, 1e6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1), "num_heads must be an integer of at least 1, got 0"),
        ((2.0, 0.1), "num_heads must be an integer"),
        ((2, -0.1), "max_rate must be a finite number of at least 0, got -0.1"),
        ((2, math.nan), "max_rate must be a finite number of at least 0, got nan"),
        ((2, math.inf), "got inf"),
        ((2, "a"), "max_rate must be a finite number of at least 0, got 'a'"),
        ((2, 1.5, "literal"), "max_rate must lie between 0 and 1 for the literal schedule, got 1.5"),
        ((2, 0.1, "linear"), "schedule must be one of exp-uniform, positive, literal, got 'linear'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        decay_rates(*arguments)


def test_weights_are_exact_for_large_exponents():
    """In float32 arithmetic the exponent 40.1 would carry a relative error of 2e-6 into the weight."""
    rates, steps = torch.tensor([0.4010203]), torch.arange(-100.0, 101.0)
    expected = torch.exp(rates.double()[:, None] * steps.double()).unsqueeze(-1)
    weights = decay_weights(rates, steps, torch.float32)
    assert weights.dtype == torch.float32
    assert ((weights.double() - expected) / expected).abs().max() < 6e-8


def test_half_of_the_exponent_range_is_left_to_the_data():
    assert max_exponent(torch.float32) == pytest.approx(22.2, abs=0.1)
    assert max_exponent(torch.float16) == pytest.approx(2.8, abs=0.1)
    assert math.exp(4 * max_exponent(torch.float64)) == pytest.approx(torch.finfo(torch.float64).max)


def test_a_device_without_float64_has_float32():
    assert widest_dtype(torch.device("cpu")) == torch.float64
    assert widest_dtype(torch.device("mps")) == torch.float32
