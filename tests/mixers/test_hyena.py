import math

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.hyena import (
    Hyena,
    hyena_filters_reference,
    hyena_projections_reference,
    hyena_reference,
    implicit_filters,
)
from longlens.ops.long_conv import long_conv

LENGTH, WIDTH = 23, 6


def build(**options):
    layer = Hyena(WIDTH, **{"filter_width": 8, "bands": 3, "max_length": 40, "dtype": torch.float64} | options)
    torch.nn.init.uniform_(layer.frequency, 0.5, 2.0)
    if layer.features is not None:
        with torch.no_grad():  # away from the start
            layer.features += 0.1 * torch.randn_like(layer.features)
    return layer


def test_implicit_filters_by_hand():
    """h(t) = 5·sin(2·(3t + 1)) in windows ½ᵗ + 1 and ¼ᵗ + 1."""
    weight, bias, last = (torch.tensor(x, dtype=torch.float64) for x in ([[3.0]], [1.0], [[5.0], [5.0]]))
    time, frequency = torch.arange(4, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    rates = torch.tensor([2.0, 4.0], dtype=torch.float64).log()
    filters = implicit_filters([weight, bias, last], frequency, time[:, None], time, rates, 1.0)
    expected = [[5 * math.sin(2 * (3 * t + 1)) * (base**t + 1) for t in range(4)] for base in (0.5, 0.25)]
    torch.testing.assert_close(filters, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("padding", [0.0, 0.3])
@pytest.mark.parametrize(
    "options", [{}, {"learn_features": False}, {"order": 3, "shift": 0.1}, {"order": 4, "bands": 1}], ids=str
)
def test_it_is_a_product_with_a_matrix_that_the_inputs_decide(options, padding):
    layer = build(**options)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, LENGTH) > padding
    actual, expected = layer(x, mask=mask if padding else None), hyena_reference(layer, x, mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], upstream) for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def test_the_kernel_is_its_formula_also_past_the_longest_length():
    for options in ({}, {"order": 3}):
        layer = build(max_length=11, **options)
        torch.testing.assert_close(layer.kernel(LENGTH), hyena_filters_reference(layer, LENGTH), rtol=0, atol=1e-13)


def test_order_2_is_a_gated_convolution():
    """q ⊙ (h * (k ⊙ v) + skip ⊙ k ⊙ v), as the blog post of the authors writes it."""
    layer, x = build(), torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    q, k, v = hyena_projections_reference(layer, x, torch.ones(1, LENGTH))
    expected = layer.out_proj(q * (long_conv(k * v, layer.kernel(LENGTH)) + layer.skip[0] * k * v))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_a_filter_does_not_depend_on_the_length_of_the_batch():
    layer = build()
    for length in (1, 5, LENGTH):
        torch.testing.assert_close(layer.kernel(length), layer.kernel(60)[:, :length], rtol=0, atol=1e-14)


def test_windows_fall_to_1_percent_within_their_share_of_the_length():
    layer = build(max_length=1001, fast_decay=0.3, slow_decay=0.9)
    with torch.no_grad():
        for linear in layer.filter:
            linear.weight.zero_()
        for linear in layer.filter[:3]:
            linear.bias.fill_(1.0)
        layer.filter[3].weight.fill_(1.0)
    window = layer.kernel(1000) / layer.kernel(1)
    assert window[0, 900].item() == pytest.approx(0.01)
    assert window[-1, 300].item() == pytest.approx(0.01)


def test_filters_are_exact_under_autocast():
    layer = build(max_length=4096, frequency=14.0, bands=16, learn_features=False).float()
    expected = layer.kernel(4096)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer.kernel(4096), expected, rtol=0, atol=0)
    assert layer.bfloat16().kernel(LENGTH).dtype == torch.float32


def test_wrong_options_are_refused():
    for options, message in (
        ({"order": 1}, "order must be a whole number of at least 2, got 1"),
        ({"filter_width": 0}, "filter_width must be a whole number of at least 1, got 0"),
        ({"bands": 0}, "bands must be a whole number of at least 1, got 0"),
        ({"fast_decay": 2.0}, r"fast_decay must be at most slow_decay, got fast_decay=2\.0 and slow_decay=1\.5"),
        ({"fast_decay": 0.0}, "fast_decay must be a number above 0, got 0.0"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
    ):
        with pytest.raises(BadInput, match=message):
            Hyena(WIDTH, **options)


def test_the_parameters_of_the_filter_and_the_skip_have_names():
    for order in (2, 3):
        layer = Hyena(WIDTH, order=order)
        names = {name for name, _ in layer.named_parameters()}
        learned = {name for name in names if name.startswith(("filter", "frequency"))}
        assert set(layer.kernel_parameters) == {*learned, "features"}
        assert set(Hyena(WIDTH, learn_features=False).kernel_parameters) == learned
        assert layer.groups["positions"] == ("features",)
        assert layer.skip.ndim == 2
        assert Hyena.no_decay == ("skip",)


def test_position_features_start_as_waves_and_leave_the_window_alone():
    """[t/(T-1), cos(2πft/T), …, -sin(2πft/T), …]: with them the filter is that without learned ones; the window keeps
    its t whatever is learned."""
    learned, fixed = Hyena(WIDTH, max_length=40), Hyena(WIDTH, max_length=40, learn_features=False)
    learned.load_state_dict(fixed.state_dict(), strict=False)
    assert learned.features.shape == (40, 33)
    for t in (0, 1, 17, 39):
        turns = [1e-4 + band * (15 - 1e-4) / 15 for band in range(16)]
        angles = [2 * math.pi * turn * t / 40 for turn in turns]
        expected = torch.tensor([t / 39, *map(math.cos, angles), *(-math.sin(angle) for angle in angles)])
        torch.testing.assert_close(learned.features[t].detach(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(learned.kernel(60), fixed.kernel(60), rtol=0, atol=0)
    with torch.no_grad():
        learned.features.zero_()
    window = learned.kernel(40) / learned.kernel(1)
    slow, fast = math.log(100) / 1.5, math.log(100) / 0.3
    assert window[0, 39].item() == pytest.approx(math.exp(-slow), rel=1e-4)
    assert window[-1, 39].item() == pytest.approx(math.exp(-fast), rel=1e-4)
