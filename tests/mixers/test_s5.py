"""S5 against its recurrence, step by step, and against the convolution with its kernels."""

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.diagonal import diagonal_recurrence_reference
from longlens.mixers.registry import create_mixer
from longlens.mixers.s5 import S5, s5_reference
from longlens.ops.hippo import dplr_legs

WIDTH = 6


def build(**options):
    layer = S5(WIDTH, 8, blocks=2, dtype=torch.float64, dt_min=0.05, dt_max=0.5, **options)
    with torch.no_grad():
        layer.out_proj.bias.normal_()
    return layer


@pytest.mark.parametrize("activation", ["half_glu1", "half_glu2"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [1, 23, 101])
def test_equals_the_recurrence_with_its_gradients(length, bidirectional, activation):
    layer = build(bidirectional=bidirectional, activation=activation)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), s5_reference(layer, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], weight) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_of_each_pair_stands_for_all_states(bidirectional, monkeypatch):
    """The recurrence of all P states has the same outputs, and they are real."""
    layer = build(bidirectional=bidirectional)
    half, into, out = (torch.view_as_complex(p) for p in (layer.eigenvalues, layer.into, layer.out))
    eigenvalues, into = torch.cat([half, half.conj()]), torch.cat([into, into.conj()])
    decay = torch.exp(eigenvalues * layer.log_dt.exp().repeat(2))
    into = ((decay - 1) / eigenvalues)[:, None] * into
    out = torch.cat([part for side in out.split(len(half), dim=1) for part in (side, side.conj())], dim=1)
    x = torch.randn(2, 23, WIDTH, dtype=torch.float64)
    monkeypatch.setattr(layer, "_out", lambda y: y)
    expected = diagonal_recurrence_reference(decay, into, out, x) + layer.skip * x
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    imaginary = diagonal_recurrence_reference(decay, into, -1j * out, x)
    torch.testing.assert_close(imaginary, torch.zeros_like(imaginary), rtol=0, atol=1e-12)


def responses(layer, length, monkeypatch):
    """What an impulse in the middle of each channel does to each channel, (input, output, 2·length - 1)."""
    monkeypatch.setattr(layer, "_out", lambda y: y)
    monkeypatch.setattr(layer, "skip", torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64)))
    impulses = torch.zeros(WIDTH, 2 * length - 1, WIDTH, dtype=torch.float64)
    impulses[torch.arange(WIDTH), length - 1, torch.arange(WIDTH)] = 1.0
    return layer(impulses).mT


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_kernel_is_the_response_of_a_channel_to_itself(bidirectional, monkeypatch):
    layer, length = build(bidirectional=bidirectional), 31
    kernel = layer.kernel(length)
    own = responses(layer, length, monkeypatch).diagonal().T  # (D, 2·length - 1)
    torch.testing.assert_close(kernel[:WIDTH], own[:, length - 1 :], rtol=0, atol=1e-13)
    if bidirectional:
        torch.testing.assert_close(kernel[WIDTH:, : length - 1], own[:, : length - 1].flip(1), rtol=0, atol=1e-13)
        assert kernel.shape == (2 * WIDTH, length)
    else:
        assert (own[:, : length - 1] == 0).all()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_it_is_a_convolution_of_all_channels_with_all(bidirectional, monkeypatch):
    layer, length = build(bidirectional=bidirectional), 23
    kernels = responses(layer, length, monkeypatch)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    lags = torch.arange(length)[:, None] - torch.arange(length) + length - 1
    expected = torch.einsum("eots,bse->bto", kernels[:, :, lags], x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_the_start_is_blocks_of_hippo_with_random_real_inputs():
    layer = S5(200, 48, blocks=3, dtype=torch.float64)
    values, _, _, vectors = dplr_legs(16)
    torch.testing.assert_close(torch.view_as_complex(layer.eigenvalues.detach()), values.repeat(3))
    vectors = torch.block_diag(*[vectors] * 3)
    into = torch.view_as_complex(layer.into.detach())
    inputs = 2 * (vectors @ into).real  # B' = V·B, from one half of the pairs
    torch.testing.assert_close(vectors.mH @ inputs.to(vectors.dtype), into)
    assert inputs.std().item() == pytest.approx(48**-0.5, rel=0.05)
    outputs = torch.view_as_complex(layer.out.detach())
    assert outputs.abs().square().mean().item() == pytest.approx(2 / 48, rel=0.1)
    assert layer.log_dt.exp().min() >= 1e-3
    assert layer.log_dt.exp().max() <= 0.1


def test_half_glu2_gates_what_the_state_space_returns():
    layer, y = build(activation="half_glu2"), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    gelu = y * 0.5 * (1 + torch.erf(y / 2**0.5))
    gate = 1 / (1 + torch.exp(-(gelu @ layer.out_proj.weight.T + layer.out_proj.bias)))
    torch.testing.assert_close(layer._out(y), y * gate, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("c_init", "square"),
    [("trunc_standard_normal", 2 / 48), ("lecun_normal", 2 / (48 * 200)), ("complex_normal", 1.0)],
)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_starts_of_c(c_init, square, bidirectional):
    """C'·V for the P columns of a C' of variance 1/P in each part, or 1/(P·D); or complex normal, without V."""
    layer = S5(200, 48, blocks=3, c_init=c_init, bidirectional=bidirectional, dtype=torch.float64)
    for out in torch.view_as_complex(layer.out.detach()).chunk(1 + bidirectional, dim=1):
        assert out.abs().square().mean().item() == pytest.approx(square, rel=0.05)
        assert out.real.square().mean().item() == pytest.approx(square / 2, rel=0.1)


def test_its_groups_are_the_eigenvalues_the_inputs_and_the_step_sizes():
    assert S5.groups == {"ssm": ("eigenvalues",), "b": ("into",), "dt": ("log_dt",)}


def test_both_directions_begin_differently():
    past, future = build(bidirectional=True).out.chunk(2, dim=1)
    assert not torch.equal(past, future)


def test_clip_keeps_the_state_from_growing():
    layer, clipped = build(), build(clip=True)
    with torch.no_grad():
        for one in (layer, clipped):
            one.eigenvalues[:, 0] = 3.0
    assert layer.kernel(60).abs().max() > 1e3
    assert clipped.kernel(60).abs().max() < 1e2
    rates, _, _ = clipped.recurrence()
    torch.testing.assert_close(rates.real, -1e-4 * clipped.log_dt.exp(), rtol=1e-12, atol=0)
    stable, x = build(), torch.randn(1, 9, WIDTH, dtype=torch.float64)
    clipped.load_state_dict(stable.state_dict())
    assert torch.equal(clipped(x), stable(x)), "it changes nothing that is stable"


def test_step_by_step_is_the_whole():
    layer, state, outputs = build(), None, []
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    for t in range(40):
        y, following = layer.step(x[:, t], state)
        assert torch.equal(layer.step(x[:, t], state)[0], y), "a step leaves its state alone"
        outputs.append(y)
        state = following
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("width", "options", "expected"),
    [
        (64, {}, (64, 8)),
        (20, {}, (20, 2)),
        (7, {}, (8, 4)),
        (20, {"blocks": 8}, (32, 8)),
        (64, {"state_size": 8}, (8, 4)),
        (64, {"state_size": 24, "blocks": 3}, (24, 3)),
    ],
)
def test_the_size_of_the_state_and_of_its_blocks(width, options, expected):
    layer = create_mixer("s5", width, **options)
    assert (layer.state_size, layer.blocks) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 7}, "state_size must be an even number of at least 2 or none, got 7"),
        ({"state_size": 0}, "state_size must be an even number of at least 2 or none, got 0"),
        ({"state_size": 12, "blocks": 8}, "blocks must divide state_size / 2 = 6, got 8"),
        ({"blocks": 0}, "blocks must be a whole number of at least 1 or none, got 0"),
        ({"dt_min": 0.2}, r"dt_min must be at most dt_max, got dt_min=0\.2 and dt_max=0\.1"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("s5", 16, **options)
