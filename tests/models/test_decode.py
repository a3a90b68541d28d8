"""Token by token, a language model says what it says of the whole window; tokens are as frequent as they are likely."""

import math
from collections import Counter

import pytest
import torch

from longlens.errors import BadInput, RunError
from longlens.mixers.registry import choose_mixer, find_mixer, list_mixers
from longlens.models.config import Writing
from longlens.models.decode import Decoder, choices, has_steps, window_start, write
from longlens.models.model import create_model, is_causal
from longlens.tasks.base import Spec

LENGTH = 13  # of training
SPEC = Spec("tokens", 11, LENGTH, "language", 11, "bits_per_byte")
WITHOUT_STEP = {"bigbird", "reformer", "hyena", "sgconv", "long-conv", "tnn"}


@pytest.fixture
def make(small_options):
    """A model in float64, with sharp opinions."""

    def made(name, *, model=None, **options):
        side = {"bidirectional": False} if "bidirectional" in find_mixer(name).options else {}
        mixer = choose_mixer(name, **small_options(name, **side) | options)
        if not is_causal(mixer, 16):
            pytest.skip("no language model has it")
        made = create_model(SPEC, mixer, depth=2, width=16, **model or {}).double().eval()
        with torch.no_grad():
            made.head.linear.weight.mul_(3)
        return made

    return made


def text(length=31, batch=2):
    return torch.randint(11, (batch, length))


def naive(model, tokens, context):
    """After each token, the scores of the model for the whole window."""
    found = []
    for end in range(1, tokens.shape[1] + 1):
        start = 0
        while end - start > context:
            start += context // 2
        found.append(model(tokens[:, start:end])[:, -1])
    return torch.stack(found, dim=1)


def stepwise(decoder, tokens, first=5):
    """The scores after the first tokens, which come at once, and after each of the others."""
    parts = [tokens[:, :first], *tokens[:, first:].split(1, dim=1)]
    return torch.stack([decoder(part) for part in parts], dim=1)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.zoo
@torch.no_grad()
@pytest.mark.parametrize("name", list_mixers())
def test_every_layer_says_the_same_with_its_states(make, name):
    """Over three windows: none of them begins at the first token but the first."""
    model, tokens = make(name), text()
    decoder = Decoder(model)
    assert decoder.cached is (name not in WITHOUT_STEP)
    same(stepwise(decoder, tokens), naive(model, tokens, LENGTH)[:, 4:])
    assert 0 < decoder.start < tokens.shape[1] - LENGTH // 2


@pytest.mark.zoo
@torch.no_grad()
@pytest.mark.parametrize("name", list_mixers())
def test_a_longer_context_goes_on_where_it_is_defined(make, name):
    model, tokens = make(name), text()
    if name == "mega":
        with pytest.raises(BadInput, match="context must be at most 13, the positions that were learned, got 31"):
            Decoder(model, context=31)
        return
    same(stepwise(Decoder(model, context=31), tokens), model(tokens)[:, 4:])


@pytest.mark.zoo
@pytest.mark.parametrize("name", list_mixers())
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_text_is_the_same_with_states_and_without(make, name, temperature):
    model, writing = make(name), Writing(tokens=25, temperature=temperature, seed=3)
    cached, uncached = ([*write(Decoder(model, cached=how), [1, 2, 3], writing)] for how in (True, False))
    assert cached == uncached
    assert len(set(cached)) > 1 or temperature == 0


@torch.no_grad()
@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("more", [{}, {"prenorm": False, "tied": True, "norm": "rms"}, {"ffn": "none"}])
@pytest.mark.parametrize("name", ["transformer", "las-chunk", "mega"])
def test_every_kind_of_model(make, name, positions, more):
    model, tokens = make(name, model={"positions": positions, **more}), text()
    same(stepwise(Decoder(model), tokens), naive(model, tokens, LENGTH)[:, 4:])


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options"), [("local", {"strided": True}), ("mega", {"truncation": 4}), ("dss", {"variant": "exp"})]
)
def test_a_layer_that_has_a_step_with_some_options_only(make, name, options):
    model, tokens = make(name, **options), text()
    decoder = Decoder(model)
    assert decoder.cached is (name == "dss")
    same(stepwise(decoder, tokens), naive(model, tokens, LENGTH)[:, 4:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["las", "s4d", "hyena"])
def test_parts_may_have_any_length(make, name):
    model, tokens = make(name), text()
    expected = naive(model, tokens, LENGTH)
    for lengths in ([31], [13, 1, 17], [6, 7, 7, 11], [3, 20, 8]):
        decoder, end = Decoder(model), 0
        for length, part in zip(lengths, tokens.split(lengths, dim=1), strict=True):
            end += length
            same(decoder(part), expected[:, end - 1])


@torch.no_grad()
def test_learned_positions_have_an_end(make):
    model = make("las", model={"positions": "learned"})
    with pytest.raises(BadInput, match="context must be at most 13, the positions that were learned, got 14"):
        Decoder(model, context=14)
    tokens = text(20)
    same(stepwise(Decoder(model, context=4), tokens), naive(model, tokens, 4)[:, 4:])


def test_windows_are_half_a_context_apart():
    assert [window_start(length, 4) for length in range(1, 11)] == [0, 0, 0, 0, 2, 2, 4, 4, 6, 6]
    assert [window_start(length, 1) for length in range(1, 5)] == [0, 1, 2, 3]
    assert [window_start(length, 5) for length in (5, 6, 7, 8)] == [0, 2, 2, 4]


def test_only_a_language_model_decodes():
    spec = Spec("tokens", 7, 12, "classify", 2, "accuracy")
    with pytest.raises(BadInput, match="needs a language model, and this one is made to classify"):
        Decoder(create_model(spec, "las", depth=1, width=16, heads=2))


def test_a_bug_in_a_step_is_not_taken_for_a_layer_without_one():
    class Broken(torch.nn.Module):
        def step(self, x, state=None):
            raise AttributeError

    assert not has_steps(torch.nn.Linear(2, 2), 2)
    with pytest.raises(AttributeError):
        has_steps(Broken(), 2)


def naive_choices(scores, temperature, top_k, top_p):
    """Probabilities by token: a loop over tokens, likeliest first."""
    if temperature == 0:
        return {max(range(len(scores)), key=scores.__getitem__): 1.0}
    powers = {token: math.exp((score - max(scores)) / temperature) for token, score in enumerate(scores)}
    order = sorted(powers, key=powers.__getitem__, reverse=True)[:top_k]
    total = sum(powers[token] for token in order)
    kept, reached = {}, 0.0
    for token in order:
        if reached < top_p:
            kept[token] = powers[token]
        reached += powers[token] / total
    total = sum(kept.values())
    return {token: power / total for token, power in kept.items()}


@pytest.mark.parametrize("temperature", [0, 0.3, 1, 5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 100])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1])
def test_the_tokens_to_choose_from(temperature, top_k, top_p):
    scores = 2 * torch.randn(30)
    tokens, likely = choices(scores, Writing(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = naive_choices(scores.tolist(), temperature, top_k, top_p)
    assert tokens.tolist() == list(expected)
    assert likely.tolist() == pytest.approx(list(expected.values()))


def test_equal_scores_are_in_the_order_of_tokens():
    tokens, likely = choices(torch.zeros(6), Writing(temperature=1, top_k=4, top_p=0.5))
    assert tokens.tolist() == [0, 1]
    assert likely.tolist() == [0.5, 0.5]


def test_scores_that_are_no_numbers_end_the_text():
    with pytest.raises(RunError, match="not finite: choose another checkpoint"):
        choices(torch.tensor([0.0, math.nan]), Writing())


class Constant:
    """A decoder whose scores are always the same."""

    def __init__(self, scores):
        self.model, self.scores = torch.nn.Linear(1, 1), scores

    def __call__(self, tokens):
        return self.scores.expand(len(tokens), -1)


@pytest.mark.parametrize("how", [{}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.5, "top_k": 6, "top_p": 0.9}])
def test_tokens_are_as_frequent_as_they_are_likely(how):
    """Pearson's χ², with fixed seeds: its mean is the number of tokens less one, its deviation √(2·mean)."""
    scores = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.2, 1.5, 0.0])
    writing = Writing(**{"tokens": 5_000, "temperature": 1, "top_k": None, "top_p": 1, "seed": 5} | how)
    counts = Counter(write(Constant(scores), [0], writing))
    expected = naive_choices(scores.tolist(), writing.temperature, writing.top_k, writing.top_p)
    assert set(counts) == set(expected)
    chi2 = sum((counts[token] - 5_000 * p) ** 2 / (5_000 * p) for token, p in expected.items())
    freedom = len(expected) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_a_seed_is_a_text(make):
    model = make("las")
    texts = [[*write(Decoder(model), [4], Writing(tokens=30, seed=seed))] for seed in (0, 0, 1, 2**63 - 1)]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3
