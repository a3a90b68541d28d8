import math

import pytest
import torch
import torch.nn.functional as F

from longlens.errors import BadInput
from longlens.mixers.long_conv import LongConv, squashed_kernel, squashed_kernel_reference
from longlens.mixers.registry import choose_mixer
from longlens.ops.long_conv import long_conv_reference

LENGTH, WIDTH = 23, 6


@pytest.mark.parametrize("smooth", [1, 3, 7])
@pytest.mark.parametrize("squash", [0.0, 0.3])
def test_the_kernel_is_its_formula(smooth, squash):
    weights = torch.randn(3, 17, dtype=torch.float64, requires_grad=True)
    for length in (1, 2, 11, 17, LENGTH):
        kernels = [
            build(weights, length, squash=squash, smooth=smooth)
            for build in (squashed_kernel, squashed_kernel_reference)
        ]
        torch.testing.assert_close(*kernels, rtol=0, atol=1e-14)
        upstream = torch.randn(3, length, dtype=torch.float64)
        gradients = [torch.autograd.grad(kernel, weights, upstream)[0] for kernel in kernels]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


@pytest.mark.parametrize("max_length", [40, 11])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_layer_is_a_product_with_toeplitz_matrices(bidirectional, max_length):
    options = {"squash": 0.01, "smooth": 3, "max_length": max_length}
    layer = LongConv(WIDTH, bidirectional=bidirectional, dtype=torch.float64, **options)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    sides = [squashed_kernel_reference(weight, LENGTH, squash=0.01, smooth=3) for weight in layer.weight.split(WIDTH)]
    expected = F.glu(layer.out_proj(F.gelu(long_conv_reference(x, *sides) + layer.skip * x)), dim=-1)

    actual = layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(actual)
    gradients = [torch.autograd.grad(result, [x, *layer.parameters()], upstream) for result in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


@pytest.mark.parametrize("output", ["glu", "linear"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_two_kernels_of_each_channel_are_two_convolutions_before_one_projection(bidirectional, output):
    """u_c = gelu(k_c * x + skip_c ⊙ x) for c = 1, 2, and W (2D -> D, or 2D for a GLU) of both together."""
    layer = LongConv(WIDTH, channels=2, bidirectional=bidirectional, output=output, max_length=40, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    assert layer.weight.shape == ((4 if bidirectional else 2) * WIDTH, 40)
    assert layer.out_proj.weight.shape == ((2 if output == "glu" else 1) * WIDTH, 2 * WIDTH)
    sides = [squashed_kernel_reference(weight, LENGTH, squash=0.003) for weight in layer.weight.split(2 * WIDTH)]
    parts = []
    for own in (slice(WIDTH), slice(WIDTH, 2 * WIDTH)):
        parts.append(F.gelu(long_conv_reference(x, *(side[own] for side in sides)) + layer.skip[own] * x))
    expected = torch.cat(parts, dim=-1) @ layer.out_proj.weight.T + layer.out_proj.bias
    if output == "glu":
        expected = expected[..., :WIDTH] / (1 + torch.exp(-expected[..., WIDTH:]))

    actual = layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(actual)
    gradients = [torch.autograd.grad(result, [x, *layer.parameters()], upstream) for result in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)
    assert layer.kernel(LENGTH).shape == (len(layer.weight), LENGTH)


def test_weights_below_squash_are_0_and_do_not_learn():
    layer = LongConv(WIDTH, squash=0.002, max_length=LENGTH, dtype=torch.float64)
    small = layer.weight.abs() < 0.002
    assert small.any()
    assert not small.all()
    kernel = layer.kernel(LENGTH)
    torch.testing.assert_close(kernel == 0, small)
    (gradient,) = torch.autograd.grad(kernel.sum(), layer.weight)
    torch.testing.assert_close(gradient, (~small).double())


def test_the_double_exponential_start_decays_faster_in_later_channels():
    """Over the whole kernel by exp(-(D/2)^(c/D)): channel 0 to 1/e, the last one almost to exp(-D/2)."""
    channels, length, start = 8, 20_000, "double-exponential"
    weight = LongConv(channels, channels=2, max_length=length, init=start, bidirectional=True).weight.detach()
    spread = weight.unflatten(1, (20, -1)).square().mean(dim=-1).sqrt()
    middle = (torch.arange(20) + 0.5) / 20
    for row, rms in enumerate(spread):
        rate = 4 ** (row % channels / channels)
        torch.testing.assert_close(rms, 0.02 * torch.exp(-rate * middle), rtol=0.15, atol=0)


def test_it_starts_at_random_as_its_authors_do():
    """N(0, 0.002²) at every distance, of which 13 % are above the squash of 0.003."""
    layer = LongConv(WIDTH, max_length=20_000)
    near, far = layer.weight.chunk(2, dim=1)
    assert (layer.kernel(20_000) != 0).double().mean().item() == pytest.approx(0.134, abs=0.005)
    assert near.std().item() == pytest.approx(0.002, rel=0.02)
    assert far.std().item() == pytest.approx(0.002, rel=0.02)


def test_kernel_dropout_drops_weights_of_the_kernel_in_training_only():
    layer = LongConv(WIDTH, squash=0.0, kernel_dropout=0.25, max_length=4000)
    kept = layer.eval().kernel(4000)
    dropped = layer.train().kernel(4000)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(dropped[dropped != 0], kept[dropped != 0] / 0.75)
    assert (kept != 0).all()


def test_it_has_a_weight_for_each_channel_and_position():
    mixer = choose_mixer("long-conv")
    assert mixer.build(8, max_length=40).weight.shape == (8, 40)
    assert mixer.build(8).weight.shape == (8, 1024)
    assert choose_mixer("long-conv", bidirectional=True).build(8, max_length=40).weight.shape == (16, 40)
    assert mixer.preset.size_note is not None


def test_wrong_options_are_refused():
    for options, message in (
        ({"squash": -0.1}, "squash must be a number of at least 0, got -0.1"),
        ({"squash": math.nan}, "squash must be a number of at least 0, got nan"),
        ({"channels": 0}, "channels must be a whole number of at least 1, got 0"),
        ({"smooth": 4}, "smooth must be an odd number of at least 1, got 4"),
        ({"kernel_dropout": 1.5}, "kernel_dropout must be a number of at least 0 and below 1, got 1.5"),
        ({"init": "zero"}, "init must be random or double-exponential, got zero"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
    ):
        with pytest.raises(BadInput, match=message):
            LongConv(WIDTH, **options)
