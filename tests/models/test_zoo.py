"""Every mixer learns every kind of task that it can take, and has about as many parameters as attention."""

import pytest
import torch

from longlens.mixers.base import list_mixers, mixer_class, mixer_config
from longlens.models.heads import loss_sum
from longlens.models.model import count_parameters, create_model
from longlens.options import option_names
from longlens.tasks.base import Spec
from longlens.training.config import TrainingConfig
from longlens.training.optimizer import make_optimizer

LENGTH = 24
SPECS = {
    "classify": Spec("tokens", 7, LENGTH, "classify", 2, "accuracy"),
    "match": Spec("tokens", 7, LENGTH, "match", 2, "accuracy"),
    "regress": Spec("real", 2, LENGTH, "regress", 1, "r2", positions=LENGTH),
    "language": Spec("tokens", 7, LENGTH, "language", 7, "bits_per_byte"),
}


def samples(kind, count=16):
    """Inputs and targets of a task that needs the past, the same for every mixer."""
    generator = torch.Generator().manual_seed(1)
    if kind == "regress":
        x = torch.randn(count, LENGTH, 2, generator=generator)
        return x, x[..., 0].cumsum(1) / 5
    tokens = torch.randint(7, (count, 2, LENGTH), generator=generator)
    if kind == "language":  # every token comes twice
        tokens = tokens[:, 0].repeat_interleave(2, dim=1)
        return tokens[:, :LENGTH], tokens[:, 1 : LENGTH + 1]
    if kind == "classify":  # more 0 or more 1?
        return tokens[:, 0], ((tokens[:, 0] == 0).sum(1) > (tokens[:, 0] == 1).sum(1)).long()
    return tokens, ((tokens[:, 0] == 0).sum(1) > (tokens[:, 1] == 0).sum(1)).long()


def options_for(name, kind):
    known = option_names(mixer_class(name))
    options = {"heads": 2} if "heads" in known else {}
    if kind == "language" and "bidirectional" in known:
        options["bidirectional"] = False
    return options


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", list_mixers())
def test_the_loss_falls(name, kind):
    options = options_for(name, kind)
    if kind == "language" and mixer_config(name, **options).looks_ahead() is not None:
        with pytest.raises(ValueError, match="needs a causal mixer"):
            create_model(SPECS[kind], name, depth=1, width=16, **options)
        return
    torch.manual_seed(0)
    model = create_model(SPECS[kind], name, depth=1, width=16, **options)
    optimizer = make_optimizer(model, TrainingConfig(steps=1, lr=1e-2, special_lr=1e-2))
    inputs, targets = samples(kind)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = loss_sum(SPECS[kind], model(inputs), targets) / targets.numel()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("name", list_mixers())
def test_parameters_are_about_those_of_a_transformer(name, width):
    """Within a fifth, or the layer says why not."""
    spec = Spec("tokens", 256, 1024, "classify", 10, "accuracy")
    with torch.device("meta"):
        ours, plain = (count_parameters(create_model(spec, mixer, width=width)) for mixer in (name, "transformer"))
    if mixer_class(name).size_note is None:
        assert 0.8 < ours / plain < 1.2, ours / plain
    else:
        assert len(mixer_class(name).size_note) > 20
