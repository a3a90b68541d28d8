"""Attention with a bias for each distance: in blocks against all pairs at once, and those against the formula."""

import math

import pytest
import torch

from longlens.bench.measure import peak_memory
from longlens.ops.toeplitz_attention import toeplitz_attention, toeplitz_attention_reference

# Length, and queries in a block: fewer than there are, with and without a rest, as many, more, and the default.
CASES = [(1, None), (1, 7), (23, 1), (23, 7), (23, 23), (101, 4), (101, 7), (101, 23), (101, None)]


def inputs(length, batch=3, dtype=torch.float64, scale=1.0):
    """Queries, keys, values, biases."""
    shapes = (batch, length, 4), (batch, length, 4), (batch, length, 6), (2 * length - 1,)
    return [(scale * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]


def masks(length):
    """Tokens anywhere, padding on both sides, and nothing but padding."""
    mask = torch.rand(3, length) < 0.6
    mask[1] = True
    mask[1, : length // 2] = mask[1, 3 * length // 4 :] = mask[2] = False
    return mask


def assert_same(actual, expected, arguments, atol):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, arguments, weight) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=atol)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attention", [toeplitz_attention, toeplitz_attention_reference])
def test_the_formula_token_by_token(attention, is_causal):
    """Padding that would see nothing sees padding; a causal one that before it."""
    length = 9
    query, key, value, biases = inputs(length)
    mask = masks(length)
    actual = attention(query, key, value, biases, is_causal=is_causal, mask=mask)
    for b in range(len(query)):
        for i in range(length):
            reach = range(i + 1 if is_causal else length)
            seen = [j for j in reach if mask[b, j]] or list(reach)
            scores = torch.stack([query[b, i] @ key[b, j] / math.sqrt(4) + biases[length - 1 + j - i] for j in seen])
            torch.testing.assert_close(actual[b, i], scores.softmax(dim=0) @ value[b, seen], rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "rows"), CASES)
def test_outputs_and_gradients_are_those_of_all_pairs(length, rows, is_causal, masked):
    arguments, options = inputs(length), {"is_causal": is_causal, "mask": masks(length) if masked else None}
    expected = toeplitz_attention_reference(*arguments, **options)
    assert_same(toeplitz_attention(*arguments, **options, rows=rows), expected, arguments, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_inputs_of_any_layout(is_causal):
    """Views that are not contiguous or begin within their storage, and a gradient that is one number everywhere."""
    leaves = query, key, value, biases = inputs(23)
    arguments = query.mT.contiguous().mT[:, 4:], key.flip(1)[:, 4:], value[:, 4:, ::2], biases[3:40]
    actual = toeplitz_attention(*arguments, is_causal=is_causal, rows=5)
    expected = toeplitz_attention_reference(*arguments, is_causal=is_causal)
    assert_same(actual.sum(), expected.sum(), leaves, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_single_precision(scale, is_causal):
    """Scores of about ±2000 too, the exponential of which would overflow."""
    arguments = inputs(101, dtype=torch.float32, scale=scale)
    mask = masks(101)
    double = [x.detach().double().requires_grad_() for x in arguments]
    expected = toeplitz_attention_reference(*double, is_causal=is_causal, mask=mask)
    actual = toeplitz_attention(*arguments, is_causal=is_causal, mask=mask, rows=16)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5 * scale**2)
    weight = torch.randn_like(expected)
    of_double = torch.autograd.grad(expected, double, weight)
    for of_actual, of_expected in zip(torch.autograd.grad(actual, arguments, weight.float()), of_double, strict=True):
        torch.testing.assert_close(of_actual.double(), of_expected, rtol=0, atol=1e-5 * scale**3)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_computed_in_float32(autocast):
    arguments = inputs(23, dtype=torch.float32 if autocast else torch.bfloat16)
    options = {"is_causal": True, "mask": masks(23)}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = toeplitz_attention(*arguments, **options, rows=5)
        grads = torch.autograd.grad(actual.sum(), arguments)
    assert actual.dtype == torch.float32
    expected = toeplitz_attention_reference(*(x.float() for x in arguments), **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    of_expected = torch.autograd.grad(expected.sum(), arguments)
    torch.testing.assert_close(grads, of_expected, rtol=0.01, atol=1e-5)


def test_padding_is_not_seen_whatever_it_holds():
    query, key, value, biases = (x.detach() for x in inputs(23))
    mask = torch.arange(23) < torch.tensor([[23], [11], [2]])
    noise = torch.where(mask[..., None], key, 1e3 * torch.randn_like(key))
    first, second = (toeplitz_attention(query, k, value, biases, is_causal=False, mask=mask) for k in (key, noise))
    torch.testing.assert_close(first[mask], second[mask], rtol=0, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_is_linear(is_causal):
    """All pairs of 1500 tokens would be 9 MB each time."""
    arguments = inputs(1500, batch=1, dtype=torch.float32)

    def job():
        toeplitz_attention(*arguments, is_causal=is_causal, rows=16).sum().backward()

    assert peak_memory(job, torch.device("cpu")) < 1e6


def test_gradients_of_gradients_are_refused():
    arguments = inputs(5)
    loss = toeplitz_attention(*arguments, is_causal=False).square().sum()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(loss, arguments[0], create_graph=True)


def test_a_bias_for_each_distance():
    query, key, value, biases = inputs(5)
    with pytest.raises(ValueError, match=r"biases must have the shape \(9,\), got \(8,\)"):
        toeplitz_attention(query, key, value, biases[1:], is_causal=False)
