"""Dropout inside of S4 and its successors: after the activation, before the output projection, tied over time."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.registry import create_mixer
from longlens.models.model import change_by_future

P, WIDTH = 0.25, 6
LAYERS = [
    ("s4", {}),
    ("s4-v1", {}),
    ("s4-v2", {}),
    ("s4d", {"bidirectional": True}),
    ("s5", {"activation": "half_glu1"}),
    ("s5", {"activation": "half_glu2"}),
    ("sgconv", {"output": "linear"}),
    ("long-conv", {"channels": 2}),
]
EVERY = pytest.mark.parametrize(
    ("name", "options"), LAYERS, ids=[f"{n}{''.join(map(str, o.values()))}" for n, o in LAYERS]
)


def build(name, width=WIDTH, **options):
    torch.manual_seed(0)
    return create_mixer(name, width, max_length=40, dtype=torch.float64, dropout=P, **options)


def dropped(layer, run):
    """What a call returns, and what the output projection was given in it."""
    given = []
    hook = layer.out_proj.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    y = run(layer)
    hook.remove()
    return y, torch.cat(given, dim=1)


def project(layer, y, u):
    """The output by its formula: y is what the kernel gives, u what is left of its GELU."""
    projected = u @ layer.out_proj.weight.T + layer.out_proj.bias
    if hasattr(layer, "activation"):
        return (u if layer.activation == "half_glu1" else y) / (1 + torch.exp(-projected))
    if layer.output == "linear":
        return projected
    left, right = projected.chunk(2, dim=-1)
    return left / (1 + torch.exp(-right))


@EVERY
def test_a_channel_is_dropped_at_all_positions_or_scaled_at_all(name, options):
    layer, x = build(name, 32, **options), 0.01 * torch.randn(20, 13, 32, dtype=torch.float64)
    whole, u = dropped(layer.eval(), lambda layer: layer(x))
    actual, left = dropped(layer.train(), lambda layer: layer(x))
    masks = left / u  # (B, L, D) or (B, L, 2D)
    torch.testing.assert_close(masks, masks[:, :1].expand_as(masks), rtol=0, atol=1e-9)
    masks = masks[:, 0]
    kept = masks > 0.5
    torch.testing.assert_close(masks, kept.double() / (1 - P), rtol=0, atol=1e-9)
    assert kept.double().mean().item() == pytest.approx(1 - P, abs=0.08)
    assert len(kept.unique(dim=0)) == len(x), "each sequence has its own mask"
    assert not torch.equal(actual, whole)


@EVERY
def test_it_is_before_the_output_projection(name, options, monkeypatch):
    layer, x = build(name, **options).train(), torch.randn(2, 13, WIDTH, dtype=torch.float64, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "_out", lambda y: y)
        y = layer(x)  # of the kernel and skip
    actual, u = dropped(layer, lambda layer: layer(x))
    mask = (u / F.gelu(y))[:, :1].detach()
    expected = project(layer, y, F.gelu(y) * mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    weight = torch.randn_like(actual)
    gradients = [
        torch.autograd.grad(y, [x, *layer.parameters()], weight, retain_graph=True) for y in (actual, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)


@EVERY
def test_in_evaluation_there_is_none(name, options):
    x = torch.randn(2, 13, WIDTH, dtype=torch.float64)
    layer = build(name, **options).eval()
    plain = create_mixer(name, WIDTH, max_length=40, dtype=torch.float64, **options)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), plain.train()(x))


@EVERY
def test_padding_and_later_tokens_change_nothing(name, options):
    """With the same random numbers, as the mask does not depend on the length."""
    layer, x = build(name, **options).train(), torch.randn(2, 13, WIDTH, dtype=torch.float64)
    outputs = []
    for more in (0, 7):
        padded = torch.cat([x, torch.randn(2, more, WIDTH, dtype=torch.float64)], dim=1)
        mask = torch.arange(13 + more).expand(2, -1) < 13
        torch.manual_seed(3)
        outputs.append(layer(padded, mask=mask)[:, :13])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    if not layer.bidirectional:
        assert change_by_future(layer, WIDTH) < 1e-9


@pytest.mark.parametrize("name", ["s4", "s4d", "s5"])
def test_a_step_drops_channels_and_not_sequences(name):
    layer, x = build(name, 32).train(), torch.randn(20, 32, dtype=torch.float64)
    _, u = dropped(layer, lambda layer: layer.step(x)[0])
    share = (u == 0).double().mean(dim=-1)
    assert u.shape == (20, 1, 32)
    assert 0 < share.min() < share.max() < 1
