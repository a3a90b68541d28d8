"""H3 against two state spaces with dense matrices, and against linear attention."""

import math

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.h3 import H3, h3_reference
from longlens.mixers.registry import create_mixer

WIDTH, STATES = 6, 8


def build(**options):
    layer = H3(WIDTH, state_size=STATES, dt_min=0.05, dt_max=0.5, dtype=torch.float64, **options)
    if layer.shift is not None:
        torch.nn.init.normal_(layer.shift)
    return layer


def diagonal_system(layer, head):
    """Ā and B̄ by the bilinear rule, from matrices of all N states, and C."""
    row = 0 if layer.tied_a else head
    half = torch.complex(-torch.exp(layer.a_real[row]), layer.a_imag[row])
    c, dt = torch.view_as_complex(layer.c)[head], torch.exp(layer.log_dt[head, 0])
    a = torch.diag(torch.cat([half, half.conj()]))
    identity = torch.eye(STATES, dtype=a.dtype)
    inverse = torch.linalg.inv(identity - dt / 2 * a)
    return inverse @ (identity + dt / 2 * a), dt * inverse.sum(1), torch.cat([c, c.conj()])


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1, {}),
        (23, {}),
        (101, {}),
        (23, {"tied_a": False}),
        (23, {"learn_shift": False}),
        (23, {"head_dim": 2}),
        (5, {"head_dim": 3, "tied_a": False}),
    ],
)
def test_equals_the_recurrence_with_its_gradients(length, options):
    layer = build(**options)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), h3_reference(layer, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], weight) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"head_dim": 3}, {"tied_a": False}])
def test_the_kernel_is_that_of_the_state_space(options):
    layer, length = build(**options), 257
    kernel = layer.kernel(length)
    assert kernel.shape == (WIDTH // layer.head_dim, length)
    for head in range(len(kernel)):
        a, b, c = diagonal_system(layer, head)
        for lag in (0, 1, 2, 100, 256):
            expected = (c @ torch.linalg.matrix_power(a, lag) @ b).real
            torch.testing.assert_close(kernel[head, lag], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"head_dim": 3}])
def test_step_by_step_is_the_whole(options):
    layer = build(**options)
    x, state, outputs = torch.randn(2, 40, WIDTH, dtype=torch.float64), None, []
    for t in range(40):
        y, following = layer.step(x[:, t], state)
        if state is not None:
            again, _ = layer.step(x[:, t], state)
            assert torch.equal(again, y), "a step leaves its state alone"
        outputs.append(y)
        state = following
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [1, 2, 6])
def test_without_forgetting_it_is_linear_attention(head_dim):
    """A diagonal state space that only sums up, and a shift of nothing: Σ_{s ≤ t} (q_t·k_s)·v_s in each head."""
    layer = build(head_dim=head_dim)
    with torch.no_grad():
        for parameter in (layer.taps, layer.skip, layer.a_imag, layer.c):
            parameter.zero_()
        layer.key_skip.fill_(1.0)
        layer.a_real.fill_(-60.0)
        layer.c[:, 0, 0] = 0.5 / layer.log_dt[:, 0].exp()
    x = torch.randn(2, 23, WIDTH, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, dim=-1))
    attended = (q @ k.mT).tril() @ v
    expected = layer.out_proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-11)


def test_padding_between_tokens_is_not_seen_either():
    """Biases would make keys and values of it."""
    layer = build()
    x = torch.randn(1, 12, WIDTH, dtype=torch.float64)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 4:7] = False
    changed = torch.where(mask[..., None], x, 100.0)
    seen = [layer(given, mask=mask)[:, mask[0]] for given in (x, changed)]
    torch.testing.assert_close(*seen, rtol=0, atol=1e-12)


def test_the_shift_is_a_state_space_with_a_matrix():
    """x_t = S·x_{t-1} + b·k_t, y_t = c·x_t, of which S moves each number to the next place: s[l] = c·Sˡ·b."""
    layer = build()
    move = torch.diag(torch.ones(STATES - 1, dtype=torch.float64), -1)
    for lag in range(STATES):
        expected = torch.einsum("dm,mn,dn->d", layer.taps, torch.linalg.matrix_power(move, lag), layer.shift)
        torch.testing.assert_close(layer.shift_kernel()[:, lag], expected, rtol=0, atol=1e-13)
    start = H3(WIDTH, state_size=STATES)
    assert torch.equal(start.shift_kernel(), start.taps), "it starts with b = e₁"
    assert "shift" in start.kernel_parameters
    assert "shift" not in H3(WIDTH, learn_shift=False).kernel_parameters


def test_the_start_is_s4d_lin():
    layer = H3(200, state_size=16, dtype=torch.float64)
    assert layer.a_real.exp().flatten().tolist() == pytest.approx([0.5] * 8)
    assert layer.a_imag.flatten().tolist() == pytest.approx([math.pi * n for n in range(8)])
    assert layer.taps.abs().max() <= 0.25
    assert torch.view_as_complex(layer.c.detach()).abs().square().mean().item() == pytest.approx(1, rel=0.1)
    assert layer.log_dt.exp().min() >= 1e-3
    assert layer.log_dt.exp().max() <= 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 3}, "head_dim must divide the width of the layer, got head_dim=3 and a width of 16"),
        ({"head_dim": 0}, "head_dim must be a whole number of at least 1, got 0"),
        ({"state_size": 7}, "state_size must be an even number of at least 2, got 7"),
        ({"state_size": 0}, "state_size must be an even number of at least 2, got 0"),
        ({"dt_max": 1e-4}, r"dt_min must be at most dt_max, got dt_min=0\.001 and dt_max=0\.0001"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("h3", 16, **options)
