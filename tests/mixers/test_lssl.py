"""LSSL against its recurrence, step by step."""

import pytest
import torch

from longlens.mixers.base import create_mixer
from longlens.mixers.lssl import LSSL, discretize, lssl_kernel
from longlens.ops.hippo import hippo_legs


def build(**options):
    torch.manual_seed(0)
    return LSSL(3, dtype=torch.float64, **options)


def dense_kernel(a, b, c, dt, alpha, length):
    """By the printed rule, one channel after the other: (I - α·dt·A)·x_t = (I + (1-α)·dt·A)·x_{t-1} + dt·B·u_t."""
    one = torch.eye(len(b), dtype=a.dtype)
    kernels = []
    for index in range(len(c)):
        step = dt[index % len(dt)]
        state = torch.zeros_like(b)
        kernel = []
        for t in range(length):
            right = (one + (1 - alpha) * step * a) @ state + (step * b if t == 0 else 0)
            state = torch.linalg.solve(one - alpha * step * a, right)
            kernel.append(c[index] @ state)
        kernels.append(torch.stack(kernel))
    return torch.stack(kernels)


@pytest.mark.parametrize("length", [1, 2, 23, 101])
@pytest.mark.parametrize(("bidirectional", "alpha"), [(False, 0.5), (True, 1.0)])
def test_the_kernel_is_that_of_the_recurrence(length, bidirectional, alpha):
    layer = build(state_size=6, alpha=alpha, bidirectional=bidirectional, learn_a=True, learn_dt=True)
    parameters = [layer.get_parameter(name) for name in ("a", "c", "log_dt")]
    kernel = layer.kernel(length)
    expected = dense_kernel(parameters[0], hippo_legs(6)[1], layer.c, layer.log_dt.exp(), alpha, length)
    assert kernel.shape == (layer.kernels, length)
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(kernel)
    gradients = [torch.autograd.grad((k * weight).sum(), parameters) for k in (kernel, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_a_scalar_system_by_hand():
    """x' = -x + u with dt = 1: the trapezoid keeps (1 - ½)/(1 + ½) = 1/3 of the state, from 1/(1 + ½) = 2/3 on."""
    one = torch.ones(1, dtype=torch.float64)
    a, b = discretize(-one[:, None], one, one)
    kernel = lssl_kernel(a, b, one[:, None], 4)
    torch.testing.assert_close(kernel, 2 / 3 * torch.tensor([[1, 1 / 3, 1 / 9, 1 / 27]], dtype=torch.float64))
    assert discretize(-one[:, None], one, one, alpha=0.5)[0].item() == pytest.approx(1 / 3)
    assert discretize(-one[:, None], one, one, alpha=1.0)[0].item() == 0.5


def test_what_is_fixed_is_not_learned():
    """And a fixed A is the HiPPO matrix, as is a learned one at the start."""
    fixed, learned = build(state_size=6), build(state_size=6, learn_a=True, learn_dt=True)
    assert {name for name, _ in fixed.named_parameters()} == {"c", "skip", "out_proj.weight", "out_proj.bias"}
    assert fixed.special_parameters == ()
    assert learned.special_parameters == ("a", "log_dt")
    assert build(learn_dt=True).special_parameters == ("log_dt",)
    learned.load_state_dict(fixed.state_dict(), strict=False)
    torch.testing.assert_close(learned.kernel(23), fixed.kernel(23), rtol=0, atol=1e-12)


def test_the_recurrence_is_the_convolution():
    layer = build(state_size=16)
    outputs, state = [], None
    for t in range(101):
        output, state = layer.recur(torch.full((2, 3), float(t == 0), dtype=torch.float64), state)
        outputs.append(output[1])
    torch.testing.assert_close(torch.stack(outputs, dim=-1), layer.kernel(101), rtol=0, atol=1e-12)


def test_float32_is_finite_and_exact_at_16384():
    torch.manual_seed(0)
    layer = LSSL(8, learn_a=True, learn_dt=True)
    exact = LSSL(8, learn_a=True, learn_dt=True, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    kernel, expected = layer.kernel(16_384), exact.kernel(16_384)
    torch.testing.assert_close(kernel.double(), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert (expected[:, -100:].abs().amax(1) < 1e-5 * expected.abs().amax(1)).all(), "it decays"
    for gradient in torch.autograd.grad(kernel.square().sum(), [layer.get_parameter(x) for x in ("a", "c", "log_dt")]):
        assert gradient.isfinite().all()


def test_half_precision_does_not_make_it_unstable():
    layer = LSSL(4).bfloat16()
    kernel = layer.kernel(16_384)
    assert kernel.dtype == torch.float32
    assert kernel.abs().max() < 1e3


def test_autocast_does_not_touch_the_kernel():
    layer = LSSL(3, state_size=8)
    with torch.autocast("cpu", torch.bfloat16):
        kernel = layer.kernel(64)
    torch.testing.assert_close(kernel, layer.kernel(64), rtol=0, atol=0)


def test_errors_say_what_is_allowed():
    with pytest.raises(ValueError, match="state_size must be at least 1, got 0"):
        create_mixer("lssl", 4, state_size=0)
    with pytest.raises(ValueError, match=r"dt_min and dt_max must be positive and in order, got 0.0 and 0.1"):
        create_mixer("lssl", 4, dt_min=0.0)
    with pytest.raises(ValueError, match=r"alpha must lie between 0.5 and 1, got 0.25"):
        create_mixer("lssl", 4, alpha=0.25)
