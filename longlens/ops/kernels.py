"""Attention that also returns its log-sum-exp, which joining pieces of a row needs, on the fastest kernel of a device.

The backward functions take the output and the log-sum-exp as arguments: given those of a *joined* row, they return the
gradients of a piece within it. Masks are boolean, True = attend, and may broadcast. ``causal`` means j <= i for a
square piece. Scores are not scaled.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import at_least_float32
from longlens.ops.decay import join_masks, pack_rows, pad_heads

aten = torch.ops.aten


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Lq, dv) and the log-sum-exp (B, H, Lq) of the scores; a row without keys gives 0 and -inf."""
    kernel = _choose(query)
    mask, causal = join_masks(query, key, mask, causal)
    if kernel == "math":
        return _math_forward(query, key, value, mask, causal)

    width = value.shape[-1]
    query, key, value = pad_heads(query, key, value)
    bias = _bias(query, key, mask)
    if kernel == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=1.0
        )
    else:
        output, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=1.0
        )
        lse = lse[..., : query.shape[-2]]
    if mask is not None:  # the kernels report 0 for a row without keys
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return output[..., :width], lse


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients to query, key and value, where ``out`` and ``lse`` are those of the whole row."""
    kernel = _choose(query)
    mask, causal = join_masks(query, key, mask, causal)
    if kernel == "math":
        return _math_backward(grad, query, key, value, out, lse, mask, causal)

    query_width, value_width = query.shape[-1], value.shape[-1]
    query, key, value = pad_heads(query, key, value)
    grad, out = (pack_rows(F.pad(x, (0, value.shape[-1] - value_width))) for x in (grad, out))
    bias = _bias(query, key, mask)
    if kernel == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse.contiguous(), 0.0, causal, attn_mask=bias, scale=1.0
        )
    else:
        lse = F.pad(lse, (0, -lse.shape[-1] % 32))  # the kernel's own alignment
        seed = offset = torch.zeros((), dtype=torch.long, device=query.device)  # of a dropout that is 0
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, bias, out, lse, seed, offset, 0.0, [True] * 3 + [False], causal, scale=1.0
        )
    return grads[0][..., :query_width], grads[1][..., :query_width], grads[2][..., :value_width]


def _choose(query: Tensor) -> str:
    if query.numel() == 0:
        return "math"  # the kernels divide by the number of rows
    fast = query.device.type == "cuda" and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return "cpu" if query.device.type == "cpu" else "efficient" if fast else "math"


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The additive form of a mask, 0 or -inf, in the full shape that the kernels expect."""
    if mask is None:
        return None
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    bias = bias.expand(*bias.shape[:2], query.shape[-2], key.shape[-2])
    if bias.device.type != "cpu":  # GPU kernels read rows at aligned addresses
        bias = F.pad(bias, (0, -key.shape[-2] % 16))[..., : key.shape[-2]]
    return bias.expand(*query.shape[:-1], key.shape[-2])


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    scores = query @ key.mT
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    dtype = query.dtype
    query, key, value = (at_least_float32(x) for x in (query, key, value))
    scores = _scores(query, key, mask, causal)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return (weights @ value).to(dtype), lse


def _math_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad, query, key, value, out = (at_least_float32(x) for x in (grad, query, key, value, out))
    weights = torch.exp(_scores(query, key, mask, causal) - lse.unsqueeze(-1))
    grad_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    return (grad_scores @ key).to(dtype), (grad_scores.mT @ query).to(dtype), (weights.mT @ grad).to(dtype)
