"""Every mixer learns every kind of task that it can take. ``tests/mixers/test_zoo.py`` counts its parameters."""

import pytest
import torch
from torch import nn

from longlens.mixers.registry import choose_mixer, find_mixer, list_mixers
from longlens.models.model import create_model, is_causal, loss_sum
from longlens.tasks.base import Spec
from longlens.training.config import TrainingConfig
from longlens.training.step import make_optimizer

pytestmark = pytest.mark.zoo

LENGTH = 12
SPECS = {
    "classify": Spec("tokens", 7, LENGTH, "classify", 2, "accuracy"),
    "match": Spec("tokens", 7, LENGTH, "match", 2, "accuracy"),
    "regress": Spec("real", 2, LENGTH, "regress", 1, "r2", positions=1),
    "language": Spec("tokens", 7, LENGTH, "language", 7, "bits_per_byte"),
}


def samples(kind, count=16):
    """Inputs and targets that only the past can tell: the last token, of which the heads see the vector, is always the
    same; and a language wants the token before the last one."""
    generator = torch.Generator().manual_seed(1)
    if kind == "regress":
        x = torch.randn(count, LENGTH, 2, generator=generator)
        x[:, -1] = 0
        return x, x[:, -4:, 0].sum(1, keepdim=True)
    tokens = torch.randint(7, (count, 2, LENGTH), generator=generator)
    if kind == "language":
        tokens = tokens[:, 0]
        return tokens[:, 1:], tokens[:, :-1]
    tokens[..., -1] = 0
    labels = tokens[:, 0, -2] % 2
    return tokens[:, 0] if kind == "classify" else tokens, labels


class Ignore(nn.Module):
    """A mixer that does not mix."""

    def forward(self, x, mask=None):
        return torch.zeros_like(x)


def options_for(name, kind):
    known = find_mixer(name).options
    options = {"heads": 2} if "heads" in known else {}
    if name == "reformer-arena":
        options["buckets"] = 2  # of ten chunks, a token of so few would see three others
    if kind == "language" and "bidirectional" in known:
        options["bidirectional"] = False
    return options


def learn(mixer, kind, *, mixes=True, steps=30):
    """The loss after some steps."""
    torch.manual_seed(0)
    model = create_model(SPECS[kind], mixer, depth=1, width=16, pooling="last")
    if not mixes:
        model.blocks[0].mixer = Ignore()
    optimizer = make_optimizer(model, TrainingConfig(steps=1, lr=1e-2, kernel_lr=1e-2))
    inputs, targets = samples(kind)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_sum(SPECS[kind], model(inputs), targets) / targets.numel()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def without():
    """What is left of the loss of a model that does not mix."""
    return {kind: learn("las", kind, mixes=False) for kind in SPECS}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", list_mixers())
def test_it_learns_what_only_the_past_can_tell(name, kind, without):
    mixer = choose_mixer(name, **options_for(name, kind))
    if kind == "language" and not is_causal(mixer, 16):
        with pytest.raises(ValueError, match="needs a causal mixer"):
            learn(mixer, kind)
    else:
        steps = 90 if name == "long-conv" else 30  # which starts from next to nothing, as published
        assert learn(mixer, kind, steps=steps) < 0.9 * without[kind]
