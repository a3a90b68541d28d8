"""Attributions: what they add up to, and that they are where the decision is, for every layer."""

import sys

import numpy as np
import pytest
import torch

from longlens import list_mixers
from longlens.data.codec import Codec
from longlens.errors import BadInput
from longlens.mixers.registry import choose_mixer, find_mixer
from longlens.models.config import ModelConfig
from longlens.models.model import Model
from longlens.tasks.base import Spec
from longlens.training.explain import Explanation, explain

pytest.importorskip("captum")

REAL = Spec("real", 2, 24, "classify", 3, "accuracy")
TOKENS = Spec("tokens", 7, 24, "classify", 2, "accuracy")


def make(spec, mixer="las", description=None, **options):
    """A model and its codec; weights are larger than at the start, so that it is not nearly linear."""
    model = Model(spec, choose_mixer(mixer, **options), ModelConfig(width=16, depth=2)).eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(3)
    form = {"form": "real" if spec.inputs == "real" else "tokens", "classes": ["a", "b", "c"][: spec.outputs]}
    return model, Codec.make(spec, description or form)


def odds(model, inputs, target):
    with torch.no_grad():
        scores = model(inputs)[0].double()
    others = torch.cat([scores[:target], scores[target + 1 :]])
    return (scores[target] - others.logsumexp(0)).item()


@pytest.mark.zoo
@pytest.mark.parametrize("mixer", list_mixers())
def test_attributions_add_up_to_the_answer(mixer, small_options):
    """The completeness of integrated gradients, with the model's own outputs as witness."""
    options = {k: v for k, v in small_options(mixer).items() if k in find_mixer(mixer).options}
    torch.manual_seed(0)
    model, codec = make(REAL, mixer, **options)
    sequence = np.random.default_rng(0).normal(size=(21, 2))
    found = explain(model, codec, sequence, method="gradients")
    target = ["a", "b", "c"].index(found.target)
    inputs = torch.tensor(sequence, dtype=torch.float32)[None]
    assert found.answer == pytest.approx(odds(model, inputs, target), abs=1e-3)
    assert found.baseline == pytest.approx(odds(model, torch.zeros_like(inputs), target), abs=1e-3)
    assert found.attributions.shape == (21, 2)
    difference = found.answer - found.baseline
    if "reformer" not in mixer:  # its buckets jump along the path
        assert found.attributions.sum() == pytest.approx(difference, abs=0.05 * max(1, abs(difference)))
    assert np.isfinite(found.attributions).all()


def test_tokens_begin_at_the_mean_of_all_symbols():
    model, codec = make(TOKENS)
    tokens = [1, 5, 2, 2, 6, 3, 0, 4, 1]
    found = explain(model, codec, tokens, target="b", method="gradients")
    assert found.attributions.shape == (9,)
    assert found.target == "b"
    assert found.symbols == [str(token) for token in tokens]
    assert found.answer == pytest.approx(odds(model, torch.tensor([tokens]), 1), abs=1e-4)
    assert found.attributions.sum() == pytest.approx(found.answer - found.baseline, abs=0.02)
    assert found.probability == pytest.approx(1 / (1 + np.exp(-found.answer)), abs=1e-5)
    other = explain(model, codec, tokens, target="a", method="gradients")
    np.testing.assert_allclose(other.attributions, -found.attributions, atol=1e-5)


@pytest.mark.parametrize("spec", [REAL, TOKENS], ids=["real", "tokens"])
def test_occlusion_is_the_change_when_a_window_is_left_out(spec):
    """By hand: the mean of the changes by all windows of three that a value is in."""
    model, codec = make(spec)
    generator = np.random.default_rng(0)
    sequence = generator.normal(size=(9, 2)) if spec.inputs == "real" else generator.integers(7, size=9)
    found = explain(model, codec, sequence, target="a", method="occlusion")
    values = model.embedding.values
    inputs = torch.tensor(sequence, dtype=torch.float32 if spec.inputs == "real" else torch.int64)[None]

    def change(start, channel):
        """When positions start to start + 2 say nothing."""
        without, hook = inputs.clone(), None
        if spec.inputs == "real":
            without[0, start : start + 3, channel] = 0
        else:
            mean = values.weight.detach().mean(dim=0).expand(1, 3, -1)
            places = torch.arange(start, start + 3)
            hook = values.register_forward_hook(lambda _, __, output: output.index_copy(1, places, mean))
        after = odds(model, without, 0)
        if hook is not None:
            hook.remove()
        return odds(model, inputs, 0) - after

    for position, channel in ((0, 0), (1, 1), (4, 1), (8, 0)):
        starts = [start for start in range(7) if start <= position <= start + 2]
        wanted = np.mean([change(start, channel) for start in starts])
        value = found.attributions[position, channel] if spec.inputs == "real" else found.attributions[position]
        assert value == pytest.approx(wanted, abs=1e-4)


def test_the_value_that_decides_is_found():
    """A model that looks at one place only, whatever else is there."""

    class OnlyFive(torch.nn.Module):
        def forward(self, x, mask=None):
            kept = torch.zeros_like(x)
            kept[:, 5:8] = x[:, 5:8]
            return kept

    model, codec = make(REAL)
    model.blocks = torch.nn.ModuleList([OnlyFive()])
    model.norm = None
    model.embedding.positions = "none"
    for method in ("gradients", "occlusion"):
        found = explain(model, codec, np.random.default_rng(0).normal(size=(20, 2)), method=method)
        near = [5, 6, 7] if method == "gradients" else [3, 4, 5, 6, 7, 8, 9]  # which windows of three reach
        assert np.abs(np.delete(found.attributions, near, axis=0)).max() < 1e-5
        first, last = found.decisive()
        assert near[0] + 1 <= first <= last <= near[-1] + 1
        if method == "gradients":
            assert found.decisive(0.99) == (6, 8)


def test_numbers_are_explained_in_their_own_units():
    spec = Spec("real", 1, 24, "regress", 1, "r2")
    description = {"form": "real", "mean": [5.0], "deviation": [2.0], "label_mean": 100.0, "label_deviation": 10.0}
    model, codec = make(spec, description=description)
    sequence = np.random.default_rng(0).normal(5, 2, size=15)
    found = explain(model, codec, sequence, method="gradients")
    with torch.no_grad():
        wanted = model(torch.tensor((sequence - 5) / 2, dtype=torch.float32)[None, :, None]).item() * 10 + 100
    assert found.answer == pytest.approx(wanted, rel=1e-5)
    assert found.attributions.sum() == pytest.approx(found.answer - found.baseline, abs=0.2)
    np.testing.assert_allclose(found.values[:, 0], sequence, rtol=1e-5)
    assert found.target is found.probability is None


def test_a_language_model_explains_the_next_token():
    spec = Spec("tokens", 7, 24, "language", 7, "bits_per_byte")
    model, codec = make(spec, description={"form": "tokens", "symbols": list("abcdefg")})
    found = explain(model, codec, [1, 2, 3, 4], method="gradients")
    with torch.no_grad():
        assert found.target == "abcdefg"[model(torch.tensor([[1, 2, 3, 4]]))[0, -1].argmax()]
    assert found.symbols == list("bcde")


def test_what_cannot_be_explained_is_refused(monkeypatch):
    model, codec = make(REAL)
    row = np.zeros((4, 2))
    with pytest.raises(BadInput, match="target must be a class of the run, got 'd'"):
        explain(model, codec, row, target="d", method="gradients")
    with pytest.raises(BadInput, match="method must be gradients or occlusion, got 'other'"):
        explain(model, codec, row, method="other")
    with pytest.raises(BadInput, match="the sequence must be a sequence of finite numbers in 2 channels"):
        explain(model, codec, row[:, :1], method="gradients")
    pairs, codec = make(Spec("tokens", 7, 24, "match", 2, "accuracy"))
    with pytest.raises(BadInput, match="explain is for tasks with one answer for one sequence"):
        explain(pairs, codec, [1, 2], method="gradients")
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setattr("longlens.training.explain.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"captum is not installed: pip install 'longlens\[explain\]'"):
        explain(model, codec, row, method="gradients")


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        ([0, 0, 1, 0], (3, 3)),
        ([1, 1, 1, 1], (1, 2)),
        ([0, -3, 0, 3], (2, 2)),
        ([1, 0, 0, 5, -4, 0], (4, 4)),
        ([0, 0, 0], (1, 3)),
    ],
)
def test_the_shortest_part_with_half_of_the_weight(weights, part):
    found = Explanation(np.array(weights, float), None, 0, 0, None, None, None, None, "gradients")
    assert found.decisive() == part
