"""LaS in models of plain PyTorch: ``replace_attention`` turns their attention into LaS."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.integrations.calls import answer_calls, calls_attention, check_not_nested
from longlens.integrations.masked import Seen, attend, read_mask, read_padding, split_mask
from longlens.integrations.settings import Settings, choose_settings
from longlens.mixers.common import merge_heads, split_heads
from longlens.options import nearest


@dataclass(frozen=True)
class Replaced:
    """What ``replace_attention`` did: the names of the layers that are LaS now, and of those that are not, with why."""

    replaced: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        left = "".join(f"\nleft {name}: {reason}" for name, reason in self.left.items())
        return f"replaced {', '.join(self.replaced)}{left}"


def replace_attention(model: nn.Module, mixer: str = "las", *, skip: Collection[str] = (), **settings: Any) -> Replaced:
    """Turn the attention of a model into LaS, in place and with the weights that it has: its ``nn.MultiheadAttention``
    layers, and the modules that call ``scaled_dot_product_attention`` themselves.

    They are called as before, and their checkpoints are the same. A call with a causal mask is causal, one without a
    mask sees both sides; other masks and biases stay what they are. A call with keys of another sequence is refused
    where it can be told: name such layers in ``skip``.

    Args:
        model: Any module, as an ``nn.TransformerEncoder`` or a vision transformer.
        mixer: las, las-chunk, l-attention, s-attention or las-bidirectional.
        skip: Names of layers, or of modules that contain them, that stay as they are.
        settings: ``max_rate``, ``window``, ``side``, ``chunk_size``, ``schedule``, as in ``LaSAttention``.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    chosen = choose_settings(mixer, settings, f"mixer {mixer!r}")
    skip = [skip] if isinstance(skip, str) else skip
    modules = dict(model.named_modules())
    for name in skip:
        if name not in modules:
            raise BadInput(f"skip must have names of modules of the model, got {name}; {nearest(name, modules)}")
    layers = {name: module for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)}
    callers = {name: module for name, module in modules.items() if calls_attention(module)}
    found = callers | layers
    left = {name: reason for name, layer in found.items() if (reason := _why_not(layer, name, modules, skip))}
    if len(left) == len(found):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        hint = (
            "nn.MultiheadAttention, or modules that call scaled_dot_product_attention; models of transformers take "
            "attn_implementation='las' after import longlens.integrations.huggingface"
        )
        raise BadInput(f"model has no attention that can be replaced ({reasons or hint})")
    replaced = tuple(name or type(model).__name__ for name in modules if name in found and name not in left)
    for name in found.keys() - left.keys():  # a layer stays itself, with its weights, its hooks, and who refers to it
        if name in layers:
            layers[name].__class__ = LaSMultiheadAttention
            layers[name].__dict__["settings"] = chosen
        else:
            answer_calls(callers[name], chosen)
    for encoder in modules.values():  # nested tensors are for its own attention alone
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.use_nested_tensor &= not any(
                isinstance(layer, LaSMultiheadAttention) for layer in encoder.modules()
            )
    return Replaced(replaced, left)


def _why_not(layer: nn.Module, name: str, modules: dict[str, nn.Module], skip: Collection[str]) -> str | None:
    """Why a layer cannot be LaS, or should not be; None if it can."""
    if any(name == other or name.startswith(f"{other}.") for other in skip):
        return "it is to be skipped"
    if not isinstance(layer, nn.MultiheadAttention):
        if type(layer).__module__.startswith("transformers."):
            return "models of transformers take attn_implementation='las'"
        inside = any(other.startswith(f"{name}." if name else "") for other in skip)  # whose calls may be its own
        return "it contains what is to be skipped" if inside else None
    parent, _, own = name.rpartition(".")
    is_cross = own == "multihead_attn" and isinstance(modules[parent], nn.TransformerDecoderLayer)
    known = nn.MultiheadAttention, LaSMultiheadAttention
    reasons = {
        f"a {type(layer).__name__} is a class of its own": type(layer) not in known,
        "keys or values of another width are of another sequence": {layer.kdim, layer.vdim} != {layer.embed_dim},
        "it attends to another sequence": is_cross,
        "add_bias_kv adds a key that has no place": layer.bias_k is not None,
        "add_zero_attn adds a key that has no place": layer.add_zero_attn,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class LaSMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that attends by LaS: the same parameters, the same call, for self-attention."""

    settings: Settings

    @property
    def _qkv_same_embed_dim(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Asked by the layers of torch: with True, their fused kernel would compute plain attention."""
        return False

    def _reset_parameters(self) -> None:
        """As torch does it, which would ask the property above where the weights are."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings._asdict().items())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, L, D), (L, B, D) or (L, D) -> the same, and the weights (B, L, L) or (B, H, L, L), if they are wanted."""
        _check_self_attention(query, key, value, self.embed_dim)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projections = zip((query, key, value), self.in_proj_weight.chunk(3), biases, strict=True)
        batch_dim = 0 if self.batch_first else 1
        q, k, v = (F.linear(x, weight, bias) for x, weight, bias in projections)
        if query.ndim == 2:
            q, k, v = (x.unsqueeze(batch_dim) for x in (q, k, v))
        q, k, v = (split_heads(x.transpose(0, batch_dim), self.num_heads) for x in (q, k, v))  # (B, H, L, d)
        seen, bias = self._read_masks(q, key_padding_mask, attn_mask, is_causal)
        dropout_p = self.dropout if self.training else 0.0
        attended, weights = attend(
            q, k, v, seen, self.settings, bias=bias, dropout_p=dropout_p, need_weights=need_weights
        )
        output = self.out_proj(merge_heads(attended)).transpose(0, batch_dim)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if query.ndim == 2:
            return output.squeeze(batch_dim), None if weights is None else weights.squeeze(0)
        return output, weights

    def _read_masks(
        self, query: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> tuple[Seen, Tensor | None]:
        """What is seen, and what is added to the scores. In torch's masks, True hides."""
        batch, heads, length, _ = query.shape
        tokens, bias = None, None
        if padding is not None:
            shape, given = (batch, length), padding.reshape(-1, padding.shape[-1])
            if given.shape != shape:
                raise BadInput(f"key_padding_mask must be (batch, length) = {shape}, got {tuple(padding.shape)}")
            tokens, bias = split_mask(_where_true_is_allowed(given)[:, None, None, :])
        if mask is None:
            seen = Seen(is_causal, length) if tokens is None else read_padding(tokens, causal=is_causal)
            return seen, bias
        if mask.shape not in ((length, length), (batch * heads, length, length)):
            raise BadInput(
                f"attn_mask must be (length, length) = {(length, length)} or ({batch * heads}, length, length), "
                f"got {tuple(mask.shape)}"
            )
        mask = mask.reshape(-1, heads if mask.ndim == 3 else 1, length, length)
        allowed, more = split_mask(_where_true_is_allowed(mask))
        seen = read_mask(allowed if tokens is None else allowed & tokens, length, causal=is_causal)
        return seen, more if bias is None else bias if more is None else bias + more


def _where_true_is_allowed(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask


def _check_self_attention(query: Tensor, key: Tensor, value: Tensor, width: int) -> None:
    check_not_nested(query)
    if query.ndim not in (2, 3) or query.shape[-1] != width:
        raise BadInput(f"query must be (…, {width}) with two or three dimensions, got {tuple(query.shape)}")
    same = query is key or (query.shape == key.shape and torch.equal(query, key))
    if not same or value.shape != key.shape:
        raise BadInput(
            "key and value must be of the sequence of the queries: between two sequences LaS has no distance; name "
            "this layer in replace_attention(…, skip=[…]) to keep its plain attention"
        )
