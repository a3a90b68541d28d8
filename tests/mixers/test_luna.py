"""Luna against its two attentions written out, and its causal form against the running mean of each token."""

import math

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.luna import LunaAttention, luna_reference
from longlens.mixers.registry import create_mixer
from longlens.ops import linear_attention

WIDTH, HEADS, MEMORY = 12, 3, 5


def layer_of(**options):
    layer = LunaAttention(WIDTH, HEADS, memory=MEMORY, dtype=torch.float64, **options)
    for parameter in layer.parameters():  # biases that are not 0
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def waves():
    """Position p has sin(p·10000^(-c/6)) in the channels c < 6, and the cosine in the channels 6 + c."""
    angles = [[p * 10_000 ** (-c / 6) for c in range(6)] for p in range(MEMORY)]
    rows = [[*map(math.sin, row), *map(math.cos, row)] for row in angles]
    return torch.tensor(rows).double()  # as exact as float32


def assert_same(layer, x, actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    weight, leaves = torch.randn_like(expected), [x, *layer.parameters()]
    gradients = [torch.autograd.grad((y * weight).sum(), leaves) for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@pytest.mark.parametrize("length", [1, 23, 101])
def test_two_attentions(length):
    layer = layer_of()
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(layer, x, layer(x), luna_reference(layer, x))


def test_padding_is_not_packed():
    """Wherever it is."""
    layer, mask = layer_of(), torch.rand(2, 23) > 0.4
    x = torch.randn(2, 23, WIDTH, dtype=torch.float64, requires_grad=True)
    kept = mask[..., None]
    assert_same(layer, x, layer(x, mask=mask) * kept, luna_reference(layer, x, mask) * kept)


def test_two_attentions_of_torch():
    """Torch's own attention, whose last projection is the identity."""
    layer, x = layer_of(bias=False), torch.randn(1, 23, WIDTH, dtype=torch.float64)

    def attention(query, context, query_weight, context_weight):
        output, _ = F.multi_head_attention_forward(
            *(query, context, context, WIDTH, HEADS),
            *(None, None, None, None, False, 0.0),  # biases and dropout
            *(torch.eye(WIDTH, dtype=torch.float64), None),
            use_separate_proj_weight=True,
            q_proj_weight=query_weight,
            k_proj_weight=context_weight,
            v_proj_weight=context_weight,
        )
        return output

    packed = attention(layer.memory + waves(), x[0], layer.pq_proj.weight, layer.pc_proj.weight)
    expected = layer.out_proj(attention(x[0], packed, layer.q_proj.weight, layer.c_proj.weight))
    for output in (layer(x), luna_reference(layer, x)):
        torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-6)  # of sinusoids in float32


@pytest.mark.parametrize("bidirectional", [True, False])
def test_sinusoids_are_added_to_the_memory(bidirectional):
    layer, plain = (layer_of(bidirectional=bidirectional, sinusoids=on) for on in (True, False))
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "waves"})
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    assert (plain(x) - layer(x)).abs().max() > 1e-3
    with torch.no_grad():
        plain.memory += waves()
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "weights"), [("softplus", (math.log2(3), math.log2(1.25))), ("elu", (2.0, math.exp(-2)))]
)
def test_causal_form_by_hand(activation, weights):
    """One memory token and projections of 1: y_t = C_t, the running mean of 0, 1 and -2 with their weights."""
    layer = LunaAttention(1, 1, memory=1, activation=activation, bidirectional=False, bias=False, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    expected = torch.tensor([0.0, weights[0] / 2, (weights[0] - 2 * weights[1]) / 3], dtype=torch.float64)
    x = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64).view(1, 3, 1)
    for output in (layer(x), luna_reference(layer, x)):
        torch.testing.assert_close(output.flatten(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (15, 4), (101, 64)])
@pytest.mark.parametrize("activation", ["softplus", "elu"])
def test_causal_form(activation, length, chunk, monkeypatch):
    monkeypatch.setattr(linear_attention, "CHUNK", chunk)
    layer = layer_of(bidirectional=False, activation=activation)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(layer, x, layer(x), luna_reference(layer, x))


def test_causal_form_with_padding_anywhere():
    layer, mask = layer_of(bidirectional=False), torch.rand(2, 13) > 0.4
    mask[0, :2] = False  # before the first token, too
    x = torch.randn(2, 13, WIDTH, dtype=torch.float64, requires_grad=True)
    kept = mask[..., None]
    assert_same(layer, x, layer(x, mask=mask) * kept, luna_reference(layer, x, mask) * kept)


@pytest.mark.parametrize("activation", ["softplus", "elu"])
def test_a_memory_that_asks_for_nothing_packs_the_running_mean(activation):
    """Without questions all weights are 1, at a length of several chunks."""
    layer = layer_of(bidirectional=False, activation=activation)
    torch.nn.init.zeros_(layer.pq_proj.weight)
    torch.nn.init.zeros_(layer.pq_proj.bias)
    x = torch.randn(2, 150, WIDTH, dtype=torch.float64)
    mean = layer.c_proj(x).cumsum(1) / torch.arange(1, 151, dtype=torch.float64)[:, None]
    for output in (layer(x), luna_reference(layer, x)):
        torch.testing.assert_close(output, layer.out_proj(mean), rtol=0, atol=1e-11)


def test_both_sides_of_one_memory_token_are_the_same_everywhere():
    layer = LunaAttention(WIDTH, HEADS, memory=1, dtype=torch.float64)
    output = layer(torch.randn(2, 23, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(output, output[:, :1].expand_as(output), rtol=0, atol=1e-12)


def test_a_causal_layer_has_no_trace_of_later_tokens():
    """Over several chunks, which the general test has not; and step by step it is the same."""
    layer, x = layer_of(bidirectional=False), torch.randn(2, 150, WIDTH, dtype=torch.float64)
    before = layer(x)
    for t in (1, 63, 64, 149):
        later = x.clone()
        later[:, t:] = 1e3 * torch.randn_like(later[:, t:])
        assert torch.equal(layer(later)[:, :t], before[:, :t])
    state = None
    for t in range(150):
        output, state = layer.step(x[:, t], state)
        torch.testing.assert_close(output, before[:, t], rtol=0, atol=1e-10)


def test_a_step_leaves_its_state_as_it_was():
    layer, x = layer_of(bidirectional=False), torch.randn(2, WIDTH, dtype=torch.float64)
    _, state = layer.step(x)
    sums = state[0].clone()
    first, second = layer.step(x, state)[0], layer.step(x, state)[0]
    assert torch.equal(first, second)
    assert torch.equal(state[0], sums)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_row_of_padding_has_finite_gradients(bidirectional):
    layer = layer_of(bidirectional=bidirectional)
    x = torch.full((1, 23, WIDTH), torch.inf, dtype=torch.float64).requires_grad_()
    output = layer(x, mask=torch.zeros(1, 23, dtype=torch.bool))
    assert output.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(output.square().sum(), [x, *layer.parameters()]))
    if bidirectional:
        torch.testing.assert_close(output, layer(torch.zeros_like(x)))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_dropout_only_in_training(bidirectional):
    layer, x = (
        layer_of(bidirectional=bidirectional, dropout=0.5),
        torch.randn(2, 23, WIDTH, dtype=torch.float64),
    )
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    layer.dropout = 0.0
    torch.testing.assert_close(layer.train()(x), layer.eval()(x))


def test_errors():
    with pytest.raises(ValueError, match="memory must be a whole number of at least 1, got 0"):
        create_mixer("luna", 16, memory=0)
    with pytest.raises(ValueError, match="activation must be softplus or elu, got exp"):
        LunaAttention(16, 4, activation="exp")
    with pytest.raises(ValueError, match="divide the width of the layer, got heads=8 and a width of 10"):
        create_mixer("luna", 10)
    with pytest.raises(ValueError, match=r"dropout must be a number of at least 0 and below 1, got 1\.5"):
        create_mixer("luna", 16, dropout=1.5)
    with pytest.raises(ValueError, match="step needs a causal layer"):
        create_mixer("luna", 16).step(torch.randn(2, 16))
