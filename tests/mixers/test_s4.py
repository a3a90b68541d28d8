"""S4 against the dense system that it stands for, against LSSL with the HiPPO matrix itself, and against a diagonal
system at 16,384 steps."""

import pytest
import torch
import torch.nn.functional as F

from longlens.errors import BadInput
from longlens.mixers.lssl import discretize, lssl_kernel
from longlens.mixers.registry import create_mixer, find_mixer
from longlens.mixers.s4 import S4, s4_kernel, s4_kernel_reference
from longlens.ops.exponentials import sum_of_exponentials
from longlens.ops.hippo import dplr_legs, hippo_legs
from longlens.ops.long_conv import long_conv

SYSTEM = ("log_decay", "frequency", "p", "b", "c", "log_dt")


def build(channels=3, seed=0, **options):
    torch.manual_seed(seed)
    layer = S4(channels, dtype=torch.float64, **options)
    with torch.no_grad():  # away from the start, where P and B are real and multiples of each other
        for name in SYSTEM[:4]:
            parameter = layer.get_parameter(name)
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "known", "state_size", "bidirectional"),
    [(256, 256, 64, False), (101, 101, 16, True), (23, 64, 8, True), (1, 1, 2, False), (101, 23, 8, True)],
)
def test_the_kernel_is_that_of_the_dense_system(length, known, state_size, bidirectional):
    """Also for sequences shorter or longer than what C̃ is made for."""
    layer = build(max_length=known, state_size=state_size, bidirectional=bidirectional)
    kernel, expected = layer.kernel(length), s4_kernel_reference(*layer.system(), length, known)
    assert kernel.shape == (layer.kernels, length)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-8)
    weight = torch.randn_like(kernel)
    parameters = [layer.get_parameter(name) for name in SYSTEM]
    gradients = [torch.autograd.grad((k * weight).sum(), parameters) for k in (kernel, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_it_begins_as_lssl():
    """With the real HiPPO matrix, whose state is x = V·z + c.c., so that C·z + c.c. = 2·Re(C·V*)·x."""
    torch.manual_seed(0)
    layer = S4(3, state_size=16, max_length=64, dtype=torch.float64)
    _, state = layer.recur(torch.zeros(1, 3, dtype=torch.float64), None)
    a, b = hippo_legs(16)
    c = 2 * (state[1] @ dplr_legs(16)[3].mH).real
    expected = lssl_kernel(*discretize(a, b, layer.log_dt.exp()), c, 101)
    torch.testing.assert_close(layer.kernel(101), expected, rtol=0, atol=1e-10)


def test_c_begins_normal_whatever_the_length():
    torch.manual_seed(0)
    layer = S4(32, max_length=50, dtype=torch.float64)
    _, state = layer.recur(torch.zeros(1, 32, dtype=torch.float64), None)
    assert state[1].abs().square().mean().item() == pytest.approx(1, abs=0.1)
    assert layer.log_dt.exp().min() >= 0.001
    assert layer.log_dt.exp().max() <= 0.1


@pytest.mark.parametrize("known", [64, 101])
def test_the_recurrence_is_the_convolution(known):
    layer = build(max_length=known, state_size=16)
    outputs, state = [], None
    for t in range(101):
        output, state = layer.recur(torch.full((2, 3), float(t == 0), dtype=torch.float64), state)
        outputs.append(output[1])
    assert state is not None
    assert state[0].shape == (2, 3, 8)
    torch.testing.assert_close(torch.stack(outputs, dim=-1), layer.kernel(101), rtol=0, atol=1e-10)


def test_a_step_leaves_the_state_as_it_was():
    layer = build(max_length=16, state_size=4)
    x = torch.randn(2, 3, dtype=torch.float64)
    _, state = layer.step(x)
    before = state[0].clone()
    again = [layer.step(x, state)[0] for _ in range(2)]
    torch.testing.assert_close(state[0], before, rtol=0, atol=0)
    torch.testing.assert_close(*again, rtol=0, atol=0)


def test_without_its_low_rank_part_it_is_a_sum_of_exponentials_at_16384():
    """Each channel alone fills what is computed at once."""
    torch.manual_seed(0)
    length, pairs = 16_384, 32
    rates, p, b, _ = dplr_legs(2 * pairs)
    c = torch.randn(4, pairs, dtype=torch.complex128)
    dt = torch.tensor([0.003, 0.1], dtype=torch.float64)
    given = [x.requires_grad_() for x in (rates, b, c, dt)]
    step = dt[:, None] / 2
    discrete = (1 + step * rates) / (1 - step * rates)
    weights = 2 * c * (2 * step * b / (1 - step * rates)).repeat(2, 1)
    expected = sum_of_exponentials(weights, discrete.log().repeat(2, 1), length)
    truncated = c * (1 - discrete**length).repeat(2, 1)
    kernel = s4_kernel(rates, 0 * p, b, truncated, dt, length)
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-9)
    weight = torch.randn_like(kernel)
    gradients = [torch.autograd.grad((k * weight).sum(), given, retain_graph=True) for k in (kernel, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-7)


def test_float32_is_finite_and_as_float64_at_16384():
    torch.manual_seed(0)
    layer = S4(3, max_length=16_384)
    double = S4(3, max_length=16_384, dtype=torch.float64)
    double.load_state_dict(layer.state_dict())
    kernel, expected = layer.kernel(16_384), double.kernel(16_384)
    torch.testing.assert_close(kernel.double(), expected, rtol=0, atol=2e-5 * expected.abs().max().item())
    weight = torch.randn_like(kernel)
    gradients = [
        torch.autograd.grad((k * weight).sum(), [owner.get_parameter(name) for name in SYSTEM])
        for owner, k in ((layer, kernel), (double, expected))
    ]
    for name, given, wanted in zip(SYSTEM, *gradients, strict=True):
        assert (given - wanted).norm() < 1e-3 * wanted.norm(), name


def test_the_longest_sequence_decides_what_c_is_made_for():
    assert create_mixer("s4", 4, max_length=77).max_length == 77
    assert create_mixer("s4", 4).max_length == 1024


def test_autocast_does_not_touch_the_kernel():
    layer = S4(3, max_length=64, state_size=8)
    with torch.autocast("cpu", torch.bfloat16):
        kernels = layer.kernel(64), layer.kernel(100)
    torch.testing.assert_close(kernels[0], layer.kernel(64), rtol=0, atol=0)
    torch.testing.assert_close(kernels[1], layer.kernel(100), rtol=0, atol=0)


def test_both_sides_are_the_sum_of_two_causal_convolutions():
    torch.manual_seed(0)
    layer = S4(4, state_size=8, max_length=32, bidirectional=True, dtype=torch.float64)
    x = torch.randn(2, 23, 4, dtype=torch.float64)
    past, future = layer.kernel(23).chunk(2)
    later = F.pad(future, (1, 0))  # not the token itself
    y = long_conv(x, past) + long_conv(x.flip(1), later).flip(1) + layer.skip * x
    expected = F.glu(layer.out_proj(F.gelu(y)), dim=-1)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


def test_it_stays_stable_whatever_is_learned():
    """A + A* = 2·Re Λ - 2·P·P* is negative, so that no state grows."""
    layer = build(state_size=8, max_length=64, seed=1)
    with torch.no_grad():
        for name in SYSTEM[:4]:
            layer.get_parameter(name).mul_(3).add_(torch.randn_like(layer.get_parameter(name)))
    _, state = layer.step(torch.randn(4, 3, dtype=torch.float64))
    sizes = [state[0].norm()]
    for _ in range(50):
        _, state = layer.step(torch.zeros(4, 3, dtype=torch.float64), state)
        sizes.append(state[0].norm())
    assert (torch.stack(sizes).diff() < 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 7}, "state_size must be an even number of at least 2, got 7"),
        ({"dt_min": 0.1, "dt_max": 0.01}, r"dt_min must be at most dt_max, got dt_min=0\.1 and dt_max=0\.01"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
    ],
)
def test_errors_say_what_is_allowed(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("s4", 4, **options)


def test_the_names_decide_the_sides():
    assert not create_mixer("s4", 4).bidirectional
    assert create_mixer("s4-bidirectional", 4).bidirectional
    for name in ("s4", "s4-bidirectional"):
        assert "bidirectional" not in find_mixer(name).options
