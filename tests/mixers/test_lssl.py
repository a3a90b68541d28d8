"""LSSL against its recurrence, step by step."""

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.lssl import LSSL, discretize, lssl_kernel, lssl_kernel_reference
from longlens.mixers.registry import create_mixer
from longlens.ops.hippo import hippo_legs


def build(**options):
    torch.manual_seed(0)
    return LSSL(3, dtype=torch.float64, **options)


@pytest.mark.parametrize("length", [1, 2, 23, 101])
@pytest.mark.parametrize(("bidirectional", "alpha"), [(False, 0.5), (True, 1.0)])
def test_the_kernel_is_that_of_the_recurrence(length, bidirectional, alpha):
    layer = build(state_size=6, alpha=alpha, bidirectional=bidirectional, learn_a=True, learn_dt=True)
    parameters = [layer.get_parameter(name) for name in ("a", "c", "log_dt")]
    kernel = layer.kernel(length)
    expected = lssl_kernel_reference(parameters[0], hippo_legs(6)[1], layer.c, layer.log_dt.exp(), alpha, length)
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
    expected = 2 / 3 * torch.tensor([[1, 1 / 3, 1 / 9, 1 / 27]], dtype=torch.float64)
    torch.testing.assert_close(kernel, expected)
    torch.testing.assert_close(lssl_kernel_reference(-one[:, None], one, one[:, None], one, 0.5, 4), expected)
    assert discretize(-one[:, None], one, one, alpha=0.5)[0].item() == pytest.approx(1 / 3)
    assert discretize(-one[:, None], one, one, alpha=1.0)[0].item() == 0.5


def test_what_is_fixed_is_not_learned():
    """And a fixed A is the HiPPO matrix, as is a learned one at the start."""
    fixed, learned = build(state_size=6), build(state_size=6, learn_a=True, learn_dt=True)
    assert {name for name, _ in fixed.named_parameters()} == {"c", "skip", "out_proj.weight", "out_proj.bias"}
    assert fixed.kernel_parameters == ()
    assert learned.kernel_parameters == ("a", "log_dt")
    assert build(learn_dt=True).kernel_parameters == ("log_dt",)
    learned.load_state_dict(fixed.state_dict(), strict=False)
    torch.testing.assert_close(learned.kernel(23), fixed.kernel(23), rtol=0, atol=1e-12)


def test_the_recurrence_is_the_convolution():
    layer = build(state_size=16)
    outputs, past, constants = [], None, layer.constants()
    for t in range(101):
        output, past = layer.recur(torch.full((2, 3), float(t == 0), dtype=torch.float64), past, *constants)
        outputs.append(output[1])
    torch.testing.assert_close(torch.stack(outputs, dim=-1), layer.kernel(101), rtol=0, atol=1e-12)


def test_float32_is_finite_and_as_float64_at_16384():
    torch.manual_seed(0)
    layer = LSSL(8, learn_a=True, learn_dt=True)
    double = LSSL(8, learn_a=True, learn_dt=True, dtype=torch.float64)
    double.load_state_dict(layer.state_dict())
    kernel, expected = layer.kernel(16_384), double.kernel(16_384)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 0}, "state_size must be a whole number of at least 1, got 0"),
        ({"dt_min": 0.0}, r"dt_min must be a number above 0, got 0\.0"),
        ({"dt_min": 0.2}, r"dt_min must be at most dt_max, got dt_min=0\.2 and dt_max=0\.1"),
        ({"alpha": 0.25}, r"alpha must be a number from 0\.5 to 1, got 0\.25"),
    ],
)
def test_errors_say_what_is_allowed(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("lssl", 4, **options)
