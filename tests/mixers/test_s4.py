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
    ("length", "known", "options"),
    [
        (256, 256, {}),
        (101, 101, {"state_size": 16, "bidirectional": True}),
        (101, 101, {"state_size": 16, "bidirectional": True, "tied_a": False, "clip_b": True}),
        (64, 64, {"channels": 4, "state_size": 8, "n_ssm": 2}),
        (23, 64, {"state_size": 8, "bidirectional": True}),
        (1, 1, {"state_size": 2}),
        (101, 23, {"state_size": 8, "bidirectional": True}),
        (101, 23, {"state_size": 8, "tied_a": False}),
    ],
    ids=str,
)
def test_the_kernel_is_that_of_the_dense_system(length, known, options):
    """Also for sequences shorter or longer than what C̃ is made for."""
    layer = build(max_length=known, **options)
    kernel, expected = layer.kernel(length), s4_kernel_reference(*layer.system(), length, known)
    assert kernel.shape == (layer.kernels, length)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(kernel)
    parameters = [layer.get_parameter(name) for name in SYSTEM]
    gradients = [torch.autograd.grad((k * weight).sum(), parameters) for k in (kernel, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_it_begins_as_lssl():
    """With the real HiPPO matrix, whose state is x = V·z + c.c., so that C·z + c.c. = 2·Re(C·V*)·x."""
    torch.manual_seed(0)
    layer = S4(3, state_size=16, max_length=64, dtype=torch.float64)
    *_, c, _ = layer.constants()
    a, b = hippo_legs(16)
    c = 2 * (c @ dplr_legs(16)[3].mH).real
    expected = lssl_kernel(*discretize(a, b, layer.log_dt.exp()), c, 101)
    torch.testing.assert_close(layer.kernel(101), expected, rtol=0, atol=1e-10)


def test_c_begins_normal_whatever_the_length():
    torch.manual_seed(0)
    layer = S4(32, max_length=50, dtype=torch.float64)
    *_, c, _ = layer.constants()
    assert c.abs().square().mean().item() == pytest.approx(1, abs=0.1)
    assert layer.log_dt.exp().min() >= 0.001
    assert layer.log_dt.exp().max() <= 0.1


@pytest.mark.parametrize(("known", "options"), [(64, {}), (101, {}), (101, {"n_ssm": 3, "clip_b": True})], ids=str)
def test_the_recurrence_is_the_convolution(known, options):
    layer = build(max_length=known, state_size=16, **options)
    outputs, past, constants = [], None, layer.constants()
    for t in range(101):
        output, past = layer.recur(torch.full((2, 3), float(t == 0), dtype=torch.float64), past, *constants)
        outputs.append(output[1])
    assert past is not None
    assert past.shape == (2, 3, 8)
    torch.testing.assert_close(torch.stack(outputs, dim=-1), layer.kernel(101), rtol=0, atol=1e-10)


def test_a_step_leaves_the_state_as_it_was():
    layer = build(max_length=16, state_size=4)
    x = torch.randn(2, 3, dtype=torch.float64)
    _, state = layer.step(x)
    before = state[1].clone()
    again = [layer.step(x, state)[0] for _ in range(2)]
    torch.testing.assert_close(state[1], before, rtol=0, atol=0)
    torch.testing.assert_close(*again, rtol=0, atol=0)


def test_without_its_low_rank_part_it_is_a_sum_of_exponentials_at_16384():
    """Each channel alone fills what is computed at once."""
    torch.manual_seed(0)
    length, pairs = 16_384, 32
    rates, p, b = (part[None] for part in dplr_legs(2 * pairs)[:3])
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
    torch.testing.assert_close(kernel.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())
    weight = torch.randn_like(kernel)
    gradients = [
        torch.autograd.grad((k * weight).sum(), [owner.get_parameter(name) for name in SYSTEM])
        for owner, k in ((layer, kernel), (double, expected))
    ]
    for name, given, wanted in zip(SYSTEM, *gradients, strict=True):
        assert (given - wanted).norm() < 2e-5 * wanted.norm(), name


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
    sizes = [state[1].norm()]
    for _ in range(50):
        _, state = layer.step(torch.zeros(4, 3, dtype=torch.float64), state)
        sizes.append(state[1].norm())
    assert (torch.stack(sizes).diff() < 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 7}, "state_size must be an even number of at least 2, got 7"),
        ({"dt_min": 0.1, "dt_max": 0.01}, r"dt_min must be at most dt_max, got dt_min=0\.1 and dt_max=0\.01"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"n_ssm": 3}, "n_ssm must divide the width of the layer, got n_ssm=3 and a width of 4"),
    ],
)
def test_errors_say_what_is_allowed(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("s4", 4, **options)


def test_the_names_decide_the_sides():
    assert not create_mixer("s4", 4).bidirectional
    assert create_mixer("s4-bidirectional", 4).bidirectional
    for name in ("s4", "s4-bidirectional", "s4-v1", "s4-v2"):
        assert "bidirectional" not in find_mixer(name).options


def test_the_published_versions():
    """V1: causal, linear, one A, P, B for all channels; V2: both sides, GLU, one each (two on Image), Im B clipped."""
    first, second = create_mixer("s4-v1", 4, state_size=8), create_mixer("s4-v2", 4, state_size=8)
    assert not first.bidirectional
    assert second.bidirectional
    assert (first.out_proj.out_features, second.out_proj.out_features) == (4, 8)
    for name in ("log_decay", "frequency", "p", "b"):
        shared, own = first.get_parameter(name), second.get_parameter(name)
        assert own.shape == (4, *shared.shape)
        assert create_mixer("s4-v2", 4, state_size=8, n_ssm=2).get_parameter(name).shape == (2, *shared.shape)
    assert not first.clip_b
    assert second.clip_b
    assert set(find_mixer("s4-v1").options) == {"state_size", "dt_min", "dt_max", "dropout"}


def test_the_clip_is_that_of_the_official_code():
    """Its eigenvectors are those of LAPACK, whose first entries are real, and it clips Im V*B to 2: at N = 64 eleven of
    32 modes. What remains is the same but for the phases of the eigenvectors: P*·B and |B| of each mode do not change
    with them."""
    hippo, inputs = hippo_legs(64)
    low_rank = torch.sqrt(torch.arange(64, dtype=torch.float64) + 0.5)
    frequencies, vectors = torch.linalg.eigh(-1j * (hippo + torch.outer(low_rank, low_rank)))
    vectors = vectors[:, frequencies > 0]
    vectors = vectors * (vectors[0].abs() / vectors[0])
    b, p = vectors.mH @ inputs.to(vectors.dtype), vectors.mH @ low_rank.to(vectors.dtype)
    clipped = torch.complex(b.real, b.imag.clamp(-2, 2))
    assert (clipped != b).sum() == 11
    layer = S4(2, max_length=4, clip_b=True, dtype=torch.float64)
    _, our_p, our_b, _, _ = layer.system()
    torch.testing.assert_close((our_p.conj() * our_b)[0], p.conj() * clipped, rtol=0, atol=1e-9)
    plain = S4(2, max_length=4, dtype=torch.float64)
    assert plain.system()[2].abs().max() > 40 > 3 > our_b.abs().max()


def test_channels_share_the_systems_in_turn():
    layer = build(channels=4, n_ssm=2, state_size=8, max_length=16)
    rates, p, b, _, _ = layer.system()
    for shared in (rates, p, b):
        assert torch.equal(shared[:2], shared[2:])
        assert not torch.equal(shared[0], shared[1])


def test_its_groups_are_the_system_and_the_step_sizes():
    assert S4.groups == {"ssm": ("log_decay", "frequency", "p", "b"), "dt": ("log_dt",)}
