"""ALiBi against x-transformers' biases and torch's attention with them as a mask."""

import pytest
import torch
import torch.nn.functional as F

from longlens.ops.alibi import alibi_attention, alibi_slopes


def oracle(heads):
    package = pytest.importorskip(
        "x_transformers.x_transformers", reason="the oracle 'x-transformers' is not installed"
    )
    return package.AlibiPositionalBias(heads)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_slopes(heads):
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), oracle(heads).slopes.flatten(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("heads", [8, 12])
def test_attention_with_its_biases_as_a_mask(heads):
    bias = oracle(heads)(101, 101).masked_fill(torch.ones(101, 101, dtype=torch.bool).triu(1), -torch.inf)
    inputs = [torch.randn(2, heads, 101, 8, requires_grad=True) for _ in range(3)]
    actual = alibi_attention(*inputs, alibi_slopes(heads))
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, inputs, grad) for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=5e-6)
