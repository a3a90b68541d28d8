"""The linear recurrence against its definition, step by step."""

import pytest
import torch

from longlens.ops import scan
from longlens.ops.scan import linear_scan, linear_scan_reference

# One step; a few, one after the other; one more than that; odd; a full block, and one more; a scan of blocks of blocks.
LENGTHS = [1, 2, 31, 32, 33, 101, 256, 257, 1100]


def arguments(length, *, constant, dtype=torch.complex128, batch=2, width=3):
    decay = torch.randn(width) if constant else torch.randn(batch, length, width)
    decay = torch.exp(-decay.abs() * 0.1).to(dtype)
    inputs = torch.randn(batch, length, width).to(dtype)
    if dtype.is_complex:
        decay = decay * torch.exp(1j * torch.randn(decay.shape)).to(dtype)
        inputs = inputs + 1j * torch.randn(inputs.shape)
    return [x.requires_grad_() for x in (decay, inputs)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_recurrence_with_its_gradients(length, constant, reverse, dtype):
    given = arguments(length, constant=constant, dtype=dtype)
    actual, expected = linear_scan(*given, reverse=reverse), linear_scan_reference(*given, reverse=reverse)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weight.conj()).real.sum(), given) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_by_hand():
    decay = torch.tensor([[[2.0], [3.0], [5.0]]])
    inputs = torch.tensor([[[1.0], [10.0], [100.0]]])
    assert linear_scan(decay, inputs).flatten().tolist() == [1.0, 13.0, 165.0]
    assert linear_scan(decay, inputs, reverse=True).flatten().tolist() == [621.0, 310.0, 100.0]
    assert linear_scan(torch.tensor([2.0]), inputs).flatten().tolist() == [1.0, 12.0, 124.0]


@pytest.mark.slow
@pytest.mark.parametrize("constant", [True, False])
def test_gradients_are_those_of_finite_differences(constant, monkeypatch):
    monkeypatch.setattr(scan, "_SHORT", 4)  # so that nine steps are blocks already
    given = arguments(9, constant=constant, width=2, batch=1)
    for reverse in (False, True):
        assert torch.autograd.gradcheck(lambda d, x, r=reverse: linear_scan(d, x, reverse=r), given)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("constant", [True, False])
def test_nothing_leaks_from_later_steps(constant, reverse):
    """Not even by rounding."""
    decay, inputs = arguments(200, constant=constant)
    before = linear_scan(decay, inputs, reverse=reverse)
    for t in (1, 50, 128, 199):
        changed = inputs.detach().clone()
        later = slice(None, 200 - t) if reverse else slice(t, None)
        changed[:, later] = 1e6
        kept = slice(200 - t, None) if reverse else slice(None, t)
        assert torch.equal(linear_scan(decay, changed, reverse=reverse)[:, kept], before[:, kept])


def test_a_real_decay_of_complex_inputs_and_the_other_way_round():
    decay, inputs = arguments(40, constant=True)
    for a, x in ((decay.abs().detach(), inputs), (decay, inputs.real)):
        actual, expected = linear_scan(a, x), linear_scan_reference(a, x)
        assert actual.dtype == torch.complex128
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    a = decay.abs().detach().requires_grad_()
    (gradient,) = torch.autograd.grad(linear_scan(a, inputs).abs().sum(), a)
    (expected,) = torch.autograd.grad(linear_scan_reference(a, inputs).abs().sum(), a)
    assert not gradient.is_complex()
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)


def test_decays_of_zero_and_one():
    """They forget all, and sum up all."""
    inputs = torch.randn(2, 300, 1, dtype=torch.float64)
    torch.testing.assert_close(linear_scan(torch.zeros(1, dtype=torch.float64), inputs), inputs, rtol=0, atol=0)
    total = linear_scan(torch.ones(1, dtype=torch.float64), inputs)
    torch.testing.assert_close(total, inputs.cumsum(1), rtol=0, atol=1e-12)


def test_float32_is_as_good_as_stepping():
    decay, inputs = (x.detach() for x in arguments(3000, constant=True))
    expected = linear_scan(decay, inputs)
    single = decay.to(torch.complex64), inputs.to(torch.complex64)
    errors = [(h - expected).abs().max() for h in (linear_scan(*single), linear_scan_reference(*single))]
    assert errors[0] <= 3 * errors[1]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 50, 3), (0, 5, 3), (2, 50, 0)])
def test_what_is_empty_stays_empty(shape, constant):
    inputs = torch.zeros(shape, requires_grad=True)
    decay = torch.ones(shape[-1] if constant else shape, requires_grad=True)
    output = linear_scan(decay, inputs)
    assert output.shape == shape
    output.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.shape == shape


def test_arguments_are_not_changed():
    for length in (5, 100):
        for constant in (True, False):
            given = arguments(length, constant=constant)
            copies = [x.detach().clone() for x in given]
            linear_scan(*given).abs().sum().backward()
            for x, copy in zip(given, copies, strict=True):
                assert torch.equal(x, copy)


@pytest.mark.parametrize(
    ("decay", "inputs", "message"),
    [
        ((3,), (5, 3), r"inputs must have the shape \(batch, length, width\), got \(5, 3\)"),
        ((4,), (2, 5, 3), r"decay must have the shape \(3,\) or that of inputs, \(2, 5, 3\), got \(4,\)"),
        ((5, 3), (2, 5, 3), r"decay must have the shape \(3,\) or that of inputs, \(2, 5, 3\), got \(5, 3\)"),
    ],
)
def test_wrong_shapes_are_named(decay, inputs, message):
    with pytest.raises(ValueError, match=message):
        linear_scan(torch.ones(decay), torch.ones(inputs))
