"""Metrics equal their definitions, in one piece or in many."""

import math

import pytest
import torch

from longlens.models.model import metric_sums, metric_value
from longlens.training.run import higher_is_better


def value(metric, outputs, targets, parts=1):
    pieces = zip(outputs.chunk(parts), targets.chunk(parts), strict=True)
    return metric_value(metric, sum(metric_sums(metric, o, t) for o, t in pieces))


@pytest.mark.parametrize("parts", [1, 3])
def test_accuracy(parts):
    outputs = torch.eye(4)[[0, 1, 2, 3, 0, 1]]
    assert value("accuracy", outputs, torch.tensor([0, 1, 2, 0, 0, 0]), parts) == pytest.approx(4 / 6)


@pytest.mark.parametrize("parts", [1, 4])
def test_r2(parts):
    targets = torch.randn(8, 5)
    outputs = targets + 0.3 * torch.randn(8, 5)
    expected = 1 - (outputs - targets).square().mean() / targets.var(correction=0)
    assert value("r2", outputs, targets, parts) == pytest.approx(expected.item(), rel=1e-5)
    assert value("r2", targets.mean().expand(8, 5), targets) == pytest.approx(0, abs=1e-6)
    assert value("r2", targets, targets) == 1
    assert math.isnan(value("r2", torch.zeros(2), torch.ones(2)))
    with pytest.raises(ValueError, match="they must be alike"):
        value("r2", outputs[..., None], targets)


@pytest.mark.parametrize("parts", [1, 2])
def test_languages(parts):
    outputs, targets = torch.randn(4, 6, 9), torch.randint(9, (4, 6))
    targets[0, 4:] = -100
    chosen = outputs.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)[targets >= 0]
    assert value("bits_per_byte", outputs, targets, parts) == pytest.approx(
        -chosen.mean().item() / math.log(2), rel=1e-5
    )
    assert value("perplexity", outputs, targets, parts) == pytest.approx(math.exp(-chosen.mean().item()), rel=1e-5)


def test_what_is_not_finite_is_no_hit_and_nothing_has_no_value():
    assert value("accuracy", torch.full((4, 3), float("nan")), torch.zeros(4, dtype=torch.int64)) == 0
    for metric, shape in (("accuracy", (0, 3)), ("bits_per_byte", (0, 1, 3))):
        assert math.isnan(value(metric, torch.zeros(shape), torch.zeros(shape[:-1], dtype=torch.int64)))
    assert math.isnan(value("r2", torch.zeros(0, 2), torch.zeros(0, 2)))


def test_uniform_guessing():
    assert value("bits_per_byte", torch.zeros(1, 7, 256), torch.zeros(1, 7, dtype=torch.int64)) == pytest.approx(8)
    assert value("perplexity", torch.zeros(1, 7, 50), torch.zeros(1, 7, dtype=torch.int64)) == pytest.approx(50)


def test_directions():
    assert higher_is_better("accuracy")
    assert not higher_is_better("perplexity")
