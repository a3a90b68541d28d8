"""The Toeplitz neural network against dense Toeplitz matrices, entry by entry."""

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.registry import create_mixer
from longlens.mixers.tnn import GatedToeplitz, coefficient_reference, tnn_reference, toeplitz_kernel

WIDTH = 6


def make(**options):
    return GatedToeplitz(WIDTH, **{"rpe_width": 5, "expansion": 1.5, "decay": 0.9} | options, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("options", [{}, {"decay": 1.0}, {"rpe_layers": 0}])
def test_the_formula(options, bidirectional, length):
    layer = make(bidirectional=bidirectional, **options)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), torch.stack([tnn_reference(layer, row) for row in x])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_kernel_has_the_coefficients_of_both_sides(bidirectional):
    layer = make(bidirectional=bidirectional)
    back, *later = layer.kernel(23).split(9)
    torch.testing.assert_close(back[:, 22], coefficient_reference(layer, 22), rtol=0, atol=1e-12)
    torch.testing.assert_close(back[:, 0], coefficient_reference(layer, 0), rtol=0, atol=1e-12)
    assert len(later) == bidirectional
    for part in later:
        torch.testing.assert_close(part[:, 0], coefficient_reference(layer, -1), rtol=0, atol=1e-12)
        torch.testing.assert_close(part[:, 22], coefficient_reference(layer, -23), rtol=0, atol=1e-12)


def test_the_kernel_does_not_depend_on_the_length():
    layer = make()
    torch.testing.assert_close(layer.kernel(101)[:, :23], layer.kernel(23), rtol=0, atol=1e-12)


def test_coefficients_by_hand():
    kernel = toeplitz_kernel(lambda n: torch.cat([n, 1 + n * n], dim=1), 0.5, torch.tensor([0.0, 1.0, 2.0, -1.0]))
    torch.testing.assert_close(kernel, torch.tensor([[0.0, 0.5, 0.5, -0.5], [1.0, 1.0, 1.25, 1.0]]))


def test_autocast_does_not_round_distances():
    layer = GatedToeplitz(16, decay=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        actual = layer.kernel(2048)
    torch.testing.assert_close(actual, layer.double().kernel(2048).float(), rtol=0, atol=1e-5)


def test_a_layer_in_bfloat16_counts_beyond_256():
    layer = GatedToeplitz(16, decay=1.0, bidirectional=False, dtype=torch.bfloat16)
    kernel = layer.kernel(2048)
    assert kernel.dtype == torch.float32
    torch.testing.assert_close(kernel, layer.double().kernel(2048).float(), rtol=0, atol=1e-5)
    assert (kernel[:, 1:] != kernel[:, :-1]).any(dim=0).all(), "no two distances are the same"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.1}, "decay must be a number above 0 and at most 1, got 1.1"),
        ({"decay": 0.0}, "decay must be a number above 0 and at most 1, got 0.0"),
        ({"expansion": -1.0}, "expansion must be a number above 0, got -1.0"),
        ({"rpe_layers": -1}, "rpe_layers must be a whole number of at least 0, got -1"),
        ({"rpe_width": 0}, "rpe_width must be a whole number of at least 1, got 0"),
    ],
)
def test_errors_say_what_is_allowed(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("tnn", 8, **options)
