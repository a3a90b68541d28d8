"""ALiBi: the published slopes, the formula with its biases in full, precision, and steps."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.alibi import AlibiAttention
from longlens.mixers.registry import create_mixer
from longlens.ops.alibi import alibi_attention, alibi_attention_reference, alibi_slopes

VARIANTS = {
    "plain": {},
    "smooth": {"smoothing": 3},
    "centered": {"smoothing": 5, "side": "centered"},
    "chunks": {"chunk_size": 7},
    "smooth chunks": {"smoothing": 5, "chunk_size": 10},
}


def heads(length, count=4, width=6, dtype=torch.float64):
    return [torch.randn(2, count, length, width, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_slopes_are_the_published_ones():
    """Section 3 of the paper for 8 and 16 heads; its code for others."""
    assert alibi_slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert alibi_slopes(16) == pytest.approx([2 ** (-0.5 * n) for n in range(1, 17)], rel=1e-15)
    assert alibi_slopes(1) == (2.0**-8,)
    assert alibi_slopes(3) == (2.0**-4, 2.0**-8, 2.0**-2)
    assert alibi_slopes(12) == pytest.approx([*alibi_slopes(8), *(2.0**-n for n in (0.5, 1.5, 2.5, 3.5))], rel=1e-15)


def test_a_case_by_hand():
    """Two keys with equal scores, one step apart: their weights are as 1 to exp(-m)."""
    query, key = torch.zeros(2, 1, 1, 2, 4, dtype=torch.float64)
    value = torch.tensor([1.0, 0.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    expected = torch.tensor([1.0, 1 / (1 + torch.e**0.25)], dtype=torch.float64).reshape(1, 1, 2, 1)
    for attend in (alibi_attention, alibi_attention_reference):
        torch.testing.assert_close(attend(query, key, value, (0.25,)), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("count", [4, 3])
def test_it_is_the_formula(name, count):
    inputs, slopes = heads(101, count), alibi_slopes(count)
    outputs = [attend(*inputs, slopes, **VARIANTS[name]) for attend in (alibi_attention, alibi_attention_reference)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    grad = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(output, inputs, grad) for output in outputs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [8, 12])
def test_long_sequences_are_as_exact_as_with_the_matrix(count):
    """A head whose bias would be as large as 1000 far away: nothing of that may be seen in what is near."""
    steepest = (max(alibi_slopes(count)),)
    query, key, value = torch.randn(3, 1, 1, 2048, 8, dtype=torch.float64)
    expected = alibi_attention_reference(query, key, value, steepest)
    errors = [
        (attend(query.float(), key.float(), value.float(), steepest) - expected).abs().max()
        for attend in (alibi_attention, alibi_attention_reference)
    ]
    assert errors[0] < 2 * errors[1], errors
    assert errors[0] < 2e-6


def test_bfloat16_is_as_exact_as_bfloat16():
    slopes = alibi_slopes(8)
    query, key, value = torch.randn(3, 1, 8, 700, 8).bfloat16()
    expected = alibi_attention_reference(query.double(), key.double(), value.double(), slopes)
    assert (alibi_attention(query, key, value, slopes).double() - expected).abs().max() < 0.03
    with torch.autocast("cpu", torch.bfloat16):
        output = alibi_attention(query.float(), key.float(), value.float(), slopes)
    assert (output.double() - expected).abs().max() < 0.03


def test_queries_are_the_last_positions():
    inputs, slopes = heads(40), alibi_slopes(4)
    whole = alibi_attention(*inputs, slopes)
    for count in (1, 5):
        last = alibi_attention(inputs[0][..., -count:, :], *inputs[1:], slopes)
        torch.testing.assert_close(last, whole[..., -count:, :], rtol=0, atol=1e-13)


def test_the_scale_is_of_the_products_alone():
    query, key, value = heads(23)
    scaled = alibi_attention(query, key, value, alibi_slopes(4), scale=0.25)
    expected = alibi_attention_reference(query * 0.25 * 6**0.5, key, value, alibi_slopes(4))
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-13)


def test_keys_of_groups_are_repeated():
    (query, key, value), slopes = heads(23), alibi_slopes(4)
    grouped = alibi_attention(query, key[:, :2], value[:, :2], slopes, enable_gqa=True)
    key, value = (x[:, :2].repeat_interleave(2, dim=1) for x in (key, value))
    torch.testing.assert_close(grouped, alibi_attention_reference(query, key, value, slopes), rtol=0, atol=1e-13)


def test_more_queries_than_keys_are_refused():
    query, key, value = heads(5)
    with pytest.raises(ValueError, match="query has 5 positions and key only 3"):
        alibi_attention(query, key[..., :3, :], value[..., :3, :], alibi_slopes(4))


@pytest.mark.parametrize(
    ("slopes", "options", "message"),
    [
        ((0.5,), {}, "slopes must be one number for each of the 4 heads, got 1"),
        ((0.5,) * 4, {"is_causal": False}, "is_causal must be True and decay None"),
        ((0.5,) * 4, {"decay": (0.1,) * 4}, "is_causal must be True and decay None"),
    ],
)
def test_what_is_not_alibi_is_refused(slopes, options, message):
    with pytest.raises(ValueError, match=message):
        alibi_attention(*heads(5), slopes, **options)
    with pytest.raises(ValueError, match="heads must be an integer of at least 1, got 0"):
        alibi_slopes(0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alibi", {}),
        ("alibi", {"chunk_size": 7}),
        ("alibi", {"bias": False}),
        ("alibi-smooth", {}),
        ("alibi-smooth", {"window": 3, "side": "centered", "chunk_size": 7}),
    ],
)
def test_the_layer_is_its_projections_around_the_formula(name, options):
    layer = create_mixer(name, 18, heads=3, dtype=torch.float64, **options)
    x = torch.randn(2, 23, 18, dtype=torch.float64, requires_grad=True)
    query, key, value = (
        part.unflatten(-1, (3, 6)).transpose(1, 2)
        for part in F.linear(x, layer.in_proj.weight, layer.in_proj.bias).chunk(3, dim=-1)
    )
    attended = alibi_attention_reference(
        query,
        key,
        value,
        alibi_slopes(3),
        smoothing={"alibi": None, "alibi-smooth": options.get("window", 5)}[name],
        side=options.get("side", "past"),
        chunk_size=options.get("chunk_size"),
    )
    expected = F.linear(attended.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (layer(x), expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["alibi", "alibi-smooth"])
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_step_by_step_equals_the_whole_sequence(name, chunk_size):
    layer = create_mixer(name, 16, heads=4, chunk_size=chunk_size, dtype=torch.float64)
    x, state, outputs = torch.randn(2, 23, 16, dtype=torch.float64), None, []
    for t in range(23):
        output, state = layer.step(x[:, t], state)
        outputs.append(output)
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-12)


def test_only_centered_smoothing_sees_later_tokens():
    assert create_mixer("alibi", 16).causal
    assert create_mixer("alibi-smooth", 16).causal
    centered = create_mixer("alibi-smooth", 16, side="centered")
    assert not centered.causal
    with pytest.raises(ValueError, match="step needs a causal layer"):
        centered.step(torch.randn(2, 16))


def test_only_the_smooth_one_smooths():
    """As published, it does not: neither by its name nor by its class."""
    assert AlibiAttention(16).window is None
    assert create_mixer("alibi", 16).window is None
    assert create_mixer("alibi-smooth", 16).window == 5
    for option in ({"window": 5}, {"side": "centered"}):
        with pytest.raises(ValueError, match="mixer 'alibi' has no option"):
            create_mixer("alibi", 16, **option)


def test_errors_name_what_is_allowed():
    for options, message in (
        ({"heads": 3}, "divide the width of the layer, got heads=3 and a width of 16"),
        ({"window": 4}, "window must be an odd number of at least 1, got 4"),
        ({"rotary": True}, "mixer 'alibi-smooth' has no option 'rotary'"),
        ({"dropout": 2.0}, "dropout must be a number of at least 0 and below 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            create_mixer("alibi-smooth", 16, **options)


def test_dropout_only_in_training():
    layer, x = create_mixer("alibi", 16, dropout=0.5), torch.randn(2, 23, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
