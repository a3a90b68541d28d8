"""Local attention against the package local-attention."""

import pytest
import torch

from longlens.mixers.local import local_attention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("neighbors", [0, 1, 2])
@pytest.mark.parametrize("length", [96, 101])
def test_blocks_with_their_neighbors(length, neighbors, is_causal):
    package = pytest.importorskip("local_attention", reason="the oracle 'local-attention' is not installed")
    oracle = package.LocalAttention(
        window_size=16,
        causal=is_causal,
        look_backward=neighbors,
        look_forward=0 if is_causal else neighbors,
        use_rotary_pos_emb=False,
        autopad=True,
    )
    inputs = [torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    # Without a mask the package attends to the zeros that it adds at the end.
    expected = oracle(*inputs, mask=torch.ones(2, length, dtype=torch.bool))
    actual = local_attention(*inputs, 16, neighbors=neighbors, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, inputs, grad) for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("neighbors", [0, 1])
def test_padding(neighbors):
    package = pytest.importorskip("local_attention", reason="the oracle 'local-attention' is not installed")
    oracle = package.LocalAttention(
        window_size=8, look_backward=neighbors, look_forward=neighbors, use_rotary_pos_emb=False, autopad=True
    )
    mask = torch.arange(31) < torch.tensor([[31], [13]])
    query, key, value = torch.randn(3, 2, 4, 31, 8, dtype=torch.float64)
    expected = oracle(query, key, value, mask=mask)
    actual = local_attention(query, key, value, 8, neighbors=neighbors, mask=mask)
    tokens = mask[:, None, :, None]
    torch.testing.assert_close(actual * tokens, expected * tokens, rtol=0, atol=1e-12)
