import cmath
import math

import pytest
import torch

from longlens.mixers.dlr import DLR, dlr_kernel


def layer(**options):
    return DLR(4, **({"state_size": 6} | options), dtype=torch.float64)


def run(model, x):
    """The recurrence of the paper, number by number, with its gradients: (L, D) -> (L, D)."""
    powers = torch.exp(torch.complex(-model.damping * model.damping, model.angles))
    weights = torch.view_as_complex(model.weights)
    state, outputs = torch.zeros(4, 6, dtype=torch.complex128), []
    for u in x:
        state = powers * state + u[:, None]
        outputs.append((weights * state).sum(1).real)
    return torch.stack(outputs)


@pytest.mark.parametrize("init", ["roots", "normal"])
@pytest.mark.parametrize("length", [1, 23, 101])
def test_it_is_the_recurrence_with_its_gradients(length, init):
    model = layer(init=init)
    x = torch.randn(1, length, 4, dtype=torch.float64, requires_grad=True)
    expected = model._out(run(model, x[0]) + model.skip * x[0])
    actual = model(x)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    leaves, weight = [x, *model.parameters()], torch.randn_like(actual)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_a_step_is_one_of_the_recurrence():
    model, x = layer(), torch.randn(1, 9, 4, dtype=torch.float64)
    state = None
    for t, y in enumerate(run(model, x[0])):
        actual, state = model.recur(x[:, t], state)
        torch.testing.assert_close(actual[0], y, rtol=0, atol=1e-12)


def test_with_the_roots_of_unity_a_kernel_can_be_any():
    """The discrete Fourier transform: N undamped modes at these angles make every kernel of length N."""
    wanted = torch.randn(4, 6, dtype=torch.float64)
    weights = torch.fft.fft(wanted).conj() / 6
    model = layer()
    torch.testing.assert_close(model.angles, 2 * math.pi / 6 * torch.arange(6, dtype=torch.float64))
    kernel = dlr_kernel(weights.conj().resolve_conj(), torch.zeros(6, dtype=torch.float64), model.angles, 6)
    torch.testing.assert_close(kernel, wanted)


def test_a_case_by_hand():
    weights = torch.tensor([[1 + 2j]], dtype=torch.complex128)
    kernel = dlr_kernel(weights, torch.tensor([0.5]).double(), torch.tensor([0.7]).double(), 4)
    expected = [((1 + 2j) * cmath.exp(-0.25 + 0.7j) ** l).real for l in range(4)]  # noqa: E741
    torch.testing.assert_close(kernel, torch.tensor([expected], dtype=torch.float64))


def test_both_sides_have_weights_of_their_own():
    model = layer(bidirectional=True)
    weights = torch.view_as_complex(model.weights)
    for half, kernel in zip(weights.chunk(2), model.kernel(23).chunk(2), strict=True):
        torch.testing.assert_close(kernel, dlr_kernel(half, model.damping, model.angles, 23))


def test_it_begins_stable_with_small_weights():
    model = DLR(64, state_size=256)
    decay = model.damping.square()
    assert decay.min() >= 0.00005 * 0.999
    assert decay.max() <= 0.05 * 1.001
    assert torch.exp(-decay).max() < 1
    assert 0.95 < model.weights.std() * 256 < 1.05


def test_errors():
    with pytest.raises(ValueError, match="state_size must be at least 1, got 0"):
        DLR(4, state_size=0)
    with pytest.raises(ValueError, match="init must be roots or normal, got 'omega'"):
        DLR(4, init="omega")


def test_gradients_of_one_state_can_be_clipped():
    """They are numbers, not views with a sign to come, which torch's functions for lists of tensors refuse."""
    layer = DLR(8, state_size=1)
    layer(torch.randn(2, 23, 8)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert not any(parameter.grad.is_neg() for parameter in layer.parameters())
