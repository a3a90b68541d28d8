"""Mega against its formula, token by token, and against itself in other forms."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from longlens.errors import BadInput
from longlens.mixers import mega
from longlens.mixers.common import hide_padding
from longlens.mixers.mega import MegaAttention, MovingAverage, ema_reference, mega_reference, toeplitz
from longlens.mixers.registry import choose_mixer, create_mixer, find_mixer
from longlens.models.block import Block
from longlens.models.config import ModelConfig

LENGTH, WIDTH = 23, 6


def make(**options: Any) -> MegaAttention:
    """A layer whose parameters are all large enough to show."""
    options = {"max_length": 29, "shared": 4, "ema_size": 3} | options
    layer = MegaAttention(WIDTH, **options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.7)
    return layer


def assert_same(actual, expected, inputs, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, inputs, grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("attention", ["softmax", "laplace", "relu2"])
def test_the_formula(attention, bidirectional, chunk_size, rotary):
    """Residual and layer together, outputs and gradients."""
    layer = make(attention=attention, bidirectional=bidirectional, chunk_size=chunk_size, rotary=rotary)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([mega_reference(layer, row) for row in x])
    assert_same(x + layer(x), expected, (x, *layer.parameters()))


def update_gate(layer, x):
    """u = σ(x'·W_u), (L, D)"""
    averaged = F.silu(ema_reference(x, *layer.average.parts) + layer.average.omega * x)
    start = layer.shared + layer.hidden
    return torch.sigmoid(layer.in_proj(averaged)[..., start : start + WIDTH])


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_the_residual_of_a_prenorm_block_is_not_normalized(norm):
    """x + u ⊙ (h - x), where u and h are those of norm(x): the reference, which has (1 - u) ⊙ norm(x) for a residual,
    plus (1 - u) ⊙ (x - norm(x))."""
    layer = make(bidirectional=False)
    block = Block(ModelConfig(width=WIDTH, prenorm=True, norm=norm, ffn="none"), layer).double()
    x = (3 + 5 * torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)).requires_grad_()
    n = block.mixer_norm(x)
    gate = torch.stack([update_gate(layer, row) for row in n])
    expected = torch.stack([mega_reference(layer, row) for row in n]) + (1 - gate) * (x - n)
    assert_same(block(x), expected, (x, *block.parameters()))

    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
    noise = torch.where(mask[..., None], x, math.nan)
    output = layer(hide_padding(n, mask), mask=mask, residual=noise)
    assert output.isfinite().all(), "padding is hidden in the residual as well"
    steps, state = [], None
    for t in range(LENGTH):
        update, state = layer.step(n[:, t], state, residual=x[:, t])
        steps.append(update)
    torch.testing.assert_close(x + torch.stack(steps, dim=1), expected, rtol=0, atol=1e-10)


def test_a_postnorm_block_is_as_published():
    """norm(x + u ⊙ (h - x))"""
    layer = make()
    block = Block(ModelConfig(width=WIDTH, prenorm=False, ffn="none"), layer).double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = block.mixer_norm(torch.stack([mega_reference(layer, row) for row in x]))
    assert_same(block(x), expected, (x, *block.parameters()))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("truncation", [1, 5, 22, 23, 24])
def test_a_truncated_average_sees_so_many_inputs_on_each_side(truncation, bidirectional):
    """The average of the recurrence without the inputs that are ``truncation`` or more steps away."""
    layer = make(bidirectional=bidirectional, truncation=truncation)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    averaged = layer.average.omega * x
    for s in range(LENGTH):
        alone = ema_reference(F.pad(x[s : s + 1], (0, 0, s, LENGTH - 1 - s)), *layer.average.parts)
        near = (torch.arange(LENGTH) - s).abs() < truncation
        averaged = averaged + alone * near[:, None]
    assert_same(layer.average(x[None])[0], F.silu(averaged), (x, *layer.average.parameters()))
    kernels = layer.kernel(40)
    assert kernels[:, truncation:].count_nonzero() == 0
    torch.testing.assert_close(kernels[:, :truncation], layer.kernel(truncation), rtol=0, atol=1e-12)


def test_a_truncated_average_has_no_steps():
    with pytest.raises(BadInput, match="step needs truncation=None"):
        make(bidirectional=False, truncation=4).step(torch.randn(1, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_long_sequences_are_the_same(monkeypatch, bidirectional, chunk_size, rotary):
    """Those whose pairs are never all there at once; the last chunk is a short one."""
    layer = make(bidirectional=bidirectional, chunk_size=chunk_size, rotary=rotary)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    for mask in (None, torch.arange(LENGTH) < torch.tensor([[LENGTH], [11], [0]])):
        seen = torch.ones(3, LENGTH, dtype=torch.bool) if mask is None else mask
        expected = layer(x, mask=mask)[seen]
        monkeypatch.setattr(mega, "DENSE_LENGTH", 0)
        monkeypatch.setattr(layer, "_weigh", None)
        actual = layer(x, mask=mask)
        monkeypatch.undo()
        assert actual.isfinite().all()
        assert_same(actual[seen], expected, (x, *layer.parameters()))


@pytest.mark.parametrize("length", [1, 2, 101])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_kernel_is_that_of_the_recurrence(bidirectional, length):
    layer = make(bidirectional=bidirectional)
    x = torch.zeros(2 * length + 1, WIDTH, dtype=torch.float64)
    x[length] = 1.0
    response, kernel = ema_reference(x, *layer.average.parts), layer.kernel(length)
    assert kernel.shape == (2 * WIDTH if bidirectional else WIDTH, length)
    expected = response[length : 2 * length].T
    if bidirectional:
        expected = torch.cat([expected, response[:length].flip(0).T])
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"attention": "laplace"}, {"attention": "relu2", "chunk_size": 5}, {"rotary": True}]
)
def test_steps_of_every_kind_of_attention(options):
    layer = make(bidirectional=False, **options)
    x, state, outputs = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), None, []
    for t in range(LENGTH):
        output, state = layer.step(x[:, t], state)
        outputs.append(output)
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-10)


def test_a_step_keeps_one_chunk_and_leaves_its_state_alone():
    layer = make(bidirectional=False, chunk_size=5)
    x, state, sizes = torch.randn(2, 12, WIDTH, dtype=torch.float64), None, []
    for t in range(12):
        before = None if state is None else tuple(part.clone() for part in state)
        _, following = layer.step(x[:, t], state)
        if state is not None:
            torch.testing.assert_close(tuple(state), before, rtol=0, atol=0)
        state = following
        sizes.append(state[1].shape[1])
    assert sizes == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("attention", ["softmax", "laplace"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_chunk_of_the_whole_length_is_no_chunk(bidirectional, attention):
    chunked = make(chunk_size=LENGTH, bidirectional=bidirectional, attention=attention)
    whole = make(max_length=LENGTH, bidirectional=bidirectional, attention=attention)
    whole.load_state_dict(chunked.state_dict())
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(chunked(x), whole(x), rtol=0, atol=0)


def test_chunks_meet_in_the_average_alone():
    layer = make(chunk_size=8)
    x = torch.randn(1, 24, WIDTH, dtype=torch.float64)
    changed = x.clone()
    changed[:, 20] += 1.0
    assert (layer(changed) - layer(x))[:, :8].abs().max() > 1e-6
    with torch.no_grad():
        layer.average.gamma.zero_()
    assert (layer(changed) - layer(x))[:, :16].abs().max() < 1e-12
    assert (layer(changed) - layer(x))[:, 16].abs().max() > 1e-6


@pytest.mark.parametrize("attention", ["softmax", "laplace", "relu2"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": False}, {"chunk_size": 5}])
def test_padding_on_any_side_is_not_there(attention, options):
    """Without the moving average, to which padding is time that passes: a mask with holes, and a row of padding."""
    layer = make(attention=attention, rotary=True, **options)
    with torch.no_grad():
        layer.average.gamma.zero_()
    x = torch.randn(3, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, :3] = mask[1, 6:9] = mask[1, 11] = mask[2] = False
    output = layer(x, mask=mask)
    noise = torch.where(mask[..., None], x, 1e3 * torch.randn_like(x))
    torch.testing.assert_close(layer(noise, mask=mask)[mask], output[mask], rtol=0, atol=1e-10)
    grads = torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))
    assert all(part.isfinite().all() for part in (output, *grads))
    torch.testing.assert_close(output[1:2, 10], layer(x[1:2, :11], mask=mask[1:2, :11])[:, 10], rtol=0, atol=1e-10)
    if not options:
        torch.testing.assert_close(output[0, 3:], layer(x[:1, 3:])[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_softmax_is_never_over_nothing(monkeypatch, bidirectional):
    """Not every kernel of SDPA defines it, so that padding which would see nothing sees padding."""
    masks = []

    def spy(query, key, value, mask, dropout):
        masks.append(mask)
        return value

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    mask = torch.arange(LENGTH) >= torch.tensor([0, 3, LENGTH])[:, None]
    make(bidirectional=bidirectional)(torch.randn(3, LENGTH, WIDTH, dtype=torch.float64), mask=mask)
    assert masks[0].isfinite().any(dim=-1).all()
    assert masks[0].isinf().any()


def test_very_fast_and_very_slow_averages():
    """q = 0 and q = 1 as float32 would round them."""
    for delta, alpha, ratio in ((60.0, 60.0, 0.0), (-9.0, -9.0, math.exp(-1e6 * math.exp(-18)))):
        average = MovingAverage(1, 1, bidirectional=False)
        for parameter, value in zip(average.parts, (delta, alpha, 1.0, 1.0), strict=True):
            torch.nn.init.constant_(parameter, value)
        kernel = average.kernel(1_000_001)
        assert (kernel[0, -1] / kernel[0, 0]).item() == pytest.approx(ratio, abs=1e-4)
        for grad in torch.autograd.grad(kernel[:, :100].sum(), average.parts):
            assert grad.isfinite().all()


def test_toeplitz_by_hand():
    values = torch.tensor([-2, -1, 0, 1, 2])
    torch.testing.assert_close(toeplitz(values), torch.tensor([[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]))
    torch.testing.assert_close(toeplitz(torch.tensor([5])), torch.tensor([[5]]))


@pytest.mark.parametrize("dense_length", [0, LENGTH])
@pytest.mark.parametrize("attention", ["softmax", "laplace"])
def test_attention_dropout_is_of_the_weights_in_training(monkeypatch, attention, dense_length):
    monkeypatch.setattr(mega, "DENSE_LENGTH", dense_length)
    layer = make(attention_dropout=0.5, attention=attention)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)


def test_dropout_is_of_the_average_and_of_h(monkeypatch):
    """With a dropout that halves, x' enters as with half of the weights, and h is h/2: what is left of the reference
    y = u ⊙ h + (1 - u) ⊙ x is x + u ⊙ (h/2 - x) = y/2 + (1 - u) ⊙ x/2."""
    layer = make(dropout=0.5)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer.eval()(x), layer(x), rtol=0, atol=0)
    assert not torch.equal(layer.train()(x), layer(x))
    monkeypatch.setattr(F, "dropout", lambda x, p, training: (1 - p) * x if training else x)
    actual = x + layer(x)
    with torch.no_grad():
        layer.in_proj.weight *= 0.5
    expected = [(mega_reference(layer, row) + (1 - update_gate(layer, row)) * row) / 2 for row in x]
    torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=1e-10)


def test_begins_as_the_official_code():
    layer = MegaAttention(256, max_length=512)
    expected = {
        "average.delta": 0.2,
        "average.alpha": 0.2,
        "average.gamma": 1.0,
        "average.omega": 1.0,
        "in_proj.weight": 0.02,
        "value_proj.weight": 0.02,
        "out_proj.weight": 0.02,
        "scale": 0.02,
        "position_bias": 0.02,
    }
    parameters = dict(layer.named_parameters())
    for name, std in expected.items():
        assert parameters[name].std().item() == pytest.approx(std, rel=0.25), name
        assert abs(parameters[name].mean().item()) < std / 3, name
    signs = torch.tensor([1.0, -1.0]).repeat(8)
    assert (layer.average.beta - signs).abs().max() < 0.15
    assert layer.offset.count_nonzero() == 0


def test_a_sequence_beyond_the_position_biases():
    x = torch.randn(1, 30, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"at most 29 tokens, .* got 30: .* rotary=True"):
        make()(x)
    make(rotary=True)(x)
    make(chunk_size=7)(x)
    assert MegaAttention(4).position_bias.shape == (2047,)


def test_only_matrices_that_project_decay():
    """What has two dimensions and is no projection of the tokens."""
    shapes = {name: parameter.ndim for name, parameter in MegaAttention(8).named_parameters()}
    assert {name for name, ndim in shapes.items() if ndim > 1} - set(MegaAttention.no_decay) == {
        "value_proj.weight",
        "in_proj.weight",
        "out_proj.weight",
    }
    assert all(shapes[name] == 2 for name in MegaAttention.no_decay)


def test_chunks_are_those_of_mega_chunk_alone():
    assert "chunk_size" not in find_mixer("mega").options
    assert create_mixer("mega", 8).chunk_size is None
    assert choose_mixer("mega-chunk").options["chunk_size"] == 128
    assert create_mixer("mega-chunk", 8, chunk_size=5).chunk_size == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": 0}, "shared must be a whole number of at least 1, got 0"),
        ({"ema_size": 0}, "ema_size must be a whole number of at least 1, got 0"),
        ({"expansion": 0.0}, "expansion must be a number above 0, got 0.0"),
        ({"dropout": 1.5}, "dropout must be a number of at least 0 and below 1, got 1.5"),
        ({"shared": 7, "rotary": True}, "shared must be an even number with rotary=True, got 7"),
        ({"attention": "linear"}, "attention must be one of softmax, laplace, relu2, got linear"),
        ({"chunk_size": 5}, "mixer 'mega' has no option 'chunk_size'"),
    ],
)
def test_errors_say_what_is_allowed(options, message):
    with pytest.raises(BadInput, match=message):
        create_mixer("mega", 8, **options)


def test_chunk_sizes_are_positive():
    for size in (0, None):
        with pytest.raises(BadInput, match=f"chunk_size must be a whole number of at least 1, got {size}"):
            create_mixer("mega-chunk", 8, chunk_size=size)
