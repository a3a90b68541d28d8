"""The Toeplitz neural network against dense Toeplitz matrices, entry by entry."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.base import create_mixer
from longlens.mixers.tnn import GatedToeplitz, toeplitz_kernel

WIDTH = 6


def make(**options):
    return GatedToeplitz(WIDTH, **{"rpe_width": 5, "expansion": 1.5, "decay": 0.9} | options, dtype=torch.float64)


def coefficient(layer, distance):
    """t_n (E,)"""
    first, *others = layer.encoder.layers
    hidden = first.weight[:, 0] * distance + first.bias
    for other in others:
        hidden = hidden / hidden.square().mean().sqrt()
        hidden = other.weight @ torch.relu(hidden) + other.bias
    return layer.decay ** abs(distance) * hidden


def reference(layer, x):
    """y of one sequence (L, D)."""
    gate, value = F.silu(layer.in_proj(x)).chunk(2, dim=-1)
    coefficients, rows = {n: coefficient(layer, n) for n in range(1 - len(x), len(x))}, []
    for i in range(len(x)):
        seen = range(len(x) if layer.bidirectional else i + 1)
        rows.append(torch.stack([coefficients[i - j] * value[j] for j in seen]).sum(dim=0))
    return layer.out_proj(gate * torch.stack(rows))


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("options", [{}, {"decay": 1.0}, {"rpe_layers": 0}])
def test_the_formula(options, bidirectional, length):
    layer = make(bidirectional=bidirectional, **options)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), torch.stack([reference(layer, row) for row in x])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_kernel_has_the_coefficients_of_both_sides(bidirectional):
    layer = make(bidirectional=bidirectional)
    behind, *ahead = layer.kernel(23).split(9)
    torch.testing.assert_close(behind[:, 22], coefficient(layer, 22), rtol=0, atol=1e-12)
    torch.testing.assert_close(behind[:, 0], coefficient(layer, 0), rtol=0, atol=1e-12)
    assert len(ahead) == bidirectional
    for part in ahead:
        torch.testing.assert_close(part[:, 0], coefficient(layer, -1), rtol=0, atol=1e-12)
        torch.testing.assert_close(part[:, 22], coefficient(layer, -23), rtol=0, atol=1e-12)


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
        ({"decay": 1.1}, "decay must be above 0 and at most 1, got 1.1"),
        ({"decay": 0.0}, "decay must be above 0 and at most 1, got 0.0"),
        ({"expansion": -1.0}, "expansion must be a number above 0, got -1.0"),
        ({"rpe_layers": -1}, "rpe_layers must be at least 0, got -1"),
        ({"rpe_width": 0}, "rpe_width must be at least 1, got 0"),
    ],
)
def test_errors_say_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        create_mixer("tnn", 8, **options)
