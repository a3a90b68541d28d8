"""The HiPPO-LegS matrix: the printed formula on a case done by hand, what it is for, and its form as diagonal plus low
rank."""

import math

import numpy
import pytest
import torch

from longlens.ops.hippo import dplr_legs, hippo_legs


def test_the_printed_formula_by_hand():
    a, b = hippo_legs(3)
    root3, root5, root15 = math.sqrt(3), math.sqrt(5), math.sqrt(15)
    expected = [[-1, 0, 0], [-root3, -2, 0], [-root5, -root15, -3]]
    torch.testing.assert_close(a, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(b, torch.tensor([1, root3, root5], dtype=torch.float64))


def test_its_impulse_responses_are_legendre_polynomials():
    """exp(t·A)·B = exp(-t)·√(2n+1)·P_n(2·exp(-t) - 1)"""
    a, b = hippo_legs(7)
    for t in (0.0, 0.3, 2.0):
        point = 2 * math.exp(-t) - 1
        basis = [numpy.polynomial.legendre.Legendre.basis(n)(point) for n in range(7)]
        expected = math.exp(-t) * b * torch.tensor(basis, dtype=torch.float64)
        torch.testing.assert_close(torch.linalg.matrix_exp(t * a) @ b, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 6, 64, 256])
def test_diagonal_plus_low_rank_is_the_same_matrix(n):
    a, b = hippo_legs(n)
    rates, p, b_diagonal, vectors = dplr_legs(n)
    assert rates.dtype == p.dtype == b_diagonal.dtype == vectors.dtype == torch.complex128
    assert rates.shape == p.shape == b_diagonal.shape == (n // 2,)
    low_rank = 2 * (vectors @ p).real
    again = 2 * (vectors @ torch.diag(rates) @ vectors.mH).real - torch.outer(low_rank, low_rank)
    torch.testing.assert_close(again, a, rtol=0, atol=1e-12 * n**2)
    torch.testing.assert_close(2 * (vectors @ b_diagonal).real, b, rtol=0, atol=1e-13 * n**2)
    one = torch.eye(n // 2, dtype=vectors.dtype)
    torch.testing.assert_close(vectors.mH @ vectors, one, rtol=0, atol=1e-13)
    torch.testing.assert_close(vectors.mT @ vectors, 0 * one, rtol=0, atol=1e-11)


def test_the_half_with_positive_frequencies_and_positive_inputs():
    rates, p, b, _ = dplr_legs(64)
    assert (rates.real == -0.5).all()
    assert (rates.imag > 0).all()
    assert (rates.imag.diff() > 0).all()
    assert (p.real > 0).all()
    assert (p.imag == 0).all()
    torch.testing.assert_close(b, math.sqrt(2) * p)


def test_the_default_dtype_and_device_do_not_matter():
    expected = dplr_legs(8)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            torch.testing.assert_close(dplr_legs(8), expected, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_errors_say_what_is_allowed():
    with pytest.raises(ValueError, match="n must be an even number of at least 2, for conjugate pairs, got 7"):
        dplr_legs(7)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        hippo_legs(0)
