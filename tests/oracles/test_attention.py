"""LaS attention against packages that know nothing of it."""

import pytest
import torch

from longlens import decay_rates, las_attention, smooth_values


@pytest.mark.parametrize("is_causal", [True, False])
def test_flex_attention(is_causal):
    """FlexAttention, whose score_mod is the formula itself (no backward on CPU)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    query, key, value = torch.randn(3, 2, 4, 200, 32)
    rates = decay_rates(4, 0.05)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 200, 200, device="cpu") if is_causal else None

    def decay(score, b, h, i, j):
        return score * torch.exp(-rates[h] * (i - j).abs())

    expected = torch.compile(flex_attention)(query, key, smooth_values(value, 5), score_mod=decay, block_mask=mask)
    actual = las_attention(query, key, value, decay=rates, smoothing=5, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("length", [128, 96])
def test_chunks_against_local_attention(length):
    """The package's blocks without a look backward are the blocks of LaS-chunk."""
    local_attention = pytest.importorskip("local_attention", reason="the oracle 'local-attention' is not installed")
    oracle = local_attention.LocalAttention(
        dim=16, window_size=32, causal=True, look_backward=0, look_forward=0, use_rotary_pos_emb=False, autopad=True
    )
    query, key, value = (torch.randn(2, 4, length, 16, requires_grad=True) for _ in range(3))
    expected, actual = oracle(query, key, value), las_attention(query, key, value, chunk_size=32)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (query, key, value), grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=2e-6)
