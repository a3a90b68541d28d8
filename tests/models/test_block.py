"""Blocks and feedforward parts, against compositions written by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longlens.mixers.registry import create_mixer
from longlens.models.block import Block, Dropout, FeedForward, RMSNorm
from longlens.models.config import ModelConfig

MASK = torch.arange(13) < torch.tensor([[13], [5], [1]])


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


ACTIVATIONS = {"gelu": gelu, "silu": lambda x: x / (1 + (-x).exp()), "relu": lambda x: x.clamp(min=0)}


def feed(layer, x, activation="gelu"):
    inner, f = x @ layer.up.weight.T + layer.up.bias, ACTIVATIONS[activation]
    if layer.gated:
        half = layer.up.weight.shape[0] // 2
        inner = inner[..., :half] * f(inner[..., half:])
    else:
        inner = f(inner)
    return inner @ layer.down.weight.T + layer.down.bias


def normalize(norm, x, mask):
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, (16,), norm.weight, norm.bias)
    if isinstance(norm, RMSNorm):
        return norm.weight * x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    tokens = x[mask]
    centered = (x - tokens.mean(dim=0)) / (tokens.var(dim=0, unbiased=False) + 1e-5).sqrt()
    return centered * norm.weight + norm.bias


def by_hand(block, x, mask):
    """What Vaswani et al. (2017) do, and with prenorm what GPT-2 does."""
    keep = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    if block.prenorm:
        x = x + block.mixer(normalize(block.mixer_norm, x, keep), mask=mask)
        return x if block.ffn is None else x + feed(block.ffn, normalize(block.ffn_norm, x, keep))
    x = normalize(block.mixer_norm, x + block.mixer(x, mask=mask), keep)
    return x if block.ffn is None else normalize(block.ffn_norm, x + feed(block.ffn, x), keep)


def make(**options):
    """A block whose norms and biases are not 1 and 0."""
    mixer = create_mixer("las", 16, heads=4, max_rate=0.3)
    block = Block(ModelConfig(width=16, **options), mixer).double()
    for parameter in block.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)
    return block


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("ffn", ["plain", "glu", "none"])
@pytest.mark.parametrize("norm", ["layer", "batch", "scale", "rms"])
@pytest.mark.parametrize("prenorm", [True, False])
def test_a_block_is_its_composition(prenorm, norm, ffn, masked):
    block, mask = make(prenorm=prenorm, norm=norm, ffn=ffn), MASK if masked else None
    x = torch.randn(3, 13, 16, dtype=torch.float64, requires_grad=True)
    keep = MASK if masked else torch.ones_like(MASK)
    actual, expected = block(x, mask)[keep], by_hand(block, x, mask)[keep]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (x, *block.parameters()), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("ratio", "inner"), [(4.0, 64), (0.5, 8), (1.3, 21), (0.001, 1)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_inner_width_is_a_multiple_of_the_width(gated, ratio, inner):
    layer = FeedForward(16, ratio, gated)
    assert layer.up.weight.shape == (inner * (2 if gated else 1), 16)
    assert layer.down.weight.shape == (16, inner)


def test_a_block_without_feedforward_has_neither_it_nor_its_norm():
    names = {name.split(".")[0] for name in make(ffn="none").state_dict()}
    assert names == {"mixer", "mixer_norm"}


@pytest.mark.parametrize("prenorm", [True, False])
def test_dropout_is_for_training_only(prenorm):
    block, x = make(prenorm=prenorm, dropout=0.5), torch.randn(3, 13, 16, dtype=torch.float64)
    assert not torch.equal(block(x), block(x))
    block.eval()
    torch.testing.assert_close(block(x), by_hand(block, x, None), rtol=0, atol=1e-11)


def test_dropout_is_of_what_a_part_adds_and_not_of_the_sum():
    block, x = make(dropout=0.5), torch.randn(3, 13, 16, dtype=torch.float64)
    for layer in (block.mixer.out_proj, block.ffn.down):
        nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    assert torch.equal(block(x), x)
    nn.init.ones_(block.mixer.out_proj.bias)  # the mixer adds 1 everywhere: dropped, or doubled
    assert set((block(x) - x).round(decimals=9).unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_of_the_feedforward_part(activation, gated):
    block = make(ffn="glu" if gated else "plain", ffn_activation=activation)
    x = torch.randn(3, 13, 16, dtype=torch.float64, requires_grad=True)
    actual, expected = block.ffn(x), feed(block.ffn, x, activation)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(output.square().sum(), x)[0] for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_dropout_inside_of_the_feedforward_part_is_of_what_the_second_layer_gets():
    block, x = make(ffn_dropout=0.5), torch.randn(3, 13, 16, dtype=torch.float64)
    nn.init.ones_(block.ffn.down.bias), nn.init.eye_(block.ffn.down.weight)
    inner = gelu(x @ block.ffn.up.weight.T + block.ffn.up.bias)[..., :16]
    factors = (block.ffn(x) - 1) / inner
    assert set(factors.round(decimals=6).abs().unique().tolist()) == {0.0, 2.0}
    assert torch.equal(block.eval().ffn(x), block.ffn(x))


def test_tied_dropout_drops_channels_of_whole_sequences():
    torch.manual_seed(0)
    x = torch.ones(64, 13, 50)
    found = Dropout(0.2, tied=True)(x)
    assert set(found.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(found, found[:, :1].expand_as(found)), "one mask for all positions"
    assert 0.17 < (found[:, 0] == 0).float().mean() < 0.23, "and another for each sequence and channel"
    free = Dropout(0.2)(x)
    assert not torch.equal(free, free[:, :1].expand_as(free))
    assert torch.equal(Dropout(0.2, tied=True).eval()(x), x)


@pytest.mark.parametrize("tied", [True, False])
def test_the_dropout_of_a_block_can_be_tied(tied):
    block, x = make(dropout=0.5, tied_dropout=tied), torch.zeros(3, 13, 16, dtype=torch.float64)
    for layer in (block.mixer.out_proj, block.ffn.down):
        nn.init.zeros_(layer.weight), nn.init.ones_(layer.bias)
    dropped = block(x)
    assert dropped.unique().tolist() == [0.0, 2.0, 4.0]
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped)) == tied


class Gate(nn.Module):
    """u ⊙ (h - residual), as MEGA: the residual is part of the layer."""

    takes_residual = True

    def __init__(self):
        super().__init__()
        self.h, self.u = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, *, mask=None, residual=None):
        return self.u(x).sigmoid() * (self.h(x) - (x if residual is None else residual))


@pytest.mark.parametrize("prenorm", [True, False])
def test_a_layer_with_a_residual_of_its_own_gets_the_stream_as_it_is(prenorm):
    """With pre-norm y = x + u(norm x) ⊙ (h(norm x) - x), and otherwise norm(x + u(x) ⊙ (h(x) - x)), not dropped."""
    config = ModelConfig(width=16, prenorm=prenorm, ffn="none", dropout=0.5)
    block, x = Block(config, Gate()).double(), 3 + torch.randn(3, 13, 16, dtype=torch.float64)
    seen = F.layer_norm(x, (16,)) if prenorm else x
    u, h = (seen @ part.weight.T + part.bias for part in (block.mixer.u, block.mixer.h))
    expected = x + (h - x) / (1 + (-u).exp())
    expected = expected if prenorm else F.layer_norm(expected, (16,))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)
