"""The Toeplitz neural network against dense Toeplitz matrices, entry by entry."""

from itertools import product

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.registry import create_mixer
from longlens.mixers.tnn import GatedToeplitz, coefficient_reference, tnn_reference, toeplitz_kernel
from longlens.models.model import create_model
from longlens.tasks.base import Spec

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
def test_rows_and_columns_of_an_image(bidirectional):
    """Pixel (i, j) gets R·C·v + C·R·v: the sum of (r_{j - m}·c_{i - k} + c_{i - k}·r_{j - m})·v_km over all (k, m)."""
    layer = make(shape=(3, 4), bidirectional=bidirectional)
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    gate, value = torch.nn.functional.silu(layer.in_proj(x)).chunk(2, dim=-1)
    rows = []
    for i, j in product(range(3), range(4)):
        total = torch.zeros_like(value[:, 0])
        for k, m in product(range(3), range(4)):
            if bidirectional or (k <= i and m <= j):
                column = coefficient_reference(layer, i - k, layer.column_encoder)
                row = coefficient_reference(layer, j - m, layer.encoder)
                total = total + (column * row + row * column) * value[:, 4 * k + m]
        rows.append(total)
    expected = layer.out_proj(gate * torch.stack(rows, dim=1))
    actual = layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-9)


def test_a_model_of_images_has_two_dimensions():
    spec = Spec(inputs="real", size=1, head="classify", outputs=2, max_length=12, metric="accuracy", shape=(3, 4))
    assert create_model(spec, "tnn", width=8, depth=1).blocks[0].mixer.shape == (3, 4)
    assert create_model(spec, "tnn", width=8, depth=1, two_dimensional=False).blocks[0].mixer.shape is None


def test_sequences_have_one_dimension():
    sequence, image = make(), make(shape=(3, 4), two_dimensional=False)
    assert sequence.column_encoder is image.column_encoder is None
    image.load_state_dict(sequence.state_dict())
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    assert torch.equal(sequence(x), image(x))
    with pytest.raises(BadInput, match=r"x must have 3·4 tokens, those of an image, got 13"):
        make(shape=(3, 4))(torch.randn(1, 13, WIDTH, dtype=torch.float64))


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
