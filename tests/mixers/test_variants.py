"""The names for plain attention and for LaS are one formula with parts of it turned off."""

import pytest
import torch
import torch.nn.functional as F

from longlens import LaSAttention, decay_rates, las_attention
from longlens.mixers.registry import create_mixer, find_mixer

RATES = decay_rates(4, 0.3, dtype=torch.float64)
FORMULAS = {
    "l-attention": ({"max_rate": 0.3}, {"decay": RATES}),
    "s-attention": ({"window": 3, "side": "centered"}, {"smoothing": 3, "side": "centered"}),
    "las": ({"max_rate": 0.3, "window": 3}, {"decay": RATES, "smoothing": 3}),
    "las-chunk": ({"max_rate": 0.3, "chunk_size": 7}, {"decay": RATES, "smoothing": 5, "chunk_size": 7}),
    "las-bidirectional": ({"max_rate": 0.3}, {"decay": RATES, "smoothing": 5, "is_causal": False}),
    # Rows of Table 4: each variant in chunks.
    "l-attention in chunks": ({"max_rate": 0.3, "chunk_size": 7}, {"decay": RATES, "chunk_size": 7}),
    "s-attention in chunks": ({"chunk_size": 7}, {"smoothing": 5, "chunk_size": 7}),
    "las in chunks": ({"max_rate": 0.3, "chunk_size": 7}, {"decay": RATES, "smoothing": 5, "chunk_size": 7}),
}


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


def test_plain_attention_in_chunks():
    """The row of Table 4 that has no name: LaS without decay and smoothing."""
    layer = LaSAttention(16, 4, max_rate=0.0, window=None, chunk_size=7, dtype=torch.float64)
    check_against(layer, lambda q, k, v: las_attention(q, k, v, backend="reference", chunk_size=7))


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


def known_options(name, **options):
    """Those of the options that a mixer has."""
    return {option: value for option, value in options.items() if option in find_mixer(name).options}


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
    chunks = {"chunk_size": 7} if same == "las-chunk" else {}
    other = create_mixer(same, 16, dtype=torch.float64, **known_options(same, heads=4, max_rate=0.3, **chunks))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    difference = (layer(x) - other(x)).abs().max()
    if (name, options.get("chunk_size")) == ("las-chunk", 7) or "schedule" in options:
        assert difference > 1e-4, "these options do change it"
    else:
        assert difference < 1e-12


def test_options_reach_the_layer():
    layer = create_mixer("las-chunk", 16, heads=2, bias=False, dropout=0.25, rotary=True, chunk_size=9)
    assert (layer.num_heads, layer.dropout, layer.rotary, layer.chunk_size) == (2, 0.25, True, 9)
    assert layer.in_proj.bias is None
    assert layer.out_proj.bias is None


@pytest.mark.parametrize("name", ["las", "las-chunk", "l-attention", "s-attention"])
def test_defaults_are_those_of_the_layer(name):
    layer, options = LaSAttention(16, 4), find_mixer(name).options
    assert len(options) >= 7
    for option in options.values():
        if option.name not in ("heads", "chunk_size"):
            default = layer.in_proj.bias is not None if option.name == "bias" else getattr(layer, option.name)
            assert option.default == default, option.name
