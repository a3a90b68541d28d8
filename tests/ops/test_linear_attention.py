"""Linear attention: the running sums, and the weights that come as logarithms."""

import math

import pytest
import torch

from longlens.ops.linear_attention import (
    CHUNK,
    causal_product,
    causal_product_reference,
    causal_step,
    kernel_attention,
    kernel_attention_reference,
)

LENGTHS = [1, 23, CHUNK, CHUNK + 1, 150]


def features(length, size=1.0, count=5, width=3):
    """Two of (2, 2, L, F) and one of (2, 2, L, E)."""
    shape = (2, 2, length)
    query, key = (size * torch.randn(*shape, count, dtype=torch.float64) for _ in range(2))
    return [x.requires_grad_() for x in (query, key, torch.randn(*shape, width, dtype=torch.float64))]


def assert_same(actual, expected, inputs, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weight).sum(), inputs) for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=atol)


def test_the_references_by_hand():
    one, two = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])
    expected = torch.tensor([[3.0], [2 * (1 * 3 + 2 * 5)]])
    torch.testing.assert_close(causal_product_reference(one, one, two), expected)
    scale = torch.tensor([0.0, math.log(4)])  # the second key is 4 times as large, and the first 1/4 beside it
    expected = torch.tensor([[3.0], [2 * (1 * 3 / 4 + 2 * 5)]])
    torch.testing.assert_close(causal_product_reference(one, one, two, scale), expected)
    logs = torch.tensor([[1.0, 3.0], [2.0, 1.0]]).log()[None, None]  # weights [[10, 5], [5, 5]]
    expected = torch.tensor([[(10 * 3 + 5 * 5) / 15], [(5 * 3 + 5 * 5) / 10]])
    torch.testing.assert_close(kernel_attention_reference(logs, logs, two[None, None])[0, 0], expected)
    expected[0] = 3
    torch.testing.assert_close(kernel_attention_reference(logs, logs, two[None, None], is_causal=True)[0, 0], expected)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_causal_product(length, scaled):
    inputs = features(length)
    scale = 5 * torch.randn(2, 2, length, dtype=torch.float64) if scaled else None
    assert_same(causal_product(*inputs, scale), causal_product_reference(*inputs, scale), inputs)


def test_step_by_step_is_the_whole():
    query, key, value = features(70)
    scale = 5 * torch.randn(2, 2, 70, dtype=torch.float64)
    state, outputs = None, []
    for t in range(70):
        output, state = causal_step(*(x[..., t, :] for x in (query, key, value)), scale[..., t], state)
        outputs.append(output)
    torch.testing.assert_close(
        torch.stack(outputs, dim=-2), causal_product(query, key, value, scale), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_kernel_attention(length, is_causal):
    inputs = features(length, size=3.0)
    padded = torch.arange(length) < torch.tensor([(length + 1) // 2, 0])[:, None]  # the second sample is all padding
    for mask in (None, padded):
        actual = kernel_attention(*inputs, mask, is_causal=is_causal)
        assert_same(actual, kernel_attention_reference(*inputs, mask, is_causal=is_causal), inputs)


@pytest.mark.parametrize("drift", [-20.0, 20.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_of_any_size(is_causal, drift):
    """Weights that grow or shrink by exp(±3000) along the sequence."""
    query, key, value = features(150, size=3.0)
    moved = key + drift * torch.arange(150, dtype=torch.float64)[:, None]
    actual = kernel_attention(query, moved, value, is_causal=is_causal)
    assert_same(actual, kernel_attention_reference(query, moved, value, is_causal=is_causal), [query, key, value])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_finite_where_features_underflow(is_causal, dtype):
    """Queries that are large only where all keys are 0 in any dtype."""
    query, key, value = (x.detach().to(dtype) for x in features(150))
    query[..., 0] += 1e4
    key[..., 0] -= 1e4
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output = kernel_attention(*inputs, is_causal=is_causal)
    assert output.isfinite().all()
    assert (output.abs() <= value.abs().max() + 1e-5).all(), "still a mean of values"
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.square().sum(), inputs))


def test_no_trace_of_later_positions():
    """Not even a rounding error, also when later keys are so large that earlier ones vanish beside them."""
    query, key, value = features(150)
    before = kernel_attention(query, key, value, is_causal=True)
    for t in (1, CHUNK - 1, CHUNK, 100, 149):
        for size in (1.0, 1e3):
            later = [
                torch.cat([x[..., :t, :], size * torch.randn_like(x[..., t:, :])], -2) for x in (query, key, value)
            ]
            after = kernel_attention(*later, is_causal=True)
            assert torch.equal(after[..., :t, :], before[..., :t, :])
            assert not torch.equal(after[..., t, :], before[..., t, :])


@pytest.mark.parametrize("is_causal", [False, True])
def test_half_precision_is_summed_in_float32(is_causal):
    inputs = [x.detach().bfloat16() for x in features(150)]
    expected = kernel_attention(*(x.float() for x in inputs), is_causal=is_causal)
    assert torch.equal(kernel_attention(*inputs, is_causal=is_causal), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel_attention(*(x.float() for x in inputs), is_causal=is_causal), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_is_linear_in_the_length(is_causal):
    def kept(length):
        saved = {}  # the tensors themselves: the address of one that is freed would be given to another
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x), lambda x: x)
        inputs = features(length)
        with hooks:
            output = kernel_attention(*inputs, is_causal=is_causal)
        return sum(x.numel() for x in saved.values()) + output.numel()

    assert kept(16 * CHUNK) < 2.1 * kept(8 * CHUNK)


def test_no_positions():
    for function in (causal_product, kernel_attention):
        assert function(*features(0)).shape == (2, 2, 0, 3)
