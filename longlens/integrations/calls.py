"""LaS in modules that call ``scaled_dot_product_attention`` themselves, as those of nanoGPT and of timm do.

Within the forward pass of such a module, each call of that function is answered by LaS. The module stays itself, with
its weights; what it hands to the function says what is seen.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longlens.errors import BadInput
from longlens.integrations.masked import Seen, attend, read_mask, split_mask
from longlens.integrations.settings import Settings

NAME = "scaled_dot_product_attention"


def calls_attention(module: nn.Module) -> bool:
    """Whether a method of its class, unless it is one of torch, names the function."""
    classes = [base for base in type(module).__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [inspect.unwrap(value) for base in classes for value in vars(base).values() if callable(value)]
    return any(NAME in method.__code__.co_names for method in methods if inspect.isfunction(method))


class LaSForward:
    """The forward pass of a module in which attention is LaS; it takes the place of ``module.forward``."""

    def __init__(self, module: nn.Module, settings: Settings):
        before: Callable[..., Any] | None = vars(module).get("forward")
        self.module, self.settings = module, settings
        self.inner = before.inner if isinstance(before, LaSForward) else before  # a forward of this one module

    @torch.compiler.disable  # which would trace what is called, not what answers
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = _Calls(self.settings)
        with calls:
            inner = self.inner or type(self.module).forward.__get__(self.module)
            output = inner(*args, **kwargs)
        if not calls.answered:
            raise BadInput(
                f"{type(self.module).__name__} has computed its attention without {NAME}, which LaS would have "
                "answered: choose its fused attention (in timm, fused_attn = True), or name it in skip"
            )
        return output


class _Calls(TorchFunctionMode):
    def __init__(self, settings: Settings):
        super().__init__()
        self.settings, self.answered = settings, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.answered = True
        return _answer(self.settings, *args, **(kwargs or {}))


def _answer(
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As ``F.scaled_dot_product_attention``, of queries (B, H, L, d) and keys of the same sequence."""
    if query.ndim != 4:
        raise BadInput(f"queries must be (batch, heads, length, width) for LaS, got the shape {tuple(query.shape)}")
    if query.shape[-2] != key.shape[-2]:
        raise BadInput(
            f"queries and keys must be of one sequence for LaS, got {query.shape[-2]} and {key.shape[-2]}: between two "
            "there is no distance; name this layer in replace_attention(…, skip=[…]), or call las_attention to decode"
        )
    if is_causal and attn_mask is not None:
        raise BadInput("attn_mask must be None if is_causal is True: put what is later into the mask")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise BadInput(f"keys must have the {query.shape[1]} heads of the queries, or enable_gqa, got {key.shape[1]}")
    seen, bias = Seen(is_causal, key.shape[-2]), None
    if attn_mask is not None:
        allowed, bias = split_mask(attn_mask.reshape(*[1] * (4 - attn_mask.ndim), *attn_mask.shape))
        seen = read_mask(allowed.expand(-1, -1, -1, key.shape[-2]), query.shape[-2], causal=False)
    return attend(query, key, value, seen, settings, bias=bias, scale=scale, dropout_p=dropout_p)[0]
