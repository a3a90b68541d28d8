"""The convolution by FFT against its definition, the L×L matrix of each channel."""

import pytest
import torch
import torch.nn.functional as F

from longlens.ops.long_conv import fast_size, long_conv, long_conv_reference


def compare(x, kernel, later=None, atol=1e-12):
    given = [t.requires_grad_() for t in (x, kernel, later) if t is not None]
    actual, expected = long_conv(x, kernel, later), long_conv_reference(x, kernel, later)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, given, weight) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=10 * atol)


@pytest.mark.parametrize("both_sides", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 23, 64, 101])
def test_equals_the_toeplitz_matrix_with_its_gradients(length, both_sides):
    x = torch.randn(2, length, 3, dtype=torch.float64)
    for taps in {1, max(1, length // 2), length - 1, length, length + 1, 2 * length, 3 * length + 1} - {0}:
        kernel = torch.randn(3, taps, dtype=torch.float64)
        compare(x, kernel, torch.randn(3, taps, dtype=torch.float64) if both_sides else None)


def test_kernels_of_both_sides_may_differ_in_length():
    x = torch.randn(2, 17, 3, dtype=torch.float64)
    for back, on in ((4, 30), (30, 4), (1, 1), (17, 16), (0, 5), (5, 0)):
        compare(x, torch.randn(3, back, dtype=torch.float64), torch.randn(3, on, dtype=torch.float64))


def test_by_hand():
    """Each tap weighs the input so many steps back; those of later inputs begin with the next one."""
    x = torch.zeros(1, 5, 1, dtype=torch.float64)
    x[0, 2] = 1.0
    kernel = torch.tensor([[2.0, 3.0, 5.0, 7.0]], dtype=torch.float64)
    later = torch.tensor([[11.0, 13.0, 17.0]], dtype=torch.float64)
    for function in (long_conv, long_conv_reference):
        back, both = function(x, kernel), function(x, kernel, later)
        torch.testing.assert_close(back.flatten(), torch.tensor([0.0, 0, 2, 3, 5]).double(), rtol=0, atol=1e-13)
        torch.testing.assert_close(both.flatten(), torch.tensor([13.0, 11, 2, 3, 5]).double(), rtol=0, atol=1e-13)


def test_equals_the_convolution_of_torch():
    x, kernel = torch.randn(2, 50, 4, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    expected = F.conv1d(F.pad(x.mT, (8, 0)), kernel.flip(1)[:, None], groups=4).mT
    torch.testing.assert_close(long_conv(x, kernel), expected, rtol=0, atol=1e-12)


def test_the_kernel_behind_the_sequence_gets_no_gradient():
    x, kernel = torch.randn(1, 5, 2), torch.randn(2, 9, requires_grad=True)
    long_conv(x, kernel).sum().backward()
    assert kernel.grad is not None
    assert (kernel.grad[:, 5:] == 0).all()
    assert (kernel.grad[:, :5] != 0).all()


def test_later_inputs_do_not_leak_but_for_rounding():
    x, kernel = torch.randn(1, 101, 2, dtype=torch.float64), torch.randn(2, 101, dtype=torch.float64)
    before = long_conv(x, kernel)
    for t in (1, 50, 100):
        changed = x.clone()
        changed[:, t:] = torch.randn_like(changed[:, t:])
        torch.testing.assert_close(long_conv(changed, kernel)[:, :t], before[:, :t], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    x, kernel, later = torch.randn(2, 200, 3).to(dtype), torch.randn(3, 200) / 10, torch.randn(3, 200) / 10
    output = long_conv(x, kernel, later)
    assert output.dtype == dtype
    expected = long_conv_reference(x.double(), kernel.double(), later.double())
    assert ((output - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-5).all()
    lowered = long_conv(x, kernel.to(dtype))
    expected = long_conv_reference(x.double(), kernel.to(dtype).double())
    assert ((lowered - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-5).all()


def test_gradients_have_the_types_of_their_arguments():
    x = torch.randn(2, 9, 3, dtype=torch.bfloat16, requires_grad=True)
    kernel = torch.randn(3, 9, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        long_conv(x, kernel).float().sum().backward()
    assert x.grad is not None
    assert kernel.grad is not None
    assert (x.grad.dtype, kernel.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_what_is_asked_for_gets_a_gradient(needs):
    x, kernel = torch.randn(2, 9, 3), torch.randn(3, 9)
    x.requires_grad_(needs[0])
    kernel.requires_grad_(needs[1])
    long_conv(x, kernel).sum().backward()
    assert (x.grad is not None, kernel.grad is not None) == needs


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_what_is_empty_stays_empty(shape):
    assert long_conv(torch.zeros(shape), torch.zeros(shape[-1], 5)).shape == shape


def test_inputs_of_any_strides():
    x, kernel = torch.randn(3, 2, 31, dtype=torch.float64), torch.randn(31, 3, dtype=torch.float64)
    compare(x.permute(1, 2, 0).detach(), kernel.T.detach())


@pytest.mark.parametrize("least", [0, 1, 2, 7, 11, 46, 97, 2047, 2049, 32768, 100_003])
def test_fast_sizes_have_small_factors_and_are_the_next(least):
    def smooth(size):
        for factor in (2, 3, 5):
            while size % factor == 0:
                size //= factor
        return size == 1

    size = fast_size(least)
    assert smooth(size)
    assert not any(smooth(smaller) for smaller in range(max(least, 1), size))


@pytest.mark.parametrize(
    ("x", "kernel", "later", "message"),
    [
        ((5, 3), (3, 5), None, r"x must have the shape \(batch, length, channels\), got \(5, 3\)"),
        ((2, 5, 3), (4, 5), None, r"kernel must have the shape \(3, length\), got \(4, 5\)"),
        ((2, 5, 3), (3,), None, r"kernel must have the shape \(3, length\), got \(3,\)"),
        ((2, 5, 3), (3, 5), (2, 5), r"later must have the shape \(3, length\), got \(2, 5\)"),
    ],
)
def test_wrong_shapes_are_named(x, kernel, later, message):
    with pytest.raises(ValueError, match=message):
        long_conv(torch.ones(x), torch.ones(kernel), None if later is None else torch.ones(later))
