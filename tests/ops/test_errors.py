"""Bad input: one sentence that names the argument, what was given, and what is allowed."""

import math

import pytest
import torch

from longlens import las_attention, las_attention_reference

X = torch.zeros(2, 4, 6, 8)
NARROW, SHORT, FEW, ONE = X[..., :4], X[..., :5, :], X[:, :3], X[:1]

BAD = [
    ((X[0], X, X), {}, ValueError, r"query must have the shape \(batch, heads, length, width\), got \(4, 6, 8\)"),
    (([1.0], X, X), {}, TypeError, "query must be a tensor, got a list"),
    ((X.long(), X, X), {}, TypeError, "query must be one of float64, float32, bfloat16, float16, got int64"),
    ((X, X.to(torch.float8_e4m3fn), X), {}, TypeError, "key must be one of .*, got float8_e4m3fn"),
    ((X, X, X.double()), {}, TypeError, "value must have the dtype of query, torch.float32, got torch.float64"),
    ((X, X.to("meta"), X), {}, ValueError, "key must be on the device of query, cpu, got meta"),
    ((X, NARROW, X), {}, ValueError, "query and key must have the same head width, got 8 and 4"),
    ((X, X, SHORT), {}, ValueError, "key and value must agree in batch, heads and length"),
    ((X, ONE, ONE), {}, ValueError, "query and key must have the same batch size, got 2 and 1"),
    ((X, FEW, FEW), {}, ValueError, "same number of heads, got 4 and 3; for grouped keys pass enable_gqa=True"),
    ((X, FEW, FEW), {"enable_gqa": True}, ValueError, "enable_gqa needs query heads in multiples of key's 3, got 4"),
    ((X, SHORT, SHORT), {}, ValueError, "query has 6 positions and key only 5"),
    ((X, SHORT, SHORT), {"is_causal": False, "decay": [0.0] * 4}, ValueError, "query has 6 positions"),
    ((X, X, X), {"decay": [0.0] * 3}, ValueError, "one rate for each of the 4 query heads, got 3"),
    ((X, X, X), {"decay": torch.zeros(3)}, ValueError, r"each of the 4 query heads, got shape \(3,\)"),
    ((X, X, X), {"decay": [0, 0, -0.1, 0]}, ValueError, "finite rates of at least 0, got -0.1 for head 2"),
    ((X, X, X), {"decay": torch.tensor([0, math.nan, 0, 0])}, ValueError, "got nan for head 1"),
    ((X, X, X), {"decay": [0, 0, 0, math.inf]}, ValueError, "got inf for head 3"),
    ((X, X, X), {"decay": torch.zeros(4, dtype=torch.long)}, TypeError, "decay must be a floating-point tensor"),
    ((X, X, X), {"decay": 0.1}, TypeError, "decay must be a tensor or a sequence of rates, one for each head, got 0.1"),
    ((X, X, X), {"decay": 0.1}, TypeError, r"got 0\.1: decay_rates\(num_heads, max_rate\) makes them"),
    ((X, X, X), {"smoothing": 4}, ValueError, "smoothing must be an odd window"),
    ((X, X, X), {"side": "left"}, ValueError, "side must be one of past, centered, got 'left'"),
    ((X, X, X), {"chunk_size": 0}, ValueError, "chunk_size must be at least 1 or None, got 0"),
    ((X, X, X), {"chunk_size": 2.0}, TypeError, "chunk_size must be an integer or None, got 2.0"),
    ((X, X, X), {"attn_mask": torch.zeros(6, 6)}, TypeError, "attn_mask must be a boolean tensor.*got torch.float32"),
    ((X, X, X), {"attn_mask": torch.ones(2, 6, dtype=torch.bool)}, ValueError, r"mask\[:, None, None, :\]"),
    ((X, X, X), {"attn_mask": torch.ones(9, 2, 4, 6, 6, dtype=torch.bool)}, ValueError, "attn_mask must broadcast to"),
    ((X[..., :0], X[..., :0], X), {}, ValueError, "query must have a head width of at least 1"),
    ((X, X, X), {"decay": ["a"] * 4}, TypeError, "decay of head 0 must be a number, got 'a'"),
    ((X, X, X), {"decay": torch.zeros(4).to(torch.float8_e4m3fn)}, TypeError, "decay must be a floating-point tensor"),
    ((X, X, X), {"scale": "x"}, TypeError, "scale must be a number, got 'x'"),
    ((X, X, X), {"dropout_p": None}, TypeError, "dropout_p must be a number, got None"),
    ((X, X, X), {"scale": math.nan}, ValueError, "scale must be a finite number or None, got nan"),
    ((X, X, X), {"dropout_p": 1.5}, ValueError, "dropout_p must lie between 0 and 1, got 1.5"),
]


@pytest.mark.parametrize("function", [las_attention, las_attention_reference])
@pytest.mark.parametrize(("tensors", "options", "error", "message"), BAD)
def test_bad_arguments(function, tensors, options, error, message):
    with pytest.raises(error, match=message) as raised:
        function(*tensors, **options)
    assert "\n" not in str(raised.value)


SWAPPED = X.transpose(1, 2)  # (batch, length, heads, width)


@pytest.mark.parametrize("decay", [[0.0] * 4, torch.zeros(4)])
def test_swapped_axes_are_named_where_they_show(decay):
    with pytest.raises(ValueError, match=r"query heads, got .*4.*; the axes are \(batch, heads, length, width\)"):
        las_attention(SWAPPED, SWAPPED, SWAPPED, decay=decay)
    with pytest.raises(ValueError, match=r"got 1 and 6; the axes are \(batch, heads, length, width\)"):
        las_attention(SWAPPED[:, -1:], SWAPPED, SWAPPED)  # a step of decoding


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of auto, sdpa, .*, got 'flash'"):
        las_attention(X, X, X, backend="flash")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": False}, "is_causal must be True for backend='linear'; use backend='auto' otherwise"),
        ({"dropout_p": 0.1}, "dropout_p must be 0 for"),
        (
            {"attn_mask": torch.ones(6, 6, dtype=torch.bool)},
            r"attn_mask must be the same for all queries, \(..., 1, keys\)",
        ),
    ],
)
def test_what_the_linear_backend_does_not_take(options, message):
    with pytest.raises(ValueError, match=message):
        las_attention(X, X, X, decay=[0.1] * 4, backend="linear", **options)


def test_cross_attention_without_positions_takes_any_lengths():
    assert las_attention(X, SHORT, SHORT, is_causal=False).shape == X.shape
    assert las_attention(X, SHORT, SHORT, is_causal=False, smoothing=3).shape == X.shape
