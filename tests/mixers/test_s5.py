"""S5 against the recurrence with all of its states, and against the convolution with its kernels."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.base import create_mixer
from longlens.mixers.s5 import S5
from longlens.ops.hippo import dplr_legs

WIDTH = 6


def build(**options):
    layer = S5(WIDTH, 8, blocks=2, dtype=torch.float64, dt_min=0.05, dt_max=0.5, **options)
    with torch.no_grad():
        layer.out_proj.bias.normal_()
    return layer


def recurrence(layer, x):
    """The formula for all P states, one step after the other, forward and, for both sides, from the end."""
    half, into, out = (torch.view_as_complex(p) for p in (layer.eigenvalues, layer.into, layer.out))
    eigenvalues = torch.cat([half, half.conj()])
    into = torch.cat([into, into.conj()])
    dt = layer.log_dt.exp().repeat(2)
    decay = torch.exp(eigenvalues * dt)
    into = ((decay - 1) / eigenvalues)[:, None] * into
    y = layer.skip * x
    for c, times in zip(out.split(len(half), dim=1), (range(x.shape[1]), reversed(range(x.shape[1]))), strict=False):
        state, outputs = torch.zeros(x.shape[0], len(decay), dtype=decay.dtype), {}
        for t in times:
            state = decay * state + x[:, t].to(decay.dtype) @ into.T
            outputs[t] = state @ torch.cat([c, c.conj()], dim=1).T
        y = y + torch.stack([outputs[t].real for t in range(x.shape[1])], dim=1)
        assert max(o.imag.abs().max().item() for o in outputs.values()) < 1e-12, "conjugate pairs have real sums"
    u = F.gelu(y)
    return u * torch.sigmoid(u @ layer.out_proj.weight.T + layer.out_proj.bias)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [1, 23, 101])
def test_equals_the_recurrence_with_its_gradients(length, bidirectional):
    layer = build(bidirectional=bidirectional)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), recurrence(layer, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], weight) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


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


def test_both_directions_begin_differently():
    forth, back = build(bidirectional=True).out.chunk(2, dim=1)
    assert not torch.equal(forth, back)


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
        ({"state_size": 7}, "state_size must be even, for conjugate pairs, and at least 2, got 7"),
        ({"state_size": 0}, "state_size must be even, for conjugate pairs, and at least 2, got 0"),
        ({"state_size": 12, "blocks": 8}, "blocks must divide state_size / 2 = 6, got 8"),
        ({"blocks": 0}, "blocks must divide state_size / 2 = 8, got 0"),
        ({"dt_min": 0.2}, "dt_min and dt_max must be positive and in order, got 0.2 and 0.1"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        create_mixer("s5", 16, **options)
