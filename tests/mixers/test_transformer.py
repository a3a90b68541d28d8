"""Causal attention: LaS attention without decay and smoothing, torch's own, padding, steps and rotary positions."""

import pytest
import torch
from torch.nn import MultiheadAttention, Transformer

from longlens.errors import BadInput
from longlens.mixers.las import LaSAttention
from longlens.mixers.registry import create_mixer, find_mixer
from longlens.mixers.transformer import CausalAttention

ROTARY = pytest.mark.parametrize("rotary", [False, True])


def inputs(length, batch=3):
    return torch.randn(batch, length, 16, dtype=torch.float64, requires_grad=True)


def outputs_and_gradients(layer, x, mask, weight):
    output = layer(x, mask=mask)
    return output, *torch.autograd.grad((output * weight).sum(), (x, *layer.parameters()))


@ROTARY
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "bias"), [(1, True), (23, True), (101, False)])
def test_it_is_las_without_decay_and_smoothing(length, bias, masked, rotary):
    """Everywhere: at padding, and in a sequence of nothing but padding, too."""
    layer = CausalAttention(16, 4, bias=bias, rotary=rotary, dtype=torch.float64)
    las = LaSAttention(16, 4, max_rate=0.0, window=None, bias=bias, rotary=rotary, dtype=torch.float64)
    las.load_state_dict(layer.state_dict())
    x, mask = inputs(length), None
    if masked:
        mask = torch.arange(length) < torch.tensor([length, length // 2 + 1, 0])[:, None]
        mask[0, length // 3 :: 7] = False
    weight = torch.randn_like(x)
    results = [outputs_and_gradients(attention, x, mask, weight) for attention in (layer, las)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-13)


def test_it_begins_as_las_does():
    layers = []
    for build in (lambda: CausalAttention(16, 4), lambda: LaSAttention(16, 4)):
        torch.manual_seed(1)
        layers.append(build().state_dict())
    assert list(layers[0]) == list(layers[1])
    assert all(torch.equal(layers[0][name], layers[1][name]) for name in layers[0])


def test_it_is_the_attention_of_torch():
    layer, x = CausalAttention(16, 4, dtype=torch.float64), inputs(23)
    plain = MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    plain.load_state_dict({name.replace("in_proj.", "in_proj_"): x for name, x in layer.state_dict().items()})
    mask = Transformer.generate_square_subsequent_mask(23, dtype=torch.float64)
    expected, _ = plain(x, x, x, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)


@ROTARY
def test_padding_changes_nothing(rotary):
    layer, x = CausalAttention(16, 4, rotary=rotary, dtype=torch.float64), inputs(23)
    lengths = (23, 9, 0)
    mask = torch.arange(23) < torch.tensor(lengths)[:, None]
    together = layer(torch.where(mask[..., None], x, torch.nan), mask=mask)
    assert together.isfinite().all()
    for row, length in enumerate(lengths):
        alone = layer(x[row : row + 1, :length])[0]
        torch.testing.assert_close(together[row, :length], alone, rtol=0, atol=1e-13)


@ROTARY
def test_step_by_step_equals_the_whole_sequence(rotary):
    layer, x = CausalAttention(16, 4, rotary=rotary, dtype=torch.float64), inputs(23)
    state, outputs = None, []
    for t in range(23):
        output, state = layer.step(x[:, t], state)
        outputs.append(output)
        assert state[0].shape == state[1].shape == (3, 4, t + 1, 4), "2·L·D numbers, as its traits say"
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-13)
    once, again = (layer.step(x[:, 0], state)[0] for _ in range(2))
    assert torch.equal(once, again), "a step leaves the state as it was"
    assert find_mixer("transformer").traits.state == "2·L·D"


def test_rotary_scores_depend_on_distances_alone():
    """The last output of a sequence is the same later on, after tokens that are hidden."""
    layer, x = CausalAttention(16, 4, rotary=True, dtype=torch.float64), inputs(11)
    before = torch.randn(3, 6, 16, dtype=torch.float64)
    mask = (torch.arange(17) >= 6).expand(3, -1)
    later = layer(torch.cat([before, x], dim=1), mask=mask)[:, 6:]
    torch.testing.assert_close(later, layer(x), rtol=0, atol=1e-12)
    plain = CausalAttention(16, 4, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    assert (layer(x) - plain(x))[:, 1:].abs().max() > 1e-3
    torch.testing.assert_close(layer(x)[:, 0], plain(x)[:, 0], rtol=0, atol=1e-13)


def test_low_precision_and_autocast():
    layer, x = CausalAttention(16, 4), torch.randn(2, 23, 16)
    mask = torch.arange(23) < torch.tensor([[23], [9]])
    expected = layer(x, mask=mask)[mask]
    with torch.autocast("cpu", torch.bfloat16):
        assert (layer(x, mask=mask)[mask] - expected).abs().max() < 0.03
    for dtype in (torch.bfloat16, torch.float16):
        output = layer.to(dtype)(x.to(dtype), mask=mask)
        assert output.dtype == dtype
        assert (output[mask].float() - expected).abs().max() < 0.03


def test_dropout_only_in_training():
    layer, x = create_mixer("transformer", 16, dropout=0.5), torch.randn(2, 23, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_errors_name_what_is_allowed():
    for options, message in (
        ({"heads": 3}, "heads must divide the width of the layer, got heads=3 and a width of 16"),
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"heads": 16, "rotary": True}, "rotary positions need heads of even width, got 16 / 16"),
        ({"dropout": 1.0}, "dropout must be a number of at least 0 and below 1, got 1.0"),
        ({"chunk_size": 8}, "mixer 'transformer' has no option 'chunk_size'"),
    ):
        with pytest.raises(BadInput, match=message):
            create_mixer("transformer", 16, **options)
    with pytest.raises(BadInput, match=r"x must have the shape \(batch, 16\) in a step, got \(3, 23, 16\)"):
        CausalAttention(16, 4, dtype=torch.float64).step(inputs(23))


def test_the_chunked_one_is_local():
    """``local`` with one side is causal attention in chunks: here LaS attention without decay and smoothing."""
    local = create_mixer("local", 16, heads=4, block_size=7, bidirectional=False, dtype=torch.float64)
    las = LaSAttention(16, 4, max_rate=0.0, window=None, chunk_size=7, dtype=torch.float64)
    las.load_state_dict(local.state_dict())
    x = inputs(23)
    assert torch.equal(local(x), las(x))


@pytest.mark.parametrize("masked", [False, True])
def test_both_sides_are_the_attention_of_torch_without_a_causal_mask(masked):
    layer, x = CausalAttention(16, 4, bidirectional=True, dtype=torch.float64), inputs(23)
    plain = MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    plain.load_state_dict({name.replace("in_proj.", "in_proj_"): x for name, x in layer.state_dict().items()})
    mask = torch.arange(23) < torch.tensor([[23], [9], [1]]) if masked else torch.ones(3, 23, dtype=torch.bool)
    expected, _ = plain(x, x, x, key_padding_mask=~mask)
    found = layer(x, mask=mask if masked else None)
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-13)
    grads = [torch.autograd.grad(output[mask].square().sum(), x)[0] for output in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    with pytest.raises(BadInput, match="step needs a causal layer"):
        layer.step(x[:, 0])
