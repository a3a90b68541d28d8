"""Linformer: identity projections give full attention; the formula in full; lengths and padding."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.linformer import LinformerAttention, linformer_attention_reference
from longlens.mixers.registry import create_mixer

SHARES = ("key-value", "headwise", "none")


def build(share, **options):
    return create_mixer(
        "linformer",
        16,
        **({"heads": 4, "projected": 9, "max_length": 40, "dtype": torch.float64} | options),
        share=share,
    )


def matrices(layer):
    """E and F of each head, (H, k, n) each."""
    weights = layer.projections
    if layer.share == "key-value":
        return weights.expand(layer.heads, -1, -1), weights.expand(layer.heads, -1, -1)
    if layer.share == "headwise":
        return weights[:1].expand(layer.heads, -1, -1), weights[1:].expand(layer.heads, -1, -1)
    return weights[: layer.heads], weights[layer.heads :]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("length", [1, 23, 40])
def test_it_is_the_formula(share, length):
    layer = build(share)
    x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
    query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, dim=-1))
    projections = (matrix[..., :length] for matrix in matrices(layer))
    attended = linformer_attention_reference(query, key, value, *projections)
    expected = F.linear(attended.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, (x, *layer.parameters()), grad) for output in (layer(x), expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_the_formula_by_hand():
    """Two tokens, of which one projection keeps the first and the other the mean, of the keys and the values alike."""
    query, key, value = (
        torch.tensor(rows, dtype=torch.float64).view(1, 1, 2, 1) for rows in ([0, 1], [0, 2], [10, 30])
    )
    both = torch.tensor([[[1, 0], [0.5, 0.5]]], dtype=torch.float64)
    weight = torch.e / (1 + torch.e)  # keys are 0 and 1, so the second token's scores, too
    expected = torch.tensor([15.0, 10 + 10 * weight], dtype=torch.float64)
    actual = linformer_attention_reference(query, key, value, both, both)
    torch.testing.assert_close(actual.flatten(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("share", SHARES)
def test_identity_projections_are_full_attention(share):
    layer = build(share, projected=23, max_length=23)
    with torch.no_grad():
        layer.projections.copy_(torch.eye(23))
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    attended = F.scaled_dot_product_attention(*layer._project(x))
    expected = layer.out_proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("share", SHARES)
def test_padding_counts_as_nothing(share):
    layer = build(share)
    lengths = (30, 11, 1, 0)
    x = torch.randn(4, 30, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    together = layer(torch.where(mask[..., None], x, 1e3), mask=mask)
    for row, length in enumerate(lengths[:3]):
        torch.testing.assert_close(together[row, :length], layer(x[row : row + 1, :length])[0], rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(together.square().sum(), (x, *layer.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_projections_are_as_many_as_are_not_shared():
    assert [tuple(build(share).projections.shape) for share in SHARES] == [(1, 9, 40), (2, 9, 40), (8, 9, 40)]
    assert create_mixer("linformer", 16).projections.shape == (1, 256, 1024), "a length of 1024 if none is given"


@pytest.mark.parametrize("share", SHARES)
def test_each_projection_begins_xavier_uniform(share):
    torch.manual_seed(0)
    layer = build(share, projected=200, max_length=400)
    bound = (6 / 600) ** 0.5
    for matrix in layer.projections:
        assert matrix.abs().max() <= bound
        assert matrix.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_meta_device_then_reset_parameters():
    layer = build("none", device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    layer.reset_parameters()
    assert layer(torch.randn(1, 23, 16, dtype=torch.float64)).isfinite().all()


def test_a_sequence_too_long_is_refused():
    with pytest.raises(ValueError, match="x must have at most 40 tokens, got 41: choose max_length=41"):
        build("key-value")(torch.randn(1, 41, 16, dtype=torch.float64))


def test_it_is_never_causal():
    assert LinformerAttention.causal is False


def test_errors_name_what_is_allowed():
    for options, message in (
        ({"projected": 0}, "projected must be a whole number of at least 1, got 0"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"share": "all"}, "share must be one of key-value, headwise, none, got all"),
        ({"heads": 3}, "divide the width of the layer, got heads=3 and a width of 16"),
        ({"dropout": 2.0}, "dropout must be a number of at least 0 and below 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            create_mixer("linformer", 16, **options)


def test_dropout_only_in_training():
    layer, x = build("headwise", dropout=0.5), torch.randn(2, 23, 16, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
