"""Attention that also returns its log-sum-exp, forward and backward, on the fastest kernel of the device.

``scaled_dot_product_attention`` keeps the log-sum-exp to itself, and joining pieces of a row needs it. The backward
functions take the output and the log-sum-exp as arguments on purpose: given those of a *joined* row, they return the
gradients of a piece within it.

Masks are boolean, True = attend, and may broadcast. ``causal`` means j <= i for a square piece.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.precision import at_least_float32

aten = torch.ops.aten


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Lq, dv) and the log-sum-exp (B, H, Lq) of the scores; a row without keys gives 0 and -inf."""
    kernel = _choose(query)
    mask, causal = _join_masks(query, key, mask, causal)
    if kernel == "math":
        return _math_forward(query, key, value, mask, causal, scale)

    width = value.shape[-1]
    query, key, value = pad_heads(query, key, value)
    bias = _bias(query, key, mask)
    if kernel == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        output, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=scale
        )
        lse = lse[..., : query.shape[-2]]
    if mask is not None:  # the kernels report 0 for a row without keys
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return output[..., :width], lse


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients to query, key and value, where ``output`` and ``lse`` are those of the whole row."""
    kernel = _choose(query)
    mask, causal = _join_masks(query, key, mask, causal)
    if kernel == "math":
        return _math_backward(grad, query, key, value, output, lse, mask, causal, scale)

    query_width, value_width = query.shape[-1], value.shape[-1]
    query, key, value = pad_heads(query, key, value)
    grad, output = (F.pad(x, (0, value.shape[-1] - value_width)) for x in (grad, output))
    bias = _bias(query, key, mask)
    if kernel == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse.contiguous(), 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        lse = F.pad(lse, (0, -lse.shape[-1] % 32))  # the kernel's own alignment
        seed = offset = torch.zeros((), dtype=torch.long, device=query.device)  # of a dropout that is 0
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, bias, output, lse, seed, offset, 0.0, [True] * 3 + [False], causal, scale=scale
        )
    return grads[0][..., :query_width], grads[1][..., :query_width], grads[2][..., :value_width]


def pad_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns up to a head width that the kernels run fast: they change no score and no value.

    The kernels want one width for all three. On CPU anything from 16 on is as good; on GPUs, multiples of 8.
    """
    width = max(query.shape[-1], value.shape[-1], 16)
    if query.device.type != "cpu":
        width += -width % 8
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))  # pyright: ignore[reportReturnType]


def _choose(query: Tensor) -> str:
    if query.numel() == 0:
        return "math"  # the kernels divide by the number of rows
    if query.device.type == "cpu":
        return "cpu"
    if query.device.type == "cuda" and query.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return "efficient"
    return "math"


def _join_masks(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """The kernels take a mask or the causal flag, not both."""
    if mask is None or not causal:
        return mask, causal
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return mask & triangle, False


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The additive form of a mask, 0 or -inf, in the full shape that the kernels expect."""
    if mask is None:
        return None
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    bias = bias.expand(*bias.shape[:2], query.shape[-2], key.shape[-2])
    if bias.device.type != "cpu":  # GPU kernels read rows at aligned addresses
        bias = F.pad(bias, (0, -key.shape[-2] % 16))[..., : key.shape[-2]]
    return bias.expand(*query.shape[:-1], key.shape[-2])


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = query.dtype
    query, key, value = (at_least_float32(x) for x in (query, key, value))
    scores = _scores(query, key, mask, causal, scale)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return (weights @ value).to(dtype), lse


def _math_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad, query, key, value, output = (at_least_float32(x) for x in (grad, query, key, value, output))
    weights = torch.exp(_scores(query, key, mask, causal, scale) - lse.unsqueeze(-1))
    grad_weights = grad @ value.mT - (grad * output).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * scale
    return (grad_scores @ key).to(dtype), (grad_scores.mT @ query).to(dtype), (weights.mT @ grad).to(dtype)
