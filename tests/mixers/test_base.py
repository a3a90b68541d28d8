"""Mixers by name: each is what it says, and says whether it looks ahead."""

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longlens.mixers.las
from longlens import LaSAttention, decay_rates, las_attention
from longlens.mixers import base
from longlens.mixers.base import Config, create_mixer, list_mixers, mixer_class, mixer_config, mixer_options, register
from longlens.models.model import create_model
from longlens.options import option_names
from longlens.registry import Registry
from longlens.tasks.base import Spec

SPEC = Spec("tokens", 11, 40, "classify", 3, "accuracy")


def small(name, **options):
    """Options that make a small layer on which each part of the formula shows, of those that a mixer has."""
    chunks = {"chunk_size": 7} if name.endswith("-chunk") else {}
    options = {"heads": 4, "max_rate": 0.3} | chunks | options
    return {option: value for option, value in options.items() if option in option_names(mixer_class(name))}


def variants():
    """Every mixer that smooths, with every side and some windows."""
    for name in list_mixers():
        if {"side", "window"} <= set(option_names(mixer_class(name))):
            yield from ((name, side, window) for side in ("past", "centered") for window in (1, 3, 5))


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(base._REGISTRY, "classes", dict(base._REGISTRY.classes))


@dataclass(frozen=True, kw_only=True)
class Shift(Config):
    """A mixer of a user: a token gets a share of the one before it.

    Args:
        share: how much.
    """

    share: float = 0.5

    summary: ClassVar[str] = "the token before"

    def build(self, d_model, *, max_length=None, device=None, dtype=None):
        return ShiftLayer(d_model, self.share, max_length, device, dtype)


class ShiftLayer(nn.Module):
    special_parameters = ("share",)

    def __init__(self, d_model, share, max_length, device, dtype):
        super().__init__()
        self.share = nn.Parameter(torch.full((d_model,), share, device=device, dtype=dtype))
        self.max_length = max_length

    def forward(self, x, mask=None):
        return F.pad(x, (0, 0, 1, 0))[:, :-1] * self.share


@pytest.mark.parametrize("name", list_mixers())
@pytest.mark.parametrize("length", [1, 23])
def test_every_mixer_keeps_the_shape(name, length):
    layer = create_mixer(name, 16, max_length=40, dtype=torch.float64, **small(name))
    x = torch.randn(3, length, 16, dtype=torch.float64, requires_grad=True)
    for mask in (None, torch.arange(length) < torch.tensor([[length], [1], [0]])):
        output = layer(x, mask=mask)
        assert output.shape == x.shape
        assert output.dtype == torch.float64
        gradients = torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_builds_with_its_defaults_on_any_device(name):
    config = mixer_config(name)
    assert config.name == name
    assert config.summary
    assert all(parameter.is_meta for parameter in config.build(64, max_length=512, device="meta").parameters())


@pytest.mark.parametrize("name", list_mixers())
def test_the_options_of_a_config_make_it_again(name):
    config = mixer_config(name, **small(name))
    assert mixer_config(name, **mixer_options(config)) == config
    assert list(mixer_options(config)) == option_names(type(config))


def check_against(layer, attend):
    """Outputs and gradients of a layer are those of its projections around ``attend(query, key, value)``."""
    x = torch.randn(2, 23, 16, dtype=torch.float64, requires_grad=True)
    projected = F.linear(x, layer.in_proj.weight, layer.in_proj.bias)
    heads = [part.reshape(2, 23, 4, 4).transpose(1, 2) for part in projected.chunk(3, dim=-1)]
    attended = attend(*heads).transpose(1, 2).reshape(2, 23, 16)
    expected, actual = F.linear(attended, layer.out_proj.weight, layer.out_proj.bias), layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_transformer_is_the_attention_of_torch():
    layer = create_mixer("transformer", 16, heads=4, dtype=torch.float64)
    check_against(layer, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))


RATES = decay_rates(4, 0.3, dtype=torch.float64)
FORMULAS = {
    "l-attention": ({"max_rate": 0.3}, {"decay": RATES}),
    "s-attention": ({"window": 3, "side": "centered"}, {"smoothing": 3, "side": "centered"}),
    "las": ({"max_rate": 0.3, "window": 3}, {"decay": RATES, "smoothing": 3}),
    "las-chunk": ({"max_rate": 0.3, "chunk_size": 7}, {"decay": RATES, "smoothing": 5, "chunk_size": 7}),
    "las-bidirectional": ({"max_rate": 0.3}, {"decay": RATES, "smoothing": 5, "is_causal": False}),
    # Rows of Table 4: each variant in chunks.
    "transformer": ({"chunk_size": 7}, {"chunk_size": 7}),
    "l-attention in chunks": ({"max_rate": 0.3, "chunk_size": 7}, {"decay": RATES, "chunk_size": 7}),
    "s-attention in chunks": ({"chunk_size": 7}, {"smoothing": 5, "chunk_size": 7}),
    "las in chunks": ({"max_rate": 0.3, "chunk_size": 7}, {"decay": RATES, "smoothing": 5, "chunk_size": 7}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_variants_of_las_are_the_formula_with_their_options(name):
    options, formula = FORMULAS[name]
    layer = create_mixer(name.removesuffix(" in chunks"), 16, heads=4, dtype=torch.float64, **options)
    # The rates of a layer are float32 numbers.
    formula = {
        key: torch.tensor(layer.rates, dtype=torch.float64) if key == "decay" else formula[key] for key in formula
    }
    check_against(layer, lambda q, k, v: las_attention(q, k, v, backend="reference", **formula))
    if "decay" in formula:
        torch.testing.assert_close(formula["decay"], RATES, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "options", "same"),
    [
        ("las", {"max_rate": 0.0, "window": 1}, "transformer"),
        ("las", {"max_rate": 0.0, "window": 1, "side": "centered"}, "transformer"),
        ("las", {"max_rate": 0.3, "window": 1}, "l-attention"),
        ("las", {"max_rate": 0.0}, "s-attention"),
        ("las-chunk", {"max_rate": 0.3, "chunk_size": 23}, "las"),
        ("las-chunk", {"max_rate": 0.3, "chunk_size": 7}, "las"),
        ("las", {"max_rate": 0.3, "chunk_size": 7}, "las-chunk"),
        ("l-attention", {"max_rate": 0.3, "schedule": "literal"}, "l-attention"),
    ],
)
def test_turning_a_part_off_gives_the_variant_without_it(name, options, same):
    layer = create_mixer(name, 16, heads=4, dtype=torch.float64, **options)
    other = create_mixer(same, 16, dtype=torch.float64, **small(same))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    difference = (layer(x) - other(x)).abs().max()
    if (name, options.get("chunk_size")) == ("las-chunk", 7) or "schedule" in options:
        assert difference > 1e-4, "these options do change it"
    else:
        assert difference < 1e-12


def test_options_reach_the_layer():
    layer = create_mixer("las-chunk", 16, heads=2, bias=False, attention_dropout=0.25, rotary=True, chunk_size=9)
    assert (layer.num_heads, layer.dropout, layer.rotary, layer.chunk_size) == (2, 0.25, True, 9)
    assert layer.in_proj.bias is None
    assert layer.out_proj.bias is None


@pytest.mark.parametrize("name", ["las", "las-chunk", "l-attention", "s-attention"])
def test_defaults_are_those_of_the_layer(name):
    layer, config = LaSAttention(16, 4), mixer_config(name, heads=4)
    for option in fields(config):
        if hasattr(layer, option.name) and option.name != "chunk_size":
            assert getattr(config, option.name) == getattr(layer, option.name), option.name


@pytest.mark.parametrize(("name", "side", "window"), list(variants()))
def test_looks_ahead_is_none_exactly_for_causal_layers(name, side, window):
    config = mixer_config(name, **small(name), side=side, window=window)
    layer = config.build(16, max_length=40, dtype=torch.float64)
    x = torch.randn(1, 24, 16, dtype=torch.float64)
    before, leaks = layer(x), False
    for t in range(23):
        changed = x.clone()
        changed[:, t + 1 :] = torch.randn_like(changed[:, t + 1 :]) * 10
        leaks |= not torch.equal(layer(changed)[:, : t + 1], before[:, : t + 1])
    assert leaks == (config.looks_ahead() is not None), config.looks_ahead()


def test_looks_ahead_says_how_far_and_what_to_do():
    assert mixer_config("las", side="centered", window=7).looks_ahead() == (
        "smoothing with side='centered' and window=7 looks 3 ahead: choose side='past'"
    )
    assert mixer_config("las-bidirectional").looks_ahead() == "it attends to both sides"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lass", {}, "there is no mixer 'lass'; did you mean 'las'"),
        ("qqq", {}, "there is no mixer 'qqq'; it can be transformer, l-attention, s-attention, las"),
        ("las", {"windwo": 3}, "mixer 'las' has no option 'windwo'; did you mean 'window'"),
        ("transformer", {"window": 3}, "mixer 'transformer' has no option 'window'; it can be heads, bias"),
        (
            "las-chunk",
            {"chunk_size": None},
            "chunk_size is None, which is not possible: input should be a valid integer",
        ),
        ("las", {"heads": 4, "chunk_size": 0}, "chunk_size must be at least 1 or None, got 0"),
        ("las", {"heads": "many"}, "heads is 'many', which is not possible: input should be a valid integer"),
        ("las", {"heads": 2.5}, "heads is 2.5, which is not possible: input should be a valid integer"),
        ("las", {"heads": True}, "heads is True, which is not possible: input should be a valid integer"),
        ("las", {"max_rate": True}, "max_rate is True, which is not possible: input should be a valid number"),
        ("las", {"window": None}, "window is None, which is not possible: input should be a valid integer"),
        ("las", {"side": "left"}, "side is 'left'; it can be past, centered"),
        ("las", {"schedule": "linear"}, "schedule is 'linear'; it can be exp-uniform, literal"),
        ("las", {"heads": 3}, "divide the width of the layer, got heads=3 and a width of 16"),
        ("las", {"heads": 4, "window": 4}, "window must be an odd number of at least 1, or None, got 4"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        create_mixer(name, 16, **options)
    assert "\n" not in str(caught.value)


def test_options_of_files_get_the_types_of_their_fields():
    config = mixer_config("las", heads=8.0, max_rate=1, bias=False)
    assert (config.heads, config.max_rate, config.bias) == (8, 1.0, False)
    assert [type(value) for value in (config.heads, config.max_rate, config.bias)] == [int, float, bool]


def test_an_option_without_a_default_is_refused(registry):
    @dataclass(frozen=True, kw_only=True)
    class Needy(Shift):
        order: int

    with pytest.raises(ValueError, match="mixer 'needy' has no default for its option 'order': give it one"):
        register("needy")(Needy)
    assert "needy" not in list_mixers()


def test_a_mixer_of_a_user_works_by_its_name(registry):
    assert register("shift")(Shift) is Shift
    assert list_mixers()[-1] == "shift"
    model = create_model(SPEC, "shift", depth=2, width=16, share=0.25, dtype=torch.float64)
    assert model.mixer_config == Shift(share=0.25)
    assert [block.mixer.max_length for block in model.blocks] == [40, 40], "a layer learns how long sequences can be"
    assert model(torch.randint(11, (2, 23))).shape == (2, 3)
    special = {
        f"{path}.{name}" for path, module in model.named_modules() for name in getattr(module, "special_parameters", ())
    }
    assert special == {"blocks.0.mixer.share", "blocks.1.mixer.share"}
    assert special <= set(dict(model.named_parameters()))
    for name in special:
        torch.testing.assert_close(model.get_parameter(name), torch.full((16,), 0.25, dtype=torch.float64))
    with pytest.raises(
        ValueError, match="neither the model nor mixer 'shift' has an option 'shar'; did you mean 'share'"
    ):
        create_model(SPEC, "shift", shar=0.25)


def test_a_taken_name_is_refused(registry):
    message = "there is a mixer 'las' already: choose another name"
    with pytest.raises(ValueError, match=message):
        register("las")(Shift)
    assert mixer_class("las") is longlens.mixers.las.LaS
    register("shift")(Shift)
    with pytest.raises(ValueError, match="there is a mixer 'shift' already: choose another name"):
        register("shift")(type("Other", (Shift,), {}))
    assert register("shift")(Shift) is Shift, "the same class again is no clash: a notebook runs a cell twice"


def test_names_of_the_package_are_taken_before_their_module_is_imported():
    registry = Registry("thing", {"json": "json.decoder"})
    assert registry.names() == ["json"]
    with pytest.raises(ValueError, match="there is a thing 'json' already"):
        registry.register("json")(Shift)


def test_registered_names_do_not_leak_into_parents():
    """``las-chunk`` is a subclass of ``las``; each keeps its name."""
    for name in list_mixers():
        assert mixer_class(name).name == name
