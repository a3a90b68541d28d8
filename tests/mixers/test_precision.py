"""Layers that would raise in half precision, or lose all digits, compute such steps in float32. ``test_zoo.py`` asks
every layer whether it works in bfloat16 and under autocast."""

import copy

import pytest
import torch

from longlens.mixers.registry import create_mixer

WIDTH, LENGTH = 16, 27
# They have complex numbers, powers of a decay, or large distances.
EXACT = ("s4", "s4d", "dss", "dlr", "gss", "h3", "s5", "lru", "tnn", "hyena")


def relative(actual, expected):
    return ((actual.to(expected.dtype) - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_half_precision_is_close_to_float32(name, dtype):
    half = create_mixer(name, 64, dtype=dtype)
    full, x = copy.deepcopy(half).float(), torch.randn(2, 300, 64, dtype=dtype)
    expected = full(x.float())
    for layer in (half, full.to(dtype)):
        with torch.no_grad():
            actual = layer(x)
        assert actual.dtype == dtype
        assert relative(actual, expected) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in EXACT if name not in ("tnn", "hyena")])
def test_steps_in_half_precision(name, dtype):
    half = create_mixer(name, WIDTH, max_length=40, dtype=dtype)
    expected = copy.deepcopy(half).float()
    x, state, outputs = torch.randn(2, LENGTH, WIDTH, dtype=dtype), None, []
    with torch.no_grad():
        for t in range(LENGTH):
            output, state = half.step(x[:, t], state)
            assert output.dtype == dtype
            outputs.append(output)
        assert relative(torch.stack(outputs, dim=1), expected(x.float())) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slow_averages_in_half_precision(dtype):
    half = create_mixer("mega", WIDTH, max_length=400, bidirectional=False, dtype=dtype).average
    torch.nn.init.constant_(half.alpha, -5.0)
    x, state, outputs = torch.randn(2, 400, WIDTH, dtype=dtype) + 1, None, []
    with torch.no_grad():
        for t in range(400):
            output, state = half.step(x[:, t], state)
            outputs.append(output)
        assert relative(torch.stack(outputs, dim=1), half(x).float()) < 0.01


@torch.no_grad()
def test_more_tokens_than_float16_can_count():
    half = create_mixer("luna", 4, heads=1, memory=2, bidirectional=False, dtype=torch.float16).eval()
    x = torch.randn(1, 67_000, 4, dtype=torch.float16) + 1
    expected = copy.deepcopy(half).float()(x.float())
    assert relative(half(x)[:, 65_600:], expected[:, 65_600:]) < 0.01


@pytest.mark.parametrize("name", EXACT)
def test_a_kernel_of_half_precision_is_computed_in_float32(name):
    half = create_mixer(name, WIDTH, max_length=600, dtype=torch.bfloat16)
    kernel = half.kernel(600)
    assert kernel.dtype == torch.float32
    assert torch.equal(kernel, copy.deepcopy(half).float().kernel(600))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_has_a_gradient_of_0_in_float16(bidirectional):
    """The length of a query of padding is 0, and an ε of 1e-12 is 0 in float16."""
    layer = create_mixer("reformer", WIDTH, heads=2, bucket_size=4, bidirectional=bidirectional, dtype=torch.float16)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float16, requires_grad=True)
    layer(x, mask=torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])).sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *layer.parameters()))
