"""``replace_attention``: models of plain PyTorch with LaS in the place of their attention."""

import copy

import pytest
import torch
from torch import nn

import longlens
from longlens import LaSAttention, replace_attention
from longlens.errors import BadInput

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

D, H, L, B = 24, 4, 9, 3
STEEP = {"max_rate": 0.3, "window": 3}
PADDING = torch.arange(L) >= torch.tensor([[9], [5], [2]])  # True is padding, as in torch
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)  # True is hidden


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # rates are float32


def encoder(**options):
    layer = nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, dtype=torch.float64, **{"batch_first": True} | options)
    model = nn.TransformerEncoder(layer, 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    return model


def attention(**options):
    return encoder(**options).layers[0].self_attn


def as_layer(attention, **options):
    """The LaS layer of ours with the weights of an nn.MultiheadAttention."""
    layer = LaSAttention(D, H, **STEEP, **options, dtype=torch.float64)
    names = {"in_proj.weight": "in_proj_weight", "in_proj.bias": "in_proj_bias"}
    given = attention.state_dict()
    layer.load_state_dict({name: given[names.get(name, name)] for name in layer.state_dict()})
    return layer


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"batch_first": False}, {"bias": False}], ids=str)
def test_without_decay_and_smoothing_the_model_is_what_it_was(options, training):
    """In all ways in which torch runs an encoder, also those that are fused."""
    plain = encoder(**options).train(training)
    las = copy.deepcopy(plain)
    assert replace_attention(las, max_rate=0, window=None).replaced == ("layers.0.self_attn", "layers.1.self_attn")
    x = torch.randn(B, L, D, dtype=torch.float64)
    x = x if options.get("batch_first", True) else x.transpose(0, 1)
    tokens = ~PADDING if options.get("batch_first", True) else ~PADDING.T
    with torch.no_grad():
        for masks in (
            {},
            {"mask": CAUSAL},
            {"src_key_padding_mask": PADDING},
            {"mask": CAUSAL, "src_key_padding_mask": PADDING},
        ):
            torch.testing.assert_close(las(x, **masks)[tokens], plain(x, **masks)[tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_no_fused_kernel_of_torch_takes_its_place(training):
    model = encoder().train(training)
    plain, x = copy.deepcopy(model), torch.randn(B, L, D, dtype=torch.float64)
    replace_attention(model, **STEEP)
    layer = as_layer(model.layers[0].self_attn, bidirectional=True)
    with torch.no_grad():
        for masks in ({}, {"src_key_padding_mask": PADDING}):
            assert (model(x, **masks) - plain(x, **masks))[~PADDING].abs().max() > 1e-3
        expected = model.layers[0].norm1(x + layer(x, mask=~PADDING))
        block = model.layers[0]
        expected = block.norm2(expected + block.linear2(block.linear1(expected).relu()))
        close(block(x, src_key_padding_mask=PADDING)[~PADDING], expected[~PADDING])


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_gradients_are_those_of_our_layer(causal):
    ours, theirs = attention(), attention()
    replace_attention(theirs, **STEEP)
    layer = as_layer(theirs, bidirectional=not causal)
    x = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    masks = [CAUSAL, torch.zeros(L, L, dtype=torch.float64).masked_fill(CAUSAL, -torch.inf)] if causal else [None]
    for mask in masks:
        output, weights = theirs(x, x, x, attn_mask=mask, need_weights=False)
        assert weights is None
        close(output, layer(x))
        found = torch.autograd.grad(output.square().sum(), [x, theirs.in_proj_weight, theirs.out_proj.bias])
        expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.in_proj.weight, layer.out_proj.bias])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        padded, _ = theirs(x, x, x, key_padding_mask=PADDING, attn_mask=mask)
        close(padded[~PADDING], layer(x, mask=~PADDING)[~PADDING])
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def test_is_causal_without_a_mask_is_causal():
    layer, x = attention(), torch.randn(B, L, D, dtype=torch.float64)
    replace_attention(layer, **STEEP)
    close(layer(x, x, x, is_causal=True)[0], layer(x, x, x, attn_mask=CAUSAL)[0])


def test_weights_are_those_that_multiply_the_values():
    layer, x = attention(), torch.randn(B, L, D, dtype=torch.float64)
    replace_attention(layer, **STEEP)
    _, weights = layer(x, x, x, average_attn_weights=False, attn_mask=CAUSAL)
    close(weights, as_layer(layer).attention_weights(x))
    _, mean = layer(x, x, x, attn_mask=CAUSAL)
    close(mean, weights.mean(1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch(batch_first):
    layer, x = attention(batch_first=batch_first), torch.randn(L, D, dtype=torch.float64)
    replace_attention(layer, **STEEP)
    output, weights = layer(x, x, x, key_padding_mask=PADDING[1])
    batch = x[None] if batch_first else x[:, None]
    expected, expected_weights = layer(batch, batch, batch, key_padding_mask=PADDING[1:2])
    close(output, expected.squeeze(0 if batch_first else 1))
    close(weights, expected_weights[0])


def test_masks_for_each_head_and_biases_are_added_to_the_decayed_scores():
    layer, x = attention(), torch.randn(B, L, D, dtype=torch.float64)
    mask = torch.randn(B * H, L, L, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    replace_attention(layer, "l-attention", max_rate=0.3)
    query, key, value = (
        y.unflatten(-1, (H, -1)).transpose(1, 2)
        for y in nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
    )
    place = torch.arange(L)
    decay = longlens.decay_rates(H, 0.3).double()[:, None, None] * (place[:, None] - place).abs()
    scores = query @ key.mT * (D // H) ** -0.5 * torch.exp(-decay) + mask.view(B, H, L, L)
    expected = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    close(layer(x, x, x, attn_mask=mask)[0], layer.out_proj(expected))
    replace_attention(layer, max_rate=0, window=None)
    close(layer(x, x, x, attn_mask=mask)[0], plain(x, x, x, attn_mask=mask)[0])


def test_documents_stay_apart_whatever_is_hidden_in_other_rows():
    """Padding at the end, padding that sees itself, and a gap."""
    layer, x = attention(), torch.randn(B, L, D, dtype=torch.float64)
    replace_attention(layer, **STEEP)
    document = torch.tensor([0] * 4 + [1] * 5)
    hidden = (document[:, None] != document) | CAUSAL
    apart = torch.cat([layer(y, y, y, attn_mask=CAUSAL[: y.shape[1], : y.shape[1]])[0] for y in x.split((4, 5), 1)], 1)
    masks = hidden.repeat(B, 1, 1)
    masks[1, :, 7:] = True
    masks[1] &= ~torch.eye(L, dtype=torch.bool)  # padding sees itself
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[2, 7:] = padding[2, 5] = True
    output = layer(x, x, x, attn_mask=masks.repeat_interleave(H, dim=0), key_padding_mask=padding)[0]
    close(output[0], apart[0])
    close(output[1, :7], apart[1, :7])
    close(output[2, :5], apart[2, :5])
    x[2, :4] += 1.0
    changed = layer(x, x, x, attn_mask=hidden, key_padding_mask=padding)[0]
    close(changed[2, 4:7], output[2, 4:7])


class Vision(nn.Module):
    """As vision transformers are written."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True)
        self.pool = nn.MultiheadAttention(D, H, batch_first=True)
        self.other = nn.MultiheadAttention(D, H, kdim=8, vdim=8)
        self.more = nn.MultiheadAttention(D, H, add_bias_kv=True)
        self.zero = nn.MultiheadAttention(D, H, add_zero_attn=True)
        self.again = self.attention

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.pool(x[:, :1], x, x)[0]


def test_what_cannot_be_replaced_is_named():
    model = Vision()
    done = replace_attention(model, skip=["pool"])
    assert done.replaced == ("attention",)
    assert done.left == {
        "pool": "it is to be skipped",
        "other": "keys or values of another width are of another sequence",
        "more": "add_bias_kv adds a key that has no place",
        "zero": "add_zero_attn adds a key that has no place",
    }
    assert str(done).startswith("replaced attention\nleft pool: it is to be skipped\n")
    assert model.again is model.attention
    x = torch.randn(B, L, D)
    assert model(x).shape == (B, 1, D)
    assert (model(x) - model(x)).abs().max() > 1e-3, "dropout in training"
    close(model.eval()(x), model(x))


def test_another_sequence_is_refused():
    model = Vision()
    replace_attention(model)
    with pytest.raises(BadInput, match=r"between two sequences LaS has no distance; name this layer in .*skip"):
        model(torch.randn(B, L, D))
    layer = nn.TransformerDecoderLayer(D, H, 16, batch_first=True)
    assert replace_attention(layer).left == {"multihead_attn": "it attends to another sequence"}
    assert layer(torch.randn(B, L, D), torch.randn(B, 5, D)).shape == (B, L, D)


@pytest.mark.parametrize("mixer", ["las", "las-chunk", "l-attention", "s-attention", "las-bidirectional"])
def test_every_variant(mixer):
    layer, x = attention(), torch.randn(1, L, D, dtype=torch.float64)
    options = {"chunk_size": 4} if mixer == "las-chunk" else {}
    replace_attention(layer, mixer, **options)
    ours = longlens.create_mixer(mixer, D, heads=H, **options, dtype=torch.float64)
    given = layer.state_dict()
    ours.load_state_dict({name: given[name.replace("in_proj.", "in_proj_")] for name in ours.state_dict()})
    mask = None if mixer == "las-bidirectional" else CAUSAL
    close(layer(x, x, x, attn_mask=mask)[0], ours(x))
    close(copy.deepcopy(layer)(x, x, x, attn_mask=mask)[0], ours(x))
    assert "schedule='exp-uniform'" in repr(layer)


def test_a_layer_by_itself_has_its_name_and_new_weights_as_ever():
    plain = nn.MultiheadAttention(D, H)
    layer = copy.deepcopy(plain)
    assert str(replace_attention(layer)) == "replaced MultiheadAttention"
    for module in (plain, layer):
        torch.manual_seed(1)
        nn.init.ones_(module.out_proj.bias)
        module._reset_parameters()
    close(layer.state_dict(), plain.state_dict())
    layer = nn.MultiheadAttention(D, H, bias=False)
    replace_attention(layer)
    layer._reset_parameters()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: replace_attention(nn.Linear(2, 2)), "no attention that can be replaced .*attn_implementation"),
        (lambda: replace_attention(nn.MultiheadAttention(D, H, add_zero_attn=True)), "add_zero_attn adds a key"),
        (lambda: replace_attention(encoder(), "alibi"), "there is no attention 'alibi' to take the place of another"),
        (lambda: replace_attention(encoder(), windows=3), "mixer 'las' has no option 'windows'; did you mean 'window'"),
        (lambda: replace_attention(encoder(), window=4), "window must be an odd number"),
        (lambda: replace_attention(encoder(), skip=["layer.0"]), "names of modules of the model, got layer.0"),
        (lambda: replace_attention("model"), "model must be a torch.nn.Module, got a str"),
    ],
)
def test_bad_input_is_one_sentence(call, reason):
    with pytest.raises(BadInput, match=reason):
        call()


def test_bad_masks_are_one_sentence():
    layer, x = attention(), torch.randn(B, L, D, dtype=torch.float64)
    replace_attention(layer)
    for masks, reason in (
        ({"key_padding_mask": PADDING[:, :4]}, r"key_padding_mask must be \(batch, length\) = \(3, 9\), got \(3, 4\)"),
        ({"attn_mask": CAUSAL[:4]}, r"attn_mask must be \(length, length\) = \(9, 9\) or \(12, length, length\), got"),
        ({"attn_mask": CAUSAL.int()}, "the mask must be boolean or of floating-point numbers, got torch.int32"),
    ):
        with pytest.raises(BadInput, match=reason):
            layer(x, x, x, **masks)
    with pytest.raises(BadInput, match=r"query must be \(…, 24\) with two or three dimensions, got \(3, 9, 8\)"):
        layer(x[..., :8], x[..., :8], x[..., :8])
    replace_attention(layer, side="centered")
    layer(x, x, x)
    with pytest.raises(BadInput, match="side must be past in causal attention, got centered"):
        layer(x, x, x, attn_mask=CAUSAL)
    place = torch.arange(L)
    layer(x, x, x, attn_mask=(place[:, None] - place).abs() > 2, key_padding_mask=PADDING)  # alike to both sides
    prefix = CAUSAL & (place >= 4)
    with pytest.raises(BadInput, match="side must be past in partly causal attention, got centered, which would show"):
        layer(x, x, x, attn_mask=prefix, key_padding_mask=PADDING)
