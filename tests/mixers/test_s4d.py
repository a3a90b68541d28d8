import math

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.common import log_uniform_
from longlens.mixers.diagonal import s4d_frequencies, s4d_modes
from longlens.mixers.s4d import S4D, s4d_kernel_reference
from longlens.ops.hippo import hippo_legs

VARIANTS = [
    {"init": "lin"},
    {"init": "inv"},
    {"init": "legs"},
    {"discretization": "bilinear"},
    {"tied_a": True, "init": "legs", "discretization": "bilinear"},
    {"learn_b": True},
    {"learn_b": True, "init": "legs", "tied_a": True, "discretization": "bilinear"},
]


def layer(**options):
    model = S4D(4, **({"state_size": 8, "dt_min": 0.01, "dt_max": 0.5} | options), dtype=torch.float64)
    if isinstance(model.b, torch.nn.Parameter):
        torch.nn.init.normal_(model.b)
    return model


def inputs_of(model):
    """B (D, N/2), by definition."""
    one = torch.ones(1, 4, dtype=torch.complex128)
    return (one if model.b is None else torch.view_as_complex(model.b)).expand(4, -1)


def system(model):
    """C·B, A and Δ, by definition."""
    a = torch.complex(-model.a_real.exp(), model.a_imag)
    return torch.view_as_complex(model.c) * inputs_of(model), a, model.log_dt.exp()


def matrices(model, channel):
    """The discretized state space of a channel as real matrices, by definition: each pair of conjugate numbers is a
    rotation with decay, which is driven by the two parts of B, and the output is 2·Re(c·x)."""
    a = torch.complex(-model.a_real.exp(), model.a_imag).expand(4, -1)[channel].detach()
    c, dt = torch.view_as_complex(model.c.detach())[channel], model.log_dt[channel].exp().item()
    continuous = torch.block_diag(*(torch.tensor([[z.real, -z.imag], [z.imag, z.real]]) for z in a))
    continuous = continuous.to(torch.float64)
    inputs = torch.view_as_real(inputs_of(model)[channel].detach()).flatten()
    outputs = torch.stack([2 * c.real, -2 * c.imag], dim=-1).flatten()
    eye = torch.eye(len(inputs), dtype=torch.float64)
    if model.discretization == "zoh":  # exp of [[A, B], [0, 0]]·Δ holds both
        both = torch.zeros(len(inputs) + 1, len(inputs) + 1, dtype=torch.float64)
        both[:-1, :-1], both[:-1, -1] = continuous, inputs
        both = torch.linalg.matrix_exp(dt * both)
        return both[:-1, :-1], both[:-1, -1], outputs
    inverse = torch.linalg.inv(eye - dt / 2 * continuous)
    return inverse @ (eye + dt / 2 * continuous), dt * inverse @ inputs, outputs


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_kernel_is_that_of_the_discretized_state_space(options):
    model = layer(**options)
    kernel, reference = model.kernel(101), s4d_kernel_reference(*system(model), 101, model.discretization)
    for channel in range(4):
        state_matrix, state, outputs = matrices(model, channel)
        for t in range(101):
            assert abs(outputs @ state - kernel[channel, t]) < 1e-8
            assert abs(outputs @ state - reference[channel, t]) < 1e-8
            state = state_matrix @ state


@pytest.mark.parametrize("length", [1, 23, 101])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_kernel_is_the_formula_with_its_gradients(options, length):
    model = layer(**options)
    kernel, expected = model.kernel(length), s4d_kernel_reference(*system(model), length, model.discretization)
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-10)
    leaves, weight = [model.get_parameter(name) for name in (*model.kernel_parameters, "c")], torch.randn_like(kernel)
    gradients = [torch.autograd.grad(k, leaves, weight) for k in (kernel, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_gradients_are_those_of_the_recurrence(options):
    model = layer(**options)
    x = torch.randn(2, 23, 4, dtype=torch.float64, requires_grad=True)
    state, outputs = None, []
    for t in range(23):
        y, state = model.step(x[:, t], state)
        outputs.append(y)
    leaves = [x, *model.parameters()]
    weight = torch.randn(2, 23, 4, dtype=torch.float64)
    expected = torch.autograd.grad((torch.stack(outputs, dim=1) * weight).sum(), leaves)
    actual = torch.autograd.grad((model(x) * weight).sum(), leaves)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_both_sides_are_two_kernels():
    model = layer(bidirectional=True)
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    past, future = model.kernel(9).chunk(2)
    y = torch.zeros(9, 4, dtype=torch.float64)
    for t in range(9):
        for s in range(9):
            y[t] += x[0, s] * (past[:, t - s] if s <= t else future[:, s - t - 1])
    torch.testing.assert_close(model(x)[0], model._out(y + model.skip * x[0]), rtol=0, atol=1e-10)


def test_frequencies():
    """As printed in the paper; those of legs against a general eigenvalue solver."""
    torch.testing.assert_close(s4d_frequencies("lin", 64)[:3], math.pi * torch.tensor([0, 1, 2], dtype=torch.float64))
    inverse = torch.tensor([64 / math.pi * (64 / odd - 1) for odd in (1, 3, 63)], dtype=torch.float64)
    torch.testing.assert_close(s4d_frequencies("inv", 64)[[0, 1, 31]], inverse)
    a, b = hippo_legs(16)
    eigenvalues = torch.linalg.eigvals(a + torch.outer(b, b) / 2)
    torch.testing.assert_close(eigenvalues.real, torch.full((16,), -0.5, dtype=torch.float64))
    torch.testing.assert_close(s4d_frequencies("legs", 16), eigenvalues.imag.sort().values[8:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("learn_b", [False, True])
def test_legs_has_the_inputs_of_hippo(learn_b):
    """V*·B of the eigenvectors V whose first entries are real, Im clipped to 2; then |B| of a mode is that of ours."""
    hippo, inputs = hippo_legs(64)
    frequencies, vectors = torch.linalg.eigh(-1j * (hippo + torch.outer(inputs, inputs) / 2))
    vectors = vectors[:, frequencies > 0]
    b = (vectors * (vectors[0].abs() / vectors[0])).mH @ inputs.to(vectors.dtype)
    clipped = torch.complex(b.real, b.imag.clamp(-2, 2))
    model = S4D(3, init="legs", learn_b=learn_b, dtype=torch.float64)
    ours = torch.view_as_complex(model.b.detach())
    assert ours.shape == (3 if learn_b else 1, 32)
    torch.testing.assert_close(ours.abs(), clipped.abs().expand_as(ours), rtol=0, atol=1e-9)
    assert S4D(3, init="lin").b is None
    assert (torch.view_as_complex(S4D(3, init="lin", learn_b=True).b.detach()) == 1).all()


def test_a_learned_b_belongs_to_the_kernel_and_its_group():
    assert layer(learn_b=True).groups == {"ssm": ("a_real", "a_imag", "b"), "dt": ("log_dt",)}
    assert "b" in layer(learn_b=True).kernel_parameters
    assert layer(init="legs").groups == {"ssm": ("a_real", "a_imag"), "dt": ("log_dt",)}
    assert "b" not in dict(layer(init="legs").named_parameters())


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("init", ["lin", "inv", "legs"])
def test_it_begins_stable(init, discretization):
    model = S4D(16, init=init, discretization=discretization)
    weights, rates = s4d_modes(*model.system(), discretization)
    assert weights.shape == rates.shape == (16, 32)
    assert rates.exp().abs().max() < 1
    torch.testing.assert_close(-model.a_real.exp(), torch.full((16, 32), -0.5))
    assert model.log_dt.exp().min() >= 0.000999
    assert model.log_dt.exp().max() <= 0.1001
    kernel = model.kernel(20_000)
    assert kernel.isfinite().all()
    assert (kernel[:, -100:].abs().amax(1) < 0.1 * kernel.abs().amax(1)).all(), "it decays"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 7}, "state_size must be an even number of at least 2, got 7"),
        ({"init": "hippo"}, "init must be one of lin, inv, legs, got hippo"),
        ({"discretization": "euler"}, "discretization must be zoh or bilinear, got euler"),
        ({"dt_min": 0.5}, r"dt_min must be at most dt_max, got dt_min=0\.5 and dt_max=0\.1"),
    ],
)
def test_errors(options, message):
    with pytest.raises(BadInput, match=message):
        S4D(4, **options)


def test_step_sizes_are_between_the_two():
    steps = log_uniform_(torch.empty(10_000), 0.001, 0.1).exp()
    assert 0.001 <= steps.min() < 0.0011
    assert 0.09 < steps.max() <= 0.1001
    assert 0.009 < steps.median() < 0.011, "uniform on a logarithmic scale"
