"""Attention between chosen blocks: against all pairs of tokens, and against a mask made token by token."""

import pytest
import torch
import torch.nn.functional as F

from longlens.ops.block_sparse import block_sparse_attention, block_sparse_attention_reference

HEADS, SIZE = 3, 5


def vectors(length):
    return tuple(torch.randn(2, HEADS, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))


def random_pattern(length, heads=HEADS, others=4):
    """Each block itself and a few others, of which some are beyond the sequence and some are none."""
    blocks = -(-length // SIZE)
    rows = []
    for _ in range(heads):
        for i in range(blocks):
            other = [j for j in torch.randperm(blocks + 2).tolist() if j != i] + [-1] * others
            rows.append([*other[:2], i, -1, *other[2:others]])
    return torch.tensor(rows).view(heads, blocks, -1)


def mask_token_by_token(length, pattern, global_blocks=0, is_causal=False):
    seen = torch.zeros(HEADS, length, length, dtype=torch.bool)
    for h in range(HEADS):
        for i in range(length):
            named = pattern[h % len(pattern), i // SIZE].tolist()
            for j in range(length):
                near = j // SIZE in named or i // SIZE < global_blocks
                seen[h, i, j] = near and not (is_causal and j > i)
    return seen


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("global_blocks", [0, 2, 9])
def test_a_mask_token_by_token(global_blocks, is_causal):
    query, key, value = vectors(23)
    pattern = random_pattern(23)
    seen = mask_token_by_token(23, pattern, global_blocks, is_causal)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    for attention in (block_sparse_attention, block_sparse_attention_reference):
        actual = attention(
            query, key, value, pattern, block_size=SIZE, global_blocks=global_blocks, is_causal=is_causal
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("global_blocks", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 5, 23, 61])
def test_outputs_and_gradients_are_those_of_all_pairs(length, global_blocks, is_causal, masked, heads):
    inputs, pattern, mask = vectors(length), random_pattern(length, heads), None
    weight = torch.randn(2, HEADS, length, 4, dtype=torch.float64)
    if masked:
        mask = torch.rand(2, length) < 0.7
        mask[0] = torch.arange(length) < (length + 1) // 2
        weight *= mask[:, None, :, None]
    results = []
    for attention in (block_sparse_attention, block_sparse_attention_reference):
        options = {"block_size": SIZE, "global_blocks": global_blocks, "is_causal": is_causal, "mask": mask}
        y = attention(*inputs, pattern, **options)
        assert y.isfinite().all()
        y = y * (weight != 0)
        results.append((y, *torch.autograd.grad((y * weight).sum(), inputs)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_pattern_of_all_blocks_is_plain_attention(is_causal):
    query, key, value = vectors(38)
    pattern = torch.stack([torch.randperm(8) for _ in range(8)])[None]
    actual = block_sparse_attention(query, key, value, pattern, block_size=SIZE, is_causal=is_causal)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sample_of_padding_alone_has_finite_outputs_and_gradients(is_causal):
    inputs, mask = vectors(23), torch.ones(2, 23, dtype=torch.bool)
    mask[1] = False
    for attention in (block_sparse_attention, block_sparse_attention_reference):
        y = attention(*inputs, random_pattern(23), block_size=SIZE, global_blocks=1, is_causal=is_causal, mask=mask)
        assert y.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.square().sum(), inputs))


def test_dropout():
    query, key, value = vectors(23)
    pattern = random_pattern(23)
    options = {"block_size": SIZE, "global_blocks": 1}
    assert not block_sparse_attention(query, key, value, pattern, dropout_p=1.0, **options).any()
    many = [block_sparse_attention(query, key, value, pattern, dropout_p=0.05, **options) for _ in range(100)]
    expected = block_sparse_attention(query, key, value, pattern, **options)
    torch.testing.assert_close(torch.stack(many).mean(dim=0), expected, rtol=0, atol=0.2)


@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 4, 3), (5, 3)])
def test_a_pattern_that_does_not_fit(shape):
    query, key, value = vectors(23)
    with pytest.raises(ValueError, match=r"pattern must have the shape \(1 or 3 heads, at least 5 blocks, .* got \("):
        block_sparse_attention(query, key, value, torch.zeros(shape, dtype=torch.int64), block_size=SIZE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("global_blocks", [0, 1])
@pytest.mark.parametrize("shape", [(2, HEADS, 0, 4), (0, HEADS, 12, 4)], ids=str)
def test_nothing(shape, global_blocks, is_causal):
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    options = {"block_size": SIZE, "global_blocks": global_blocks, "is_causal": is_causal}
    y = block_sparse_attention(query, key, value, random_pattern(12), **options)
    assert y.shape == shape
    y.sum().backward()
    assert value.grad is not None
