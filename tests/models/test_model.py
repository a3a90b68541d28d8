"""Models by name: their parts, their sizes, and what cannot go together."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longlens.mixers.las  # noqa: F401  the mixers are registered before a test keeps its own from staying
from longlens.mixers import base
from longlens.mixers.base import Config, list_mixers, mixer_class, mixer_config, register
from longlens.models.config import ModelConfig
from longlens.models.model import Model, create_model
from longlens.models.model import count_parameters as count
from longlens.options import option_names
from longlens.tasks.base import Spec, create_task

SPECS = {
    "classify": Spec("tokens", 11, 20, "classify", 3, "accuracy"),
    "pixels": Spec("real", 2, 20, "classify", 3, "accuracy"),
    "match": Spec("tokens", 11, 20, "match", 2, "accuracy"),
    "regress": Spec("real", 3, 20, "regress", 1, "r2"),
    "positions": Spec("real", 3, 20, "regress", 1, "r2", positions=5),
    "language": Spec("tokens", 11, 20, "language", 11, "perplexity"),
}
SHAPES = {
    "classify": (2, 3),
    "pixels": (2, 3),
    "match": (2, 2),
    "regress": (2,),
    "positions": (2, 5),
    "language": (2, 13, 11),
}
SMALL = {"depth": 2, "width": 16, "heads": 4}


def inputs(spec, batch=2, length=13, dtype=torch.float64):
    if spec.inputs == "real":
        return torch.randn(batch, length, spec.size, dtype=dtype)
    return torch.randint(spec.size, (batch, 2, length) if spec.head == "match" else (batch, length))


@pytest.mark.parametrize("name", SPECS)
def test_the_output_is_what_the_task_asks_for(name):
    spec = SPECS[name]
    model = create_model(spec, "las", dtype=torch.float64, **SMALL)
    output = model(inputs(spec))
    assert output.shape == SHAPES[name]
    assert output.dtype == torch.float64
    assert all(tensor.dtype == torch.float64 for tensor in model.state_dict().values())
    assert model(inputs(spec, batch=0)).shape == (0, *SHAPES[name][1:]), "no samples, no outputs"


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("prenorm", [True, False])
def test_a_model_is_its_parts_one_after_another(prenorm, norm):
    """Without prenorm there is no norm before the head, as the last block ends in one."""
    model = create_model(SPECS["classify"], "las", prenorm=prenorm, norm=norm, dtype=torch.float64, **SMALL).eval()
    tokens, mask = inputs(SPECS["classify"]), torch.arange(13) < torch.tensor([[13], [6]])
    x = model.embedding(tokens)
    for block in (model.blocks[0], model.blocks[1]):
        x = block(x, mask)
    if prenorm and norm == "layer":
        x = F.layer_norm(x, (16,))
    elif prenorm:
        x = x / (1 + 1e-5) ** 0.5  # running statistics of a new model: mean 0, variance 1
    assert (model.norm is None) == (not prenorm)
    expected = torch.stack([x[0].mean(dim=0), x[1, :6].mean(dim=0)]) @ model.head.linear.weight.T
    torch.testing.assert_close(model(tokens, mask), expected + model.head.linear.bias, rtol=0, atol=1e-12)


def test_pairs_are_embedded_apart_from_each_other():
    """The two of a pair meet in the head only, and swapping them swaps their vectors."""
    spec = SPECS["match"]
    model = create_model(spec, "las", dtype=torch.float64, **SMALL).eval()
    pairs = inputs(spec)
    mask = torch.arange(13) < torch.tensor([[13, 5], [7, 13]]).unsqueeze(-1)
    alone = create_model(SPECS["classify"], "las", dtype=torch.float64, **SMALL).eval()
    alone.load_state_dict(
        {name: value for name, value in model.state_dict().items() if "head" not in name}, strict=False
    )
    alone.head.linear = nn.Identity()
    rows = []
    for pair, lengths in zip(pairs, ((13, 5), (7, 13)), strict=True):
        one, two = (alone(sequence[None, :length])[0] for sequence, length in zip(pair, lengths, strict=True))
        rows.append(model.head.mlp(torch.cat([one, two, one - two, one * two])))
    torch.testing.assert_close(model(pairs, mask), torch.stack(rows), rtol=0, atol=1e-11)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none", "rotary"])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("ffn", ["gelu", "glu", "none"])
def test_parameters_of_a_transformer_by_hand(ffn, prenorm, positions):
    D, depth, V, C, L = 16, 3, 11, 3, 20
    inner = 4 * D
    attention = D * 3 * D + 3 * D + D * D + D
    feedforward = {
        "gelu": D * inner + inner + inner * D + D,
        "glu": D * 2 * inner + 2 * inner + inner * D + D,
        "none": 0,
    }
    norms = (1 if ffn == "none" else 2) * 2 * D
    expected = V * D + depth * (attention + feedforward[ffn] + norms) + D * C + C
    expected += (2 * D if prenorm else 0) + (L * D if positions == "learned" else 0)
    options = {"width": D, "depth": depth, "heads": 4, "ffn": ffn, "prenorm": prenorm, "positions": positions}
    assert count(create_model(SPECS["classify"], "transformer", **options)) == expected


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_all_variants_have_the_parameters_of_a_transformer(norm):
    """Norms count alike, too: running statistics are no parameters."""
    counts = {count(create_model(SPECS["classify"], name, norm=norm, **SMALL)) for name in FAMILY}
    assert len(counts) == 1


FAMILY = ("transformer", "l-attention", "s-attention", "las", "las-chunk", "las-bidirectional")


def test_only_trained_parameters_count():
    model = create_model(SPECS["classify"], "las", **SMALL)
    before = count(model)
    model.embedding.requires_grad_(False)
    assert count(model) == before - 11 * 16


def test_a_tied_head_shares_the_weights_and_counts_once():
    spec = SPECS["language"]
    tied, untied = (create_model(spec, "las", tied=tied, dtype=torch.float64, **SMALL) for tied in (True, False))
    assert tied.head.linear.weight is tied.embedding.values.weight
    assert count(untied) - count(tied) == 11 * 16
    tokens = inputs(spec)
    loss = tied(tokens).square().sum()
    (gradient,) = torch.autograd.grad(loss, tied.head.linear.weight)
    # By hand: the same model with two tables of equal weights has the two halves of that gradient.
    untied.load_state_dict(tied.state_dict())
    untied.embedding.scale, untied.head.scale = 4.0, 0.25
    both = [untied.embedding.values.weight, untied.head.linear.weight]
    halves = torch.autograd.grad(untied(tokens).square().sum(), both)
    torch.testing.assert_close(gradient, sum(halves), rtol=0, atol=1e-10)


def test_tied_is_for_languages():
    model = create_model(SPECS["classify"], "las", tied=True, **SMALL)
    assert model.embedding.scale == 1
    assert model.head.linear.weight.shape == (3, 16)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_starts_with_nearly_equal_probabilities(tied):
    spec = Spec("tokens", 500, 64, "language", 500, "perplexity")
    torch.manual_seed(0)
    model, tokens = create_model(spec, "las", tied=tied, depth=2, width=64), torch.randint(500, (4, 65))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(500)) < 0.3


def test_dropout_is_for_training_only():
    options = {"dtype": torch.float64, **SMALL}
    model = create_model(SPECS["classify"], "las", dropout=0.3, attention_dropout=0.3, **options)
    plain, tokens = create_model(SPECS["classify"], "las", **options), inputs(SPECS["classify"])
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), plain(tokens))


@pytest.mark.parametrize("name", FAMILY)
def test_options_of_the_model_and_of_the_mixer_are_told_apart(name):
    given = {"depth": 3, "width": 32, "heads": 2, "rotary": True, "pooling": "last"}
    model = create_model(SPECS["classify"], name, **given)
    assert (model.config.depth, model.config.width, model.config.pooling) == (3, 32, "last")
    assert (len(model.blocks), model.mixer_config.heads, model.mixer_config.rotary) == (3, 2, True)
    assert model.blocks[2].mixer.num_heads == 2
    same = create_model(SPECS["classify"], mixer_config(name, heads=2, rotary=True), depth=3, width=32, pooling="last")
    assert same.config == model.config
    assert same.mixer_config == model.mixer_config


def test_no_option_of_the_package_belongs_to_both():
    for name in list_mixers():
        assert not set(option_names(mixer_class(name))) & set(ModelConfig.model_fields)


def test_a_task_or_its_name_is_as_good_as_its_spec():
    task = create_task("atomic-cumsum", length=30)
    model = create_model(task, "las", **SMALL)
    assert model.spec == task.spec
    assert model(torch.randn(2, 30, 3)).shape == (2, 30)
    assert create_model("atomic-cumsum", "las", **SMALL).spec == create_task("atomic-cumsum").spec


def test_blocks_share_nothing():
    model = create_model(SPECS["classify"], "las", **SMALL)
    assert len({id(parameter) for parameter in model.parameters()}) == len(model.state_dict())


def test_a_model_on_the_meta_device_has_shapes_and_no_memory():
    for positions in ("sinusoidal", "learned", "rotary"):
        with torch.device("meta"):
            model = create_model(SPECS["language"], "las", tied=True, positions=positions, **SMALL)
            assert model(torch.zeros(2, 13, dtype=torch.long)).shape == (2, 13, 11)
        assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("lass", {}, "there is no mixer 'lass'; did you mean 'las'"),
        ("las", {"dept": 3}, "neither the model nor mixer 'las' has an option 'dept'; did you mean 'depth'"),
        ("las", {"windows": 3}, "neither the model nor mixer 'las' has an option 'windows'; did you mean 'window'"),
        ("transformer", {"window": 3}, "neither the model nor mixer 'transformer' has an option 'window'"),
        ("las", {"depth": 0}, "depth is 0, which is not possible: input should be greater than or equal to 1"),
        ("las", {"depth": "deep"}, "depth is 'deep', which is not possible: input should be a valid integer"),
        ("las", {"norm": "bath"}, "norm is 'bath', which is not possible: input should be 'layer' or 'batch'"),
        ("las", {"dropout": 1.0}, "dropout is 1.0, which is not possible: input should be less than 1"),
        ("las", {"heads": "many"}, "heads is 'many', which is not possible: input should be a valid integer"),
        ("las", {"width": 30}, "divide the width of the layer, got heads=8 and a width of 30"),
        ("las", {"width": 24, "positions": "rotary"}, "rotary positions need heads of even width, got 24 / 8"),
        (mixer_config("las"), {"heads": 2}, "the mixer has its options already, so heads cannot be given beside it"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(mixer, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        create_model(SPECS["classify"], mixer, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        (
            "las-bidirectional",
            {},
            "a language task needs a causal mixer, and 'las-bidirectional' is not: it attends to",
        ),
        ("las", {"side": "centered"}, "and 'las' is not: smoothing with side='centered' and window=5 looks 2 ahead"),
        ("las-chunk", {"side": "centered", "window": 3}, "and 'las-chunk' is not: .* looks 1 ahead"),
        ("s-attention", {"side": "centered"}, "and 's-attention' is not: .*: choose side='past'"),
        (
            "las",
            {"norm": "batch"},
            "a language task cannot have norm='batch', which mixes positions: choose norm='layer'",
        ),
    ],
)
def test_a_language_model_cannot_look_ahead(mixer, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(SPECS["language"], mixer, **options)
    create_model(SPECS["classify"], mixer, **options)  # where it does no harm, it is fine


def test_smoothing_over_one_token_looks_nowhere():
    create_model(SPECS["language"], "las", side="centered", window=1)


def test_rotary_positions_need_a_mixer_that_takes_them(monkeypatch):
    monkeypatch.setattr(base._REGISTRY, "classes", dict(base._REGISTRY.classes))

    @register("dummy")
    @dataclass(frozen=True, kw_only=True)
    class Dummy(Config):
        summary: ClassVar[str] = "nothing"

        def build(self, d_model, *, max_length=None, device=None, dtype=None):
            return DummyLayer()

    class DummyLayer(nn.Module):
        def forward(self, x, mask=None):
            return x

    message = "mixer 'dummy' takes no rotary positions; positions can be none, sinusoidal, learned"
    with pytest.raises(ValueError, match=message):
        create_model(SPECS["classify"], "dummy", positions="rotary")
    create_model(SPECS["classify"], "dummy", positions="learned")


def test_rotary_positions_turn_queries_and_add_nothing():
    model = create_model(SPECS["classify"], "las", positions="rotary", dtype=torch.float64, **SMALL)
    assert all(block.mixer.rotary for block in model.blocks)
    tokens = inputs(SPECS["classify"])
    assert torch.equal(model.embedding(tokens), model.embedding.values(tokens))
    plain = create_model(SPECS["classify"], "las", positions="none", dtype=torch.float64, **SMALL)
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(tokens), model(tokens))
    assert isinstance(plain, Model)
