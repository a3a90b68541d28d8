"""Mega against the package mega-pytorch, whose moving average differs: q = (1 - p)·σ(damping), no 1/√N, and neither
ω ⊙ x nor silu. Its parameters are translated, such that gradients reach them through our layer, and ω and silu added.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from longlens.mixers.mega import MegaAttention

mega_pytorch = pytest.importorskip("mega_pytorch", reason="the oracle 'mega-pytorch' is not installed")

WIDTH, SIZE = 6, 3


class Completed(nn.Module):
    """The package's average, with what it leaves out."""

    def __init__(self, average: nn.Module):
        super().__init__()
        self.average, self.omega = average, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return F.silu(self.average(x) + self.omega * x)


def translate_average(average, omega):
    """Its q is smaller than 1 - p, which ours never is; with p = σ(δ) = σ(α) = √(1 - q) and other β it can be."""
    sides = [(average.alphas, average.dampen_factors)]
    if average.bidirectional:
        sides.append((average.reverse_alphas, average.reverse_dampen_factors))
    expansions, reductions = (
        weight.unflatten(0, (len(sides), SIZE)).transpose(1, 2) for weight in (average.expansion, average.reduction)
    )
    delta, beta = [], []
    for (alphas, damping), expansion in zip(sides, expansions, strict=True):
        p = torch.sigmoid(alphas)
        new = torch.sqrt(1 - (1 - p) * torch.sigmoid(damping))
        delta.append(torch.logit(new).expand(WIDTH, SIZE))
        beta.append(expansion * p / new)
    return {
        "delta": torch.cat(delta),
        "alpha": torch.cat(delta),
        "beta": torch.cat(beta),
        "gamma": math.sqrt(SIZE) * reductions.flatten(0, 1),
        "omega": omega,
    }


def translate(oracle, length):
    """The parameters of our layer in those of the package."""
    attention, completed = oracle.single_headed_attn, oracle.multi_headed_ema
    (to_shared, _), (to_value, _) = attention.to_qk, attention.to_v
    (to_reset, _), (to_update, _) = oracle.to_reset_gate, oracle.to_update_gate
    bias = attention.rel_pos_bias(torch.empty(length, length))
    average = translate_average(completed.average, completed.omega)
    return {f"average.{name}": value for name, value in average.items()} | {
        "value_proj.weight": to_value.weight,
        "value_proj.bias": to_value.bias,
        "in_proj.weight": torch.cat([to_shared.weight, to_reset.weight, to_update.weight, oracle.Wh.T]),
        "in_proj.bias": torch.cat([to_shared.bias, to_reset.bias, to_update.bias, oracle.bh]),
        "out_proj.weight": oracle.Uh.T,
        "out_proj.bias": torch.zeros(WIDTH),
        "scale": attention.offsetscale.gamma,
        "offset": attention.offsetscale.beta,
        "position_bias": torch.cat([bias[1:, 0].flip(0), bias[0]]),
    }


def assert_same(actual, expected, inputs):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, inputs, grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-9)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("length", [1, 23, 101])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_moving_average(bidirectional, length):
    oracle = Completed(mega_pytorch.mega_pytorch.MultiHeadedEMA(dim=WIDTH, heads=SIZE, bidirectional=bidirectional))
    layer = MegaAttention(WIDTH, ema_size=SIZE, bidirectional=bidirectional).average
    x = torch.randn(2, length, WIDTH, requires_grad=True)
    actual = functional_call(layer, translate_average(oracle.average, oracle.omega), x)
    assert_same(actual, oracle(x), (x, *oracle.parameters()))


@pytest.mark.parametrize(("bidirectional", "attention"), [(False, "softmax"), (True, "softmax"), (True, "laplace")])
def test_layer(bidirectional, attention):
    """Queries are as wide as the layer, as the package divides by the root of the latter; and it divides causal laplace
    scores by the length, not by the number of keys."""
    length = 23
    oracle = mega_pytorch.MegaLayer(
        dim=WIDTH,
        ema_heads=SIZE,
        attn_dim_qk=WIDTH,
        attn_dim_value=9,
        causal=not bidirectional,
        laplacian_attn_fn=attention == "laplace",
    )
    nn.init.normal_(oracle.single_headed_attn.offsetscale.gamma)
    nn.init.normal_(oracle.single_headed_attn.offsetscale.beta)
    oracle.multi_headed_ema = Completed(oracle.multi_headed_ema)
    options = {"bidirectional": bidirectional, "attention": attention, "shared": WIDTH, "expansion": 1.5}
    layer = MegaAttention(WIDTH, max_length=length, ema_size=SIZE, **options)
    x = torch.randn(2, length, WIDTH, requires_grad=True)
    actual = x + functional_call(layer, translate(oracle, length), x)
    assert_same(actual, oracle(x), (x, *oracle.parameters()))
