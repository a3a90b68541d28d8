import math

import pytest
import torch

from longlens.ops.exponentials import (
    as_complex,
    decay_factors,
    step_exponentials,
    sum_of_exponentials,
    sum_of_exponentials_reference,
)

KINDS = {"real": torch.float64, "complex": torch.complex128}
LENGTHS = (1, 2, 3, 23, 64, 101)


def modes(weights="complex", rates="complex", channels=6, groups=6, size=5):
    """Random weights and decaying rates, as leaves."""
    w = torch.randn(channels, size, dtype=KINDS[weights])
    r = torch.randn(groups, size, dtype=KINDS[rates])
    r = torch.complex(-r.real.abs() / 5, 4 * r.imag) if r.is_complex() else -r.abs() / 5
    return w.requires_grad_(), r.requires_grad_()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("groups", [6, 3, 1])
@pytest.mark.parametrize("rates", KINDS)
@pytest.mark.parametrize("weights", KINDS)
def test_it_is_the_sum_with_its_gradients(weights, rates, groups, length):
    leaves = modes(weights, rates, groups=groups)
    upstream = torch.randn(6, length, dtype=torch.float64)
    results = []
    for function in (sum_of_exponentials, sum_of_exponentials_reference):
        kernel = function(*leaves, length)
        assert kernel.dtype == torch.float64
        results.append((kernel, *torch.autograd.grad(kernel, leaves, upstream)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-11)


def test_a_case_by_hand():
    weights = torch.tensor([[2.0, 1.0j]], dtype=torch.complex128)
    rates = torch.tensor([[-math.log(2), 0.5j * math.pi]], dtype=torch.complex128)  # 2·½^l and Re(i·i^l)
    expected = torch.tensor([[2.0, 1 - 1, 0.5, 0.25 + 1, 0.125]], dtype=torch.float64)
    torch.testing.assert_close(sum_of_exponentials(weights, rates, 5), expected)


def test_what_vanishes_at_once_has_a_gradient():
    weights, rates = torch.ones(1, 1).requires_grad_(), torch.full((1, 1), -torch.inf).requires_grad_()
    kernel = sum_of_exponentials(weights, rates, 9)
    assert kernel.tolist() == [[1.0] + [0.0] * 8]
    kernel.sum().backward()
    assert weights.grad == 1
    assert rates.grad == 0


def test_it_takes_any_strides():
    weights, rates = modes()
    expected = sum_of_exponentials(weights, rates, 11)
    strided = [x.detach().conj_physical().T.contiguous().T.conj() for x in (weights, rates)]
    torch.testing.assert_close(sum_of_exponentials(*strided, 11), expected.detach())
    (of_sum,) = torch.autograd.grad(expected.sum(), rates, retain_graph=True)  # from a gradient without strides
    (of_ones,) = torch.autograd.grad(expected, rates, torch.ones(6, 11, dtype=torch.float64))
    torch.testing.assert_close(of_sum, of_ones)


def test_large_angles_keep_their_digits_in_float32():
    """exp(λ·l) of a rounded λ·l would lose three more of them."""
    weights, rates = (x.detach() for x in modes())
    rates = torch.complex(rates.real / 1e4, rates.imag).to(torch.complex64)
    weights = weights.to(torch.complex64)
    expected = sum_of_exponentials_reference(weights.to(torch.complex128), rates.to(torch.complex128), 10_000)
    assert (sum_of_exponentials(weights, rates, 10_000) - expected).abs().max() < 1e-5


def test_full_precision_under_autocast_and_for_half():
    weights, rates = (x.detach() for x in modes("real", "real"))
    weights, rates = weights.float().requires_grad_(), rates.float().requires_grad_()
    expected = torch.autograd.grad(sum_of_exponentials(weights, rates, 50).square().sum(), rates)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(sum_of_exponentials(weights, rates, 50).square().sum(), rates)
    assert torch.equal(*expected, *actual)
    assert sum_of_exponentials(weights.bfloat16(), rates.bfloat16(), 50).dtype == torch.float32


def test_complex_numbers_are_made_of_two_reals_of_single_precision_at_least():
    parameter = torch.randn(3, 4, 2, dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rounded = parameter.to(dtype)
        assert torch.equal(as_complex(rounded), torch.view_as_complex(rounded.float()))
    strided = parameter.transpose(0, 1)
    assert torch.equal(as_complex(strided), torch.complex(strided[..., 0], strided[..., 1]))


@pytest.mark.parametrize("weights", KINDS)
def test_length_zero(weights):
    leaves = modes(weights, groups=3)
    kernel = sum_of_exponentials(*leaves, 0)
    assert kernel.shape == (6, 0)
    assert kernel.dtype == torch.float64
    (gradient,) = torch.autograd.grad(kernel.sum(), leaves[0])
    assert not gradient.any()


def test_steps_of_half_precision_have_an_exact_state():
    weights, rates = (x.detach().to(torch.complex64) for x in modes())
    decay = decay_factors(rates)
    x, state, exact_state = torch.randn(23, 3, 6, dtype=torch.bfloat16), None, None
    for now in x:
        y, state = step_exponentials(weights, decay, now, state)
        expected, exact_state = step_exponentials(weights, decay, now.float(), exact_state)
        assert y.dtype == torch.bfloat16
        assert torch.equal(state, exact_state)
        assert torch.equal(y, expected.bfloat16())


@pytest.mark.parametrize("groups", [6, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence_is_the_convolution(kind, groups):
    weights, rates = modes(kind, kind, groups=groups)
    x = torch.randn(3, 23, 6, dtype=torch.float64)
    state, kernel = None, sum_of_exponentials_reference(weights, rates, 23)
    for t in range(23):
        before = None if state is None else state.clone()
        y, following = step_exponentials(weights, decay_factors(rates), x[:, t], state)
        torch.testing.assert_close(y, torch.einsum("bjd,dj->bd", x[:, : t + 1], kernel[:, : t + 1].flip(1)))
        assert before is None or torch.equal(state, before), "a step leaves the given state as it was"
        state = following


def test_errors():
    weights, rates = modes()
    for bad in (rates[:, :4], rates[:4], rates[0]):
        with pytest.raises(ValueError, match=r"weights must have the shape \(channels, N\) and rates \(groups, N\)"):
            sum_of_exponentials(weights, bad, 5)
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        sum_of_exponentials(weights, rates, -1)
