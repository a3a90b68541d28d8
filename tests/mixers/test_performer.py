"""The Performer against its formula with dense matrices, and against the softmax attention that it approaches."""

import math

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.performer import (
    PerformerAttention,
    log_features,
    orthogonal_rows,
    performer_attention_reference,
)
from longlens.mixers.registry import create_mixer, find_mixer
from longlens.ops.linear_attention import kernel_attention

FORMS = [(kernel, both) for kernel in ("softmax", "relu", "arena") for both in (True, False)]


def layer_of(**options):
    return PerformerAttention(12, 3, dtype=torch.float64, **{"features": 7} | options)


def by_the_formula(layer, x):
    heads = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, dim=-1))
    attended = performer_attention_reference(*heads, layer.rows, layer.kernel_name, is_causal=not layer.bidirectional)
    return layer.out_proj(attended.transpose(1, 2).flatten(2))


def test_the_formula_by_hand():
    """One feature of heads of width 1: φ(x) = exp(x - x²/2) or relu(x) + 10⁻³, whatever the query is."""
    query, key, value = torch.tensor([[5.0, 5.0], [0.0, 2.0], [1.0, 4.0]], dtype=torch.float64).view(3, 1, 1, 2, 1)
    row = torch.ones(1, 1, dtype=torch.float64)
    for kernel, expected in (("softmax", 2.5), ("relu", (0.001 + 4 * 2.001) / 2.002)):
        both, causal = (
            performer_attention_reference(query, key, value, row, kernel, is_causal=is_causal).flatten()
            for is_causal in (False, True)
        )
        expected = torch.tensor([expected, expected], dtype=torch.float64)
        torch.testing.assert_close(both, expected, rtol=0, atol=1e-14)
        expected[0] = 1.0  # of which the first token sees only itself
        torch.testing.assert_close(causal, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("both", [True, False])
def test_the_features_of_the_arena_are_not_random(both):
    """w_ts = Σ_f (relu(q_tf) + 10⁻³)·(relu(k_sf) + 10⁻³), token by token; no W, and no d^(1/4)."""
    layer = layer_of(kernel="arena", bidirectional=both)
    assert not list(layer.buffers())
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    query, key, value = layer.in_proj(x)[0].view(9, 3, 3, 4).unbind(dim=1)  # (L, H, d)
    expected = torch.zeros(9, 3, 4, dtype=torch.float64)
    for h in range(3):
        for t in range(9):
            weights = torch.zeros(9, dtype=torch.float64)
            for s in range(9 if both else t + 1):
                weights[s] = ((query[t, h].clamp(min=0) + 0.001) * (key[s, h].clamp(min=0) + 0.001)).sum()
            expected[t, h] = weights @ value[:, h] / weights.sum()
    torch.testing.assert_close(layer(x)[0], layer.out_proj(expected.flatten(1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 23, 101])
@pytest.mark.parametrize(("kernel", "both"), FORMS)
def test_the_formula(kernel, both, length):
    layer = layer_of(kernel=kernel, bidirectional=both)
    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), by_the_formula(layer, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight, leaves = torch.randn_like(expected), [x, *layer.parameters()]
    gradients = [torch.autograd.grad((y * weight).sum(), leaves) for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def error(draw, is_causal=False, draws=100):
    """The root mean square, over many draws of the rows, of the distance from softmax attention."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 24, 8, dtype=torch.float64) for _ in range(3))
    query, key, total = 0.4 * query, 0.4 * key, 0.0
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    for _ in range(draws):
        rows = draw()
        logs = (log_features(part, rows) for part in (query, key))
        total += (kernel_attention(*logs, value, is_causal=is_causal) - expected).square().mean().item()
    return math.sqrt(total / draws)


@pytest.mark.parametrize("is_causal", [False, True])
def test_more_features_come_closer_to_softmax_attention(is_causal):
    """The error of a mean of F features falls like 1/√F: by 4 from 32 to 512, within chance."""
    few, many = (error(lambda count=count: orthogonal_rows(count, 8), is_causal) for count in (32, 512))
    assert few < 0.1
    assert 3 < few / many < 5


def test_rows_are_orthogonal_in_blocks_and_gaussian():
    rows = orthogonal_rows(4000 * 6 + 2, 6)
    assert rows.shape == (24002, 6)
    blocks = rows[:24000].view(4000, 6, 6)
    products = blocks @ blocks.mT
    off_diagonal = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-12
    assert (rows[24000] @ rows[24001]).abs() < 1e-12, "an incomplete block, too"
    # Entries are N(0, 1): the squared lengths have the mean d and the variance 2d, the fourth moment of an entry is 3.
    squares = rows.square().sum(1)
    assert abs(squares.mean().item() - 6) < 0.1
    assert abs(squares.var().item() - 12) < 0.6
    assert rows.mean(0).abs().max() < 0.03
    assert abs(rows.pow(4).mean().item() - 3) < 0.15


def test_orthogonal_rows_are_better_than_independent_ones():
    independent = error(lambda: torch.randn(16, 8, dtype=torch.float64))
    assert error(lambda: orthogonal_rows(16, 8)) < 0.95 * independent


@pytest.mark.parametrize("size", [1e-8, 1e2, 1e4, 1e6])
@pytest.mark.parametrize(("kernel", "both"), FORMS)
def test_finite_for_inputs_of_any_size(kernel, both, size):
    layer = layer_of(kernel=kernel, bidirectional=both).float()
    x = (size * torch.randn(2, 150, 12)).requires_grad_()
    output = layer(x)
    assert output.isfinite().all()
    gradients = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"kernel": "relu"}])
def test_step_by_step_is_the_whole(options):
    layer = layer_of(bidirectional=False, **options)
    x = 3 * torch.randn(2, 70, 12, dtype=torch.float64)
    state, outputs = None, []
    for t in range(70):
        output, state = layer.step(x[:, t], state)
        outputs.append(output)
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-10)


def test_a_step_leaves_its_state_as_it_was():
    layer, x = layer_of(bidirectional=False), torch.randn(2, 12, dtype=torch.float64)
    _, state = layer.step(x)
    sums, scale = (part.clone() for part in state[0])
    first, second = layer.step(x, state)[0], layer.step(x, state)[0]
    assert torch.equal(first, second)
    assert torch.equal(state[0][0], sums)
    assert torch.equal(state[0][1], scale)


def test_rows_are_drawn_once():
    torch.manual_seed(3)
    layer = layer_of()
    rows = layer.rows.clone()
    layer.train()(torch.randn(1, 5, 12, dtype=torch.float64))
    layer.eval()(torch.randn(1, 5, 12, dtype=torch.float64))
    assert torch.equal(layer.rows, rows)
    assert torch.equal(layer.state_dict()["rows"], rows)
    torch.manual_seed(3)
    assert torch.equal(layer_of().rows, rows)
    layer.reset_parameters()
    assert not torch.equal(layer.rows, rows)


def test_by_default_d_log_d_features():
    for width in (8, 32, 64):
        assert create_mixer("performer", 8 * width).features == int(width * math.log(width))
    assert create_mixer("performer", 8).features == 1, "not 0 for heads of width 1"


def test_errors():
    with pytest.raises(ValueError, match="features must be a whole number of at least 1 or none, got 0"):
        create_mixer("performer", 16, features=0)
    with pytest.raises(ValueError, match="kernel must be one of softmax, relu, arena, got tanh"):
        PerformerAttention(16, 4, kernel="tanh")
    with pytest.raises(ValueError, match="divide the width of the layer"):
        create_mixer("performer", 10)
    with pytest.raises(ValueError, match="step needs a causal layer"):
        create_mixer("performer", 16).step(torch.randn(2, 16))


def test_the_state_is_as_large_as_its_traits_say():
    """features·(D + heads) numbers, besides the scale of each head."""
    layer = layer_of(bidirectional=False)
    _, state = layer.step(torch.randn(1, 12, dtype=torch.float64))
    assert state[0][0].numel() == 7 * (12 + 3)
    assert find_mixer("performer").traits.state == "features·(D + heads)"
