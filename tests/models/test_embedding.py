"""Values and positions, against the formulas of Vaswani et al. (2017)."""

import math

import pytest
import torch
import torch.nn.functional as F

from longlens.errors import BadInput
from longlens.models.model import Embedding, sinusoids
from longlens.tasks.base import Spec

TOKENS = Spec("tokens", 11, 20, "classify", 3, "accuracy")
REAL = Spec("real", 3, 20, "regress", 1, "r2")


@pytest.mark.parametrize("width", [2, 6, 16])
def test_sinusoids_are_those_of_the_paper(width):
    """PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i + 1) = cos of the same; ours has all sines first."""
    waves = sinusoids(37, width)
    for position in range(37):
        for i in range(width // 2):
            angle = position / 10_000 ** (2 * i / width)
            assert waves[position, i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert waves[position, width // 2 + i].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_a_step_turns_sinusoids_by_the_same_angles_everywhere():
    sine, cosine = sinusoids(64, 16).double().chunk(2, dim=1)
    step_sine, step_cosine = sine[5], cosine[5]
    torch.testing.assert_close(sine[5:], sine[:-5] * step_cosine + cosine[:-5] * step_sine, rtol=0, atol=2e-5)
    torch.testing.assert_close(cosine[5:], cosine[:-5] * step_cosine - sine[:-5] * step_sine, rtol=0, atol=2e-5)


@pytest.mark.parametrize("width", [1, 5, 7])
def test_sinusoids_of_an_odd_width_tell_positions_apart(width):
    waves = sinusoids(20, width)
    assert waves.shape == (20, width)
    assert len(torch.unique(waves, dim=0)) == 20


@pytest.mark.parametrize("positions", ["none", "rotary", "sinusoidal", "learned"])
@pytest.mark.parametrize("spec", [TOKENS, REAL], ids=["tokens", "real"])
def test_it_is_the_value_plus_the_position(spec, positions):
    layer = Embedding(spec, 6, positions).double()
    values = torch.randint(11, (2, 13)) if spec is TOKENS else torch.randn(2, 13, 3, dtype=torch.float64)
    weight = layer.values.weight
    expected = F.one_hot(values, 11).double() @ weight if spec is TOKENS else values @ weight.T + layer.values.bias
    if positions == "sinusoidal":
        expected = expected + sinusoids(20, 6)[:13].double()
    if positions == "learned":
        expected = expected + layer.learned(torch.arange(13))
    actual = layer(values)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, list(layer.parameters()), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-13)


def test_learned_positions_have_an_end():
    layer = Embedding(TOKENS, 6, "learned")
    assert layer(torch.zeros(1, 20, dtype=torch.long)).shape == (1, 20, 6)
    message = "must have at most 20 tokens, as there are learned positions, got 21: cut it, or choose sinusoidal"
    with pytest.raises(BadInput, match=message):
        layer(torch.zeros(1, 21, dtype=torch.long))


def test_sinusoids_have_no_end():
    layer, tokens = Embedding(TOKENS, 6, "sinusoidal"), torch.randint(11, (2, 33))
    short = layer(tokens[:, :20])
    long = layer(tokens)
    assert torch.equal(long[:, :20], short)
    torch.testing.assert_close(long - layer.values(tokens), sinusoids(33, 6).expand(2, -1, -1))
    assert torch.equal(layer(tokens[:, :20]), short), "a longer sequence changes nothing for those after it"


def test_sinusoids_are_not_part_of_a_checkpoint():
    assert list(Embedding(TOKENS, 6, "sinusoidal").state_dict()) == ["values.weight"]


def test_shared_weights_are_small_and_scaled_up():
    """Vectors of the size of the sinusoids go in, and logits of about 1 come out."""
    layer = Embedding(Spec("tokens", 1000, 20, "language", 1000, "perplexity"), 64, "none", tied=True)
    assert layer.values.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    tokens = torch.randint(1000, (2, 13))
    torch.testing.assert_close(layer(tokens), 8 * layer.values(tokens))
