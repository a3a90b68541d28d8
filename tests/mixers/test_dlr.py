import cmath
import math

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.dlr import DLR, dlr_reference
from longlens.ops.exponentials import sum_of_exponentials_reference


def layer(**options):
    return DLR(4, **({"state_size": 6} | options), dtype=torch.float64)


def run(model, x):
    return dlr_reference(torch.view_as_complex(model.weights), model.damping, model.angles, x)


@pytest.mark.parametrize("init", ["roots", "normal"])
@pytest.mark.parametrize("length", [1, 23, 101])
def test_it_is_the_recurrence_with_its_gradients(length, init):
    model = layer(init=init)
    x = torch.randn(2, length, 4, dtype=torch.float64, requires_grad=True)
    expected = model._out(run(model, x) + model.skip * x)
    actual = model(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    leaves, weight = [x, *model.parameters()], torch.randn_like(actual)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_a_step_is_one_of_the_recurrence():
    model, x = layer(), torch.randn(2, 9, 4, dtype=torch.float64)
    past, constants = None, model.constants()
    for t, y in enumerate(run(model, x).unbind(1)):
        actual, past = model.recur(x[:, t], past, *constants)
        torch.testing.assert_close(actual, y, rtol=0, atol=1e-12)


def test_with_the_roots_of_unity_a_kernel_can_be_any():
    """The discrete Fourier transform: N undamped modes at these angles make every kernel of length N."""
    wanted = torch.randn(4, 6, dtype=torch.float64)
    weights = torch.fft.fft(wanted).conj() / 6
    model = layer()
    torch.testing.assert_close(model.angles, 2 * math.pi / 6 * torch.arange(6, dtype=torch.float64))
    with torch.no_grad():
        model.weights.copy_(torch.view_as_real(weights.conj().resolve_conj()))
        model.damping.zero_()
    torch.testing.assert_close(model.kernel(6), wanted)


def test_a_case_by_hand():
    system = (
        torch.tensor([[1 + 2j]], dtype=torch.complex128),
        torch.tensor([0.5]).double(),
        torch.tensor([0.7]).double(),
    )
    expected = [((1 + 2j) * cmath.exp(-0.25 + 0.7j) ** l).real for l in range(4)]  # noqa: E741
    model = DLR(1, state_size=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter, value in zip((model.weights, model.damping, model.angles), system, strict=True):
            parameter.copy_(torch.view_as_real(value) if value.is_complex() else value)
    torch.testing.assert_close(model.kernel(4), torch.tensor([expected], dtype=torch.float64))
    impulse = torch.tensor([1, 0, 0, 0], dtype=torch.float64)[None, :, None]
    torch.testing.assert_close(dlr_reference(*system, impulse).flatten().tolist(), expected)


def test_both_sides_have_weights_of_their_own():
    model = layer(bidirectional=True)
    weights, rates = model.modes()
    for half, kernel in zip(weights.chunk(2), model.kernel(23).chunk(2), strict=True):
        torch.testing.assert_close(kernel, sum_of_exponentials_reference(half, rates, 23))


def test_it_begins_stable_with_small_weights():
    model = DLR(64, state_size=256)
    decay = model.damping.square()
    assert decay.min() >= 0.00005 * 0.999
    assert decay.max() <= 0.05 * 1.001
    assert torch.exp(-decay).max() < 1
    assert 0.95 < model.weights.std() * 256 < 1.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 0}, "state_size must be a whole number of at least 1, got 0"),
        ({"init": "omega"}, "init must be roots or normal, got omega"),
        ({"dt_min": 0.5}, r"dt_min must be at most dt_max, got dt_min=0\.5 and dt_max=0\.1"),
    ],
)
def test_errors(options, message):
    with pytest.raises(BadInput, match=message):
        DLR(4, **options)


def test_gradients_of_one_state_can_be_clipped():
    """They are numbers, not views with a sign to come, which torch's functions for lists of tensors refuse."""
    layer = DLR(8, state_size=1)
    layer(torch.randn(2, 23, 8)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert not any(parameter.grad.is_neg() for parameter in layer.parameters())
