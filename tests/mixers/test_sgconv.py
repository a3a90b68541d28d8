import math

import pytest
import torch
import torch.nn.functional as F

from longlens.errors import BadInput
from longlens.mixers.registry import choose_mixer
from longlens.mixers.sgconv import SGConv, multiscale_kernel, multiscale_kernel_reference
from longlens.ops.long_conv import long_conv_reference

LENGTH, WIDTH = 101, 6


@pytest.mark.parametrize(("size", "scales"), [(1, 8), (4, 5), (5, 6), (16, 1)])
def test_the_kernel_is_its_formula(size, scales):
    weights = torch.randn(scales, 3, size, dtype=torch.float64, requires_grad=True)
    decay = torch.tensor([1.0, 1.5, 3.0], dtype=torch.float64)
    for length in (1, size, 23, LENGTH):
        kernels = [build(weights, decay, length) for build in (multiscale_kernel, multiscale_kernel_reference)]
        torch.testing.assert_close(*kernels, rtol=0, atol=1e-13)
        upstream = torch.randn(3, length, dtype=torch.float64)
        gradients = [torch.autograd.grad(kernel, weights, upstream)[0] for kernel in kernels]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", [1, 2])
def test_a_first_scale_stretches_all_sub_kernels(first):
    weights = torch.randn(4, 3, 5, dtype=torch.float64)
    decay = torch.tensor([1.0, 1.5, 3.0], dtype=torch.float64)
    for length in (1, 23, 200):
        kernels = [build(weights, decay, length, first) for build in (multiscale_kernel, multiscale_kernel_reference)]
        torch.testing.assert_close(*kernels, rtol=0, atol=1e-13)


def test_a_first_scale_of_a_hand_made_example():
    """w = (1, 3), (1, 3) with α = 2 and s = 1: both are stretched to 1, 1.5, 2.5, 3."""
    kernel = multiscale_kernel(torch.tensor([1.0, 3.0]).expand(2, 1, 2), torch.tensor([2.0]), 9, 1)
    torch.testing.assert_close(kernel, torch.tensor([[1, 1.5, 2.5, 3, 0.5, 0.75, 1.25, 1.5, 0]]))


def test_a_power_law_weighs_distances_instead_of_scales():
    """The recipe of Image: k(t)/(t + 1) without a factor between sub-kernels, divided by its norm at the start."""
    layer = SGConv(WIDTH, kernel_dim=4, decay="power", max_length=64, dtype=torch.float64)
    plain = multiscale_kernel_reference(layer.weight, torch.ones(2 * WIDTH, dtype=torch.float64), 64)
    expected = plain / torch.arange(1, 65)
    torch.testing.assert_close(layer.kernel(64), expected / expected.norm(dim=1, keepdim=True), rtol=0, atol=1e-13)
    torch.testing.assert_close(layer.kernel(23), layer.kernel(64)[:, :23], rtol=0, atol=0)


def test_cosines_of_each_channel_in_a_random_order_for_each_scale():
    """The recipe of Path-X: cos(linspace(0, 2πc, d)) of channel c, both sides alike, s = 1, one scale fewer."""
    torch.manual_seed(0)
    layer = SGConv(WIDTH, kernel_dim=8, init="cosine", init_scale=1, decay_min=1, decay_max=3, max_length=64)
    assert layer.weight.shape == (3, 2 * WIDTH, 8)  # 1 + log₂(64 / 8) - 1
    waves = {tuple(round(math.cos(2 * math.pi * c * n / 7), 4) + 0.0 for n in range(8)) for c in range(WIDTH)}
    orders = []
    for weight in layer.weight.detach():
        past, future = weight.split(WIDTH)
        assert torch.equal(past, future)
        rows = [tuple(round(value, 4) + 0.0 for value in row) for row in past.tolist()]
        assert set(rows) == waves
        orders.append(rows)
    assert orders[0] != orders[1] or orders[1] != orders[2]
    torch.testing.assert_close(layer.kernel(64).norm(dim=1), torch.ones(2 * WIDTH))


def test_its_weights_decay_and_have_a_group():
    assert SGConv.groups == {"kernel": ("weight",)}
    assert not hasattr(SGConv, "kernel_parameters")


def test_the_kernel_of_a_hand_made_example():
    """w = (1, 3), (1, 3), (1, 3) with α = 2: the third is stretched to 1, 1.5, 2.5, 3."""
    weights = torch.tensor([1.0, 3.0]).expand(3, 1, 2)
    kernel = multiscale_kernel(weights, torch.tensor([2.0]), 10)
    torch.testing.assert_close(kernel, torch.tensor([[1, 3, 0.5, 1.5, 0.25, 0.375, 0.625, 0.75, 0, 0]]))


@pytest.mark.parametrize("output", ["glu", "linear"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_layer_is_a_product_with_toeplitz_matrices(bidirectional, output):
    options = {"kernel_dim": 4, "decay_min": 1.0, "decay_max": 3.0, "max_length": LENGTH}
    layer = SGConv(WIDTH, bidirectional=bidirectional, output=output, dtype=torch.float64, **options)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    decay = torch.linspace(1, 3, WIDTH, dtype=torch.float64)
    sides = [
        multiscale_kernel_reference(weight, decay, LENGTH) for weight in (layer.weight / layer.norm).split(WIDTH, dim=1)
    ]
    y = layer.out_proj(F.gelu(long_conv_reference(x, *sides) + layer.skip * x))
    expected = F.glu(y, dim=-1) if output == "glu" else y
    assert len(sides) == 1 + bidirectional

    actual = layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(actual)
    gradients = [torch.autograd.grad(result, [x, *layer.parameters()], upstream) for result in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


def test_kernels_have_norm_1_at_first_and_the_norm_stays():
    layer = SGConv(WIDTH, kernel_dim=4, max_length=LENGTH, dtype=torch.float64)
    assert layer.weight.shape == (6, 2 * WIDTH, 4)  # 4·2⁵ = 128 is the first to reach 101

    torch.testing.assert_close(layer.kernel(128).norm(dim=-1), torch.ones(2 * WIDTH, dtype=torch.float64))
    with torch.no_grad():
        layer.weight.mul_(3)
    torch.testing.assert_close(layer.kernel(128).norm(dim=-1), torch.full((2 * WIDTH,), 3.0, dtype=torch.float64))
    other = SGConv(WIDTH, kernel_dim=4, max_length=LENGTH, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other.kernel(128), layer.kernel(128), rtol=0, atol=0)


def test_a_kernel_begins_the_same_at_every_length_and_ends_at_its_reach():
    layer = SGConv(WIDTH, kernel_dim=4, max_length=40)
    longest = layer.kernel(100)
    assert (longest[:, 63] != 0).all()
    assert (longest[:, 64:] == 0).all()
    for length in (1, 4, 5, 23, 64, 65):
        torch.testing.assert_close(layer.kernel(length), longest[:, :length], rtol=0, atol=0)


def test_each_sub_kernel_is_weaker_by_its_decay():
    """RMS over many channels: 1, 1/2, then a little less than 1/4, since interpolation averages."""
    layer = SGConv(512, kernel_dim=16, max_length=64, bidirectional=False)
    kernel = layer.kernel(64) * layer.norm
    first, second, third = (part.square().mean().sqrt().item() for part in kernel.split([16, 16, 32], dim=1))
    assert second / first == pytest.approx(1 / 2, rel=0.05)
    assert 0.15 < third / first < 0.25


def test_max_length_gives_the_number_of_sub_kernels():
    for max_length, scales in ((1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (1024, 7)):
        assert choose_mixer("sgconv").build(8, max_length=max_length).weight.shape[0] == scales


def test_wrong_options_are_refused():
    for options, message in (
        ({"kernel_dim": 0}, "kernel_dim must be a whole number of at least 1, got 0"),
        ({"decay_min": 3.0}, r"decay_min must be at most decay_max, got decay_min=3\.0 and decay_max=2\.0"),
        ({"decay_min": 0.0}, "decay_min must be a number above 0, got 0.0"),
        ({"init_scale": -1}, "init_scale must be a whole number from 0 to 30, got -1"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"output": "relu"}, "output must be glu or linear, got relu"),
    ):
        with pytest.raises(BadInput, match=message):
            SGConv(WIDTH, **options)
