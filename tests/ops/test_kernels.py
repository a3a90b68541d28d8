"""The kernels that return a log-sum-exp: each device's against plain mathematics."""

import pytest
import torch

from longlens.ops import kernels
from longlens.ops.decay import join_masks, pad_heads

MASK = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.6
MASK[:, :, 3] = False


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_width", [5, 9])
def test_flash_kernel_equals_mathematics(mask, causal, value_width):
    query, key = torch.randn(2, 2, 3, 7, 5, dtype=torch.float64)
    value, grad = torch.randn(2, 2, 3, 7, value_width, dtype=torch.float64)
    joined, causal_flag = join_masks(query, key, mask, causal)
    expected = kernels._math_forward(query, key, value, joined, causal_flag)
    actual = kernels.attention_forward(query, key, value, mask, causal)
    torch.testing.assert_close(actual, expected)
    output, lse = expected
    lse = lse.nan_to_num(neginf=torch.inf) + 0.5  # of a longer row: the piece has only a part of the weight
    args = (grad, query, key, value, output * 0.7, lse)
    expected = kernels._math_backward(*args, joined, causal_flag)
    torch.testing.assert_close(kernels.attention_backward(*args, mask, causal), expected)


def test_mathematics_equals_autograd():
    query, key, value = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = (query @ key.mT).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    expected = scores.softmax(-1) @ value
    output, lse = kernels._math_forward(query, key, value, None, True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    grad = torch.randn_like(expected)
    grads = kernels._math_backward(grad, query, key, value, output, lse, None, True)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (query, key, value), grad))


def test_padded_heads_change_nothing():
    query, key, value = torch.randn(3, 1, 2, 6, 5, dtype=torch.float64)
    padded = pad_heads(query, key, value)
    assert [x.shape[-1] for x in padded] == [16, 16, 16]
    torch.testing.assert_close(padded[0] @ padded[1].mT, query @ key.mT)
    wide = torch.randn(1, 2, 6, 32)
    assert all(x is wide for x in pad_heads(wide, wide, wide))


@pytest.mark.parametrize("mask", [None, MASK.to("meta")])
@pytest.mark.parametrize("causal", [True, False])
def test_the_gpu_kernel_is_called_as_torch_declares_it(mask, causal, monkeypatch):
    """Shapes only, on the meta device: there is no GPU here. The mathematics of the joining is the same as on CPU."""
    monkeypatch.setattr(kernels, "_choose", lambda query: "efficient")
    query, key, value, grad = (torch.empty(2, 3, 7, 5, device="meta") for _ in range(4))
    output, lse = kernels.attention_forward(query, key, value, mask, causal)
    assert output.shape == value.shape
    assert lse.shape == query.shape[:-1]
    grads = kernels.attention_backward(grad, query, key, value, output, lse, mask, causal)
    assert [g.shape for g in grads] == [query.shape, key.shape, value.shape]
