"""LRU against its recurrence, step by step, and against the convolution with its kernels."""

import math

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.lru import LRU, lru_reference
from longlens.mixers.registry import create_mixer

WIDTH, STATES = 6, 5


def build(**options):
    layer = LRU(WIDTH, STATES, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.out_proj.bias.normal_()
        layer.log_scale.add_(torch.randn(STATES))  # learned: it need not remain what it was
    return layer


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [1, 23, 101])
def test_equals_the_recurrence_with_its_gradients(length, bidirectional):
    layer = build(bidirectional=bidirectional)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), lru_reference(layer, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], weight) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_a_state_is_a_point_of_the_plane_that_turns_and_shrinks(monkeypatch):
    """The formula in real numbers."""
    layer, x = build(), torch.randn(2, 23, WIDTH, dtype=torch.float64)
    radius, phase = torch.exp(-torch.exp(layer.log_decay)), torch.exp(layer.log_phase)
    turn = radius * torch.stack([torch.cos(phase), -torch.sin(phase), torch.sin(phase), torch.cos(phase)])
    turn = turn.T.reshape(STATES, 2, 2)
    pushes = torch.einsum("n,nec,bte->btnc", torch.exp(layer.log_scale), layer.into, x)
    state, outputs = torch.zeros(2, STATES, 2, dtype=torch.float64), []
    for push in pushes.unbind(1):
        state = torch.einsum("nij,bnj->bni", turn, state) + push
        outputs.append(state[..., 0] @ layer.out[..., 0].T - state[..., 1] @ layer.out[..., 1].T)
    monkeypatch.setattr(layer, "_out", lambda y: y)
    torch.testing.assert_close(layer(x), torch.stack(outputs, dim=1) + layer.skip * x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_recurrence_is_a_convolution(bidirectional, monkeypatch):
    """With the kernel Re(C λ^l γ B), of each channel to each; ``kernel`` has those of a channel to itself."""
    layer, length = build(bidirectional=bidirectional), 23
    decay = torch.exp(torch.complex(-torch.exp(layer.log_decay), torch.exp(layer.log_phase)))
    powers = decay ** torch.arange(length + 1)[:, None]
    into = torch.exp(layer.log_scale)[:, None] * torch.view_as_complex(layer.into)
    kernels = [
        torch.einsum("on,ln,ne->loe", c, powers, into).real
        for c in torch.view_as_complex(layer.out).split(STATES, dim=1)
    ]
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    expected = layer.skip * x
    for t in range(length):
        for s in range(length):
            if s <= t:
                expected[:, t] += x[:, s] @ kernels[0][t - s].T
            if s >= t and bidirectional:
                expected[:, t] += x[:, s] @ kernels[1][s - t].T
    monkeypatch.setattr(layer, "_out", lambda y: y)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-11)

    own = [k.diagonal(dim1=1, dim2=2).T for k in kernels]  # (D, length + 1)
    past, future = own[0][:, :length].clone(), own[-1]
    if bidirectional:
        past[:, 0] += future[:, 0]
    expected = torch.cat([past, future[:, 1:]]) if bidirectional else past
    torch.testing.assert_close(layer.kernel(length), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.999), (0.0, 1.0), (0.5, 0.9), (0.999, 0.9999), (0.7, 0.7)])
def test_eigenvalues_begin_uniform_on_the_ring(low, high):
    layer = LRU(4, 4000, min_radius=low, max_radius=high, max_phase=math.pi / 10, dtype=torch.float64)
    rates, _, _ = layer.recurrence()
    radius, phase = torch.exp(rates.real), rates.imag
    assert radius.min() >= low - 1e-12
    assert radius.max() <= high + 1e-12
    assert phase.min() >= 0
    assert phase.max() <= math.pi / 10
    assert phase.mean().item() == pytest.approx(math.pi / 20, rel=0.05)
    inner = (radius.square() < (low**2 + high**2) / 2).double().mean().item()  # half of the area
    assert low == high or inner == pytest.approx(0.5, abs=0.04)
    for parameter in layer.parameters():
        assert parameter.isfinite().all()


def test_the_scale_begins_where_states_are_as_large_as_their_inputs():
    """The states of white noise have the variance γ²·Σ|λ|^2l = 1 times that of the inputs."""
    layer = LRU(WIDTH, STATES, dtype=torch.float64)
    rates, _, _ = layer.recurrence()
    powers = torch.exp(2 * rates.real * torch.arange(40_000)[:, None]).sum(0)
    torch.testing.assert_close(torch.exp(2 * layer.log_scale) * powers, torch.ones_like(powers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_disk_up_to_its_edge_is_finite(dtype):
    layer = LRU(4, 100_000, min_radius=0.0, max_radius=1.0, dtype=dtype)
    for part in layer.recurrence():
        assert torch.view_as_real(part).isfinite().all()
    for parameter in layer.parameters():
        assert parameter.isfinite().all()


def test_it_is_stable_whatever_is_learned():
    layer = build()
    with torch.no_grad():
        layer.log_decay.normal_(0, 3)
        layer.log_phase.normal_(0, 3)
    rates, _, _ = layer.recurrence()
    assert (rates.real < 0).all()


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 48), ({"bidirectional": True}, 32), ({"state_size": 7, "bidirectional": True}, 7)]
)
def test_the_size_of_the_state(options, expected):
    assert create_mixer("lru", 64, **options).state_size == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 0}, "state_size must be a whole number of at least 1 or none, got 0"),
        ({"max_radius": 0.8}, r"min_radius must be at most max_radius, got min_radius=0\.9 and max_radius=0\.8"),
        ({"max_radius": 1.1}, r"max_radius must be a number above 0 and at most 1, got 1\.1"),
        ({"min_radius": -0.1}, r"min_radius must be a number of at least 0 and below 1, got -0\.1"),
        ({"min_radius": 1.0, "max_radius": 1.0}, r"min_radius must be a number of at least 0 and below 1, got 1\.0"),
        ({"max_phase": 0.0}, r"max_phase must be a number above 0 and at most 2π, got 0\.0"),
        ({"max_phase": 7.0}, r"max_phase must be a number above 0 and at most 2π, got 7\.0"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("lru", 16, **options)
