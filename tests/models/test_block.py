"""Blocks and feedforward parts, against compositions written by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longlens.mixers.registry import create_mixer
from longlens.models.block import Block, FeedForward
from longlens.models.config import ModelConfig

MASK = torch.arange(13) < torch.tensor([[13], [5], [1]])


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def feed(layer, x):
    inner = x @ layer.up.weight.T + layer.up.bias
    if layer.gated:
        half = layer.up.weight.shape[0] // 2
        inner = inner[..., :half] * gelu(inner[..., half:])
    else:
        inner = gelu(inner)
    return inner @ layer.down.weight.T + layer.down.bias


def normalize(norm, x, mask):
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, (16,), norm.weight, norm.bias)
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
@pytest.mark.parametrize("ffn", ["gelu", "glu", "none"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
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
