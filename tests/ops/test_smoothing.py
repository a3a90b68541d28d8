import math

import pytest
import torch
import torch.nn.functional as F

from longlens import smooth_values
from longlens.ops.smoothing import smooth_values_reference


@pytest.mark.parametrize("length", [1, 2, 4, 9, 63])
@pytest.mark.parametrize("side", ["past", "centered"])
@pytest.mark.parametrize("smoothing", [1, 3, 5, 7, [0.2, 0.5, 0.3]])
def test_equals_the_toeplitz_matrix(smoothing, side, length):
    value = torch.randn(2, 3, length, 4, dtype=torch.float64)
    expected = smooth_values_reference(value, smoothing, side)
    torch.testing.assert_close(smooth_values(value, smoothing, side), expected, rtol=0, atol=1e-14)


def test_past_is_the_causal_moving_average():
    value = torch.randn(1, 1, 20, 3, dtype=torch.float64)
    smoothed = smooth_values(value, 5)
    for n in range(20):
        expected = value[0, 0, max(0, n - 4) : n + 1].sum(0) / 5
        torch.testing.assert_close(smoothed[0, 0, n], expected, rtol=0, atol=1e-14)


def test_centered_is_average_pooling():
    value = torch.randn(2, 6, 20, dtype=torch.float64)  # (B, d, L)
    expected = F.avg_pool1d(value, 5, stride=1, padding=2, count_include_pad=True)
    torch.testing.assert_close(smooth_values(value.mT, 5, "centered").mT, expected, rtol=0, atol=1e-14)


def test_a_kernel_moves_weight_to_the_past_in_its_order():
    """f[0] stays, f[1] moves one step: an impulse at n spreads to n, n + 1, … in the values."""
    value = torch.zeros(1, 4, 1)
    value[0, 1] = 1.0
    assert smooth_values(value, [0.5, 0.25]).flatten().tolist() == [0.0, 0.5, 0.25, 0.0]
    assert smooth_values(value, [0.5, 0.25, 0.125], "centered").flatten().tolist() == [0.5, 0.25, 0.125, 0.0]


@pytest.mark.parametrize("side", ["past", "centered"])
def test_gradients_of_first_and_second_order(side):
    value = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, k: smooth_values(v, k, side), (value, kernel))
    assert torch.autograd.gradgradcheck(lambda v: smooth_values(v, 3, side), (value,))


def test_low_precision_rounds_once():
    value = torch.randn(1, 500, 8, dtype=torch.bfloat16)
    expected = smooth_values(value.double(), 5)
    half_a_step = torch.finfo(torch.bfloat16).eps / 2 * expected.abs()
    assert ((smooth_values(value, 5) - expected).abs() <= half_a_step + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_kernel_is_a_sum_in_float32(dtype):
    """It is one over all values, which a half-precision number may not hold."""
    value, kernel = torch.rand(2, 8, 512, 16).to(dtype), torch.tensor([0.5, 0.5], requires_grad=True)
    exact = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(smooth_values(value, kernel).float().sum(), kernel)
    (expected,) = torch.autograd.grad(smooth_values(value.double(), exact).sum(), exact)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=0)


def test_vmap():
    value = torch.randn(4, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(lambda v: smooth_values(v, 3))(value), smooth_values(value, 3))


@pytest.mark.parametrize(
    ("smoothing", "side", "error", "message"),
    [
        (4, "past", ValueError, "smoothing must be an odd window of at least 1, or a 1-D kernel, got 4"),
        (0, "past", ValueError, "got 0"),
        (-3, "past", ValueError, "got -3"),
        (True, "past", TypeError, "got a bool"),
        (2.5, "past", TypeError, "got a float"),
        ("5", "past", TypeError, "got a str"),
        ([], "past", ValueError, "at least one weight, got none"),
        (torch.ones(2, 2), "past", ValueError, r"got a tensor of shape \(2, 2\)"),
        (torch.ones(3, dtype=torch.long), "past", TypeError, "floating-point weights, got torch.int64"),
        ([0.5, 0.5], "centered", ValueError, "odd length to be centered, got a kernel of 2 weights"),
        ([0.5, math.nan, 0.5], "past", ValueError, "finite numbers, got nan"),
        (["a"], "past", ValueError, "finite numbers, got 'a'"),
        (3, "future", ValueError, "side must be one of past, centered, got 'future'"),
    ],
)
def test_bad_arguments(smoothing, side, error, message):
    with pytest.raises(error, match=message):
        smooth_values(torch.zeros(1, 4, 1), smoothing, side)
