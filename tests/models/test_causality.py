"""A language model knows nothing of the tokens that it predicts: by perturbation and by gradient, exactly."""

import pytest
import torch

from longlens.mixers.registry import choose_mixer, find_mixer, list_mixers
from longlens.models.model import create_model, is_causal
from longlens.tasks.base import Spec

SPEC = Spec("tokens", 11, 25, "language", 11, "bits_per_byte")


def one_sided(name):
    """A mixer that looks to the past only, if it can."""
    options = {"bidirectional": False} if "bidirectional" in find_mixer(name).options else {}
    return choose_mixer(name, **options)


CAUSAL = [name for name in list_mixers() if is_causal(one_sided(name), 16)]
SOME = ("las", "las-chunk", "s4d", "performer")  # of each kind


def rounding(name) -> float:
    """An FFT spreads rounding errors over the whole sequence; nothing else may leak at all."""
    return 1e-10 if find_mixer(name).traits.cost == "L log L" else 0.0


@pytest.fixture
def build(small_options):
    def make(name, **options):
        options |= {"bidirectional": False} if "bidirectional" in find_mixer(name).options else {}
        return create_model(SPEC, name, depth=2, width=16, dtype=torch.float64, **small_options(name, **options))

    return make


def test_all_but_a_few_can_be_causal():
    both = {"las-bidirectional", "linformer", "reformer-arena", "s4-bidirectional", "s4-v2"}
    assert set(list_mixers()) - set(CAUSAL) == both


@pytest.mark.slow
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("name", SOME)
def test_logits_do_not_know_what_comes(build, name, positions, prenorm):
    if positions == "rotary" and "rotary" not in find_mixer(name).options:
        pytest.skip(f"{name} takes no rotary positions")
    model = build(name, positions=positions, prenorm=prenorm)
    tokens = torch.randint(11, (2, 25))
    before = model(tokens)
    for t in range(1, 25):
        changed = tokens.clone()
        changed[:, t:] = (changed[:, t:] + torch.randint(1, 11, (2, 25 - t))) % 11  # every one of them
        after = model(changed)
        assert (after[:, :t] - before[:, :t]).abs().max() <= rounding(name)
        assert (after[:, t] != before[:, t]).any(), "though it is not blind"


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_the_gradient_of_a_logit_ends_at_its_token(build, name, prenorm):
    model = build(name, prenorm=prenorm)
    embedded = []
    model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = model(torch.randint(11, (2, 25)))
    for t in range(25):
        (gradient,) = torch.autograd.grad(logits[:, t, 3].sum(), embedded[0], retain_graph=True)
        assert (gradient[:, t + 1 :].abs() <= rounding(name)).all()
        assert gradient[:, t].count_nonzero() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_a_prefix_has_the_logits_of_the_whole(build, name):
    model, tokens = build(name), torch.randint(11, (2, 25))
    whole = model(tokens)
    for length in (1, 6, 7, 8, 24):
        torch.testing.assert_close(model(tokens[:, :length]), whole[:, :length], rtol=0, atol=1e-10)
