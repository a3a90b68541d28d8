"""Weights for pictures: those by which every layer with queries, keys and values adds up its values."""

import pytest
import torch

from longlens.mixers.common import MultiHead, has_attention
from longlens.mixers.registry import create_mixer, find_mixer, list_mixers

HEADS = {name: {"heads": 2} if "heads" in find_mixer(name).options else {} for name in list_mixers()}
SEEN = [name for name in list_mixers() if has_attention(create_mixer(name, 16, device="meta", **HEADS[name]))]
LENGTH = 21  # not a multiple of the 8 numbers of a value


def layer_of(name):
    torch.manual_seed(0)
    return create_mixer(name, 16, max_length=LENGTH, dtype=torch.float64, **HEADS[name]).eval()


def test_layers_that_attend_have_them_and_others_have_not():
    assert {
        "transformer",
        "las",
        "las-chunk",
        "las-bidirectional",
        "alibi",
        "local",
        "bigbird",
        "performer",
        "reformer",
    } <= {*SEEN}
    assert not {"s4d", "hyena", "lstm", "luna"} & {*SEEN}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", SEEN)
def test_they_explain_what_a_layer_attends_to(name, padded):
    layer, x = layer_of(name), torch.randn(2, LENGTH, 16, dtype=torch.float64)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13]]) if padded else None
    x = x if mask is None else x * mask.unsqueeze(-1)
    value = layer._project(x)[2]
    ill = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), torch.nan)
    weights = layer.attention_weights(ill, mask=mask)
    assert weights.isfinite().all()
    explained = layer._merge(weights @ value)
    tokens = slice(None) if mask is None else mask
    torch.testing.assert_close(explained[tokens], layer(x, mask=mask)[tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in SEEN if "dropout" in find_mixer(name).options])
def test_they_have_neither_dropout_nor_a_gradient(name):
    layer, x = layer_of(name), torch.randn(1, LENGTH, 16, dtype=torch.float64)
    expected = layer.attention_weights(x)
    layer.train().dropout = 0.5
    assert torch.equal(layer.attention_weights(x), expected)
    assert not expected.requires_grad
    assert layer.training


@pytest.mark.parametrize("name", ["las", "las-chunk", "las-bidirectional", "s-attention", "l-attention"])
def test_probing_finds_the_weights_of_the_formula(name):
    layer, x = layer_of(name), torch.randn(1, LENGTH, 16, dtype=torch.float64)
    torch.testing.assert_close(MultiHead.attention_weights(layer, x), layer.attention_weights(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SEEN)
def test_an_empty_sequence_has_none(name):
    assert layer_of(name).attention_weights(torch.zeros(2, 0, 16, dtype=torch.float64)).shape[-2:] == (0, 0)
