"""LaS as an attention implementation of transformers, for every model on its attention interface.

    import longlens.integrations.huggingface
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="las")  # las-chunk, l-attention, s-attention

Its settings are those of ``LaSAttention``, in the model's config (``config.las = {"max_rate": 1e-3}``), with which they
are saved and loaded; ``configure`` changes them. Models keep their masks: padding, sliding windows, packed sequences.
Cross-attention stays plain, as two sequences have no distance. Numbers that a model adds to its scores (T5's biases)
are added after the decay. What LaS does not define (soft caps, sinks, sparse indices) is refused.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.utils.output_capturing import _active_collector

from longlens.errors import BadInput
from longlens.integrations.masked import NEEDS_ALL_KEYS, Seen, attend, read_mask, split_mask, with_units
from longlens.integrations.settings import Settings, choose_settings, takes

NAMES = ("las", "las-chunk", "l-attention", "s-attention")
PLAIN = (causal_mask_function, bidirectional_mask_function)
UNFLAGGED = {  # they do not promise transformers that their attention can be replaced, and were found to let it be
    f"{name}PreTrainedModel"
    for name in "Align MarkupLM PatchTSMixer Speech2Text Splinter SwitchTransformers TimeSeriesTransformer".split()
}
KEYS = frozenset({"key_value_states", "encoder_hidden_states", "key", "value", "context"})  # of another sequence
UNDEFINED = {  # what some models pass, and LaS does not define
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "head_mask": "masks heads",
    "indices": "chooses keys by an index",
    "block_indices": "chooses blocks of keys by an index",
    "cache": "has a paged cache",
}


def configure(model: PreTrainedModel, attn_implementation: str | None = None, **settings: Any) -> PreTrainedModel:
    """Choose LaS attention for a model, or change its settings, and return the model.

    Args:
        model: A model on transformers' attention interface.
        attn_implementation: las, las-chunk, l-attention or s-attention; by default what the model has, or else las.
        settings: ``max_rate``, ``window``, ``side``, ``chunk_size``, ``schedule``, as in ``LaSAttention``; what is not
            given stays as it is.
    """
    current = model.config._attn_implementation
    name = attn_implementation or (current if current in NAMES else NAMES[0])
    if name not in NAMES:
        raise BadInput(f"attn_implementation must be one of {', '.join(NAMES)}, got {name}")
    chosen = choose_settings(name, _given(model.config, name) | settings, f"attention {name!r}")
    _refuse_own_attention(model, name)
    for config in _configs(model):
        _write(config, name, chosen)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise BadInput(
            f"{type(model).__name__} does not let its attention be changed: give attn_implementation={name!r} "
            "when it is made"
        )
    return model


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model and of the models in it, of which some are copies."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


def _given(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """What a config says about LaS, as far as a variant takes it."""
    given = getattr(config, "las", None) or {}
    if not isinstance(given, dict):
        raise BadInput(f"config.las must be a dict of settings, as {{'max_rate': 1e-3, 'window': 5}}, got {given!r}")
    if given.get("attention", given.get("before", name)) != name:  # for another variant, whose chunks are not meant
        return {option: given[option] for option in takes(name) - {"chunk_size"} if option in given}
    return {option: value for option, value in given.items() if option not in ("attention", "before")}


def _write(config: PreTrainedConfig, name: str, settings: Settings) -> None:
    config.las = {"attention": name, **settings._asdict()}
    for option in set(settings._fields) - takes(name):
        del config.las[option]
    for part in config.sub_configs:  # of CLIP, for one, whose attention is all in these
        inner = getattr(config, part, None)
        if isinstance(inner, PreTrainedConfig) and getattr(inner, "las", None) is None:
            inner.las = dict(config.las)
    config.attn_implementation = name  # transformers saves no implementation; it reads one, and refuses what is unknown


def _settings(config: PreTrainedConfig, name: str) -> Settings:
    given = _given(config, name)
    try:
        return _checked(name, *given.items())
    except TypeError:  # a list in the place of a number
        return choose_settings(name, given, f"attention {name!r}")


@lru_cache(maxsize=64)
def _checked(name: str, *given: tuple[str, Any]) -> Settings:
    """Once, not in each layer and step."""
    return choose_settings(name, dict(given), f"attention {name!r}")


def _refuse_own_attention(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that would take the name and ignore it. One that is made of other models leaves it to them."""
    made_of_others = bool(model.config.sub_configs) and model._can_set_attn_implementation()
    if not (made_of_others or _uses_interface(type(model))):
        raise BadInput(
            f"{type(model).__name__} computes its attention itself, not through transformers' attention interface, and "
            f"cannot take attn_implementation={name!r}: choose another model (Llama, Qwen3, GPT-2, BERT, ViT, …)"
        )
    promised = model._supports_sdpa or model._supports_attention_backend
    if not promised and _uses_interface(type(model)) and UNFLAGGED.isdisjoint(b.__name__ for b in type(model).__mro__):
        raise BadInput(
            f"{type(model).__name__} does not promise that all of its attention can be replaced (_supports_sdpa and "
            f"_supports_attention_backend are False), and cannot take attn_implementation={name!r}: some of its layers "
            "could ignore it, or see later tokens; choose another model (Llama, Qwen3, GPT-2, BERT, ViT, …)"
        )


@cache
def _uses_interface(model: type[PreTrainedModel]) -> bool:
    """Whether the file of a class, or of one that it derives from, looks an attention function up."""
    for base in model.__mro__:
        if issubclass(base, PreTrainedModel) and base.__module__ != PreTrainedModel.__module__:
            with suppress(OSError, TypeError):  # a class of a notebook has no file
                if "ALL_ATTENTION_FUNCTIONS.get_interface(" in inspect.getsource(sys.modules[base.__module__]):
                    return True
    return False


def _follow(choose: Callable[..., str]) -> Callable[..., str]:
    """Around the method with which every model chooses its implementation: models without the interface would take a
    registered name and ignore it, and what was saved would be plain attention when it is loaded."""

    @wraps(choose)
    def chosen(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        saved = getattr(self.config, "las", None)
        if requested_attention is None and isinstance(saved, dict):
            requested_attention = saved.get("attention")
        if requested_attention in NAMES:
            _refuse_own_attention(self, requested_attention)
            _write(self.config, requested_attention, _settings(self.config, requested_attention))
        elif isinstance(saved, dict):
            if "attention" in saved:
                saved["before"] = saved.pop("attention")  # what its settings were for, if LaS is chosen again
            self.config.__dict__.pop("attn_implementation", None)
        return choose(self, requested_attention, *args, **kwargs)

    return chosen


def las_mask(*, config: PreTrainedConfig, mask_function: Callable[..., Any], **given: Any) -> Tensor | None:
    """The mask (B or 1, 1, Lq, Lk) of any model, True where a query may see a key; None for causality alone, once a
    layer has said that it is causal: some leave that to the mask."""
    settings = _settings(config, str(config._attn_implementation))
    queries, offset, local = given["q_length"], given.get("q_offset", 0), given.get("local_size")
    hides_more = mask_function not in PLAIN and (local is None or int(offset) + queries > local)
    cached = isinstance(offset, Tensor) or offset > 0
    if hides_more and cached and (settings.smooths or settings.chunk_size):  # the hidden would be taken for padding
        raise BadInput(NEEDS_ALL_KEYS)
    may_skip = given.get("allow_is_causal_skip", True) and not torch.compiler.is_compiling()
    if may_skip and mask_function is causal_mask_function and queries == given["kv_length"]:
        padding = given.get("attention_mask")
        if padding is None or bool(padding.all()):
            if config in _CAUSAL:
                return None
            given |= {"batch_size": 1, "attention_mask": None}  # one for all rows
    given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(mask_function=mask_function, **given)


def _attention(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that transformers calls for an implementation."""

    def attention(
        module: nn.Module,
        query: Tensor,  # (B, H, Lq, d)
        key: Tensor,  # (B, H or fewer, Lk, d)
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # (B, Lq, H, d), and the weights (B, H, Lq, Lk) if they are wanted
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal:
            _CAUSAL[module.config] = True
        _refuse_undefined(module, name, query, key, attention_mask, kwargs)
        # Some models pass the wish on, others leave it to the hooks that collect what is wanted.
        wanted = bool(kwargs.get("output_attentions")) or "attentions" in (_active_collector.get() or ())
        if _is_cross(module, causal):
            return _attend_across(module, query, key, value, attention_mask, dropout, scaling, position_bias, wanted)
        if not causal and query.shape[-2] != key.shape[-2]:
            raise BadInput(
                f"{type(module).__name__} has {query.shape[-2]} queries and {key.shape[-2]} keys without being causal: "
                f"{name!r} cannot tell their distance"
            )
        seen, bias = Seen(causal, key.shape[-2]), position_bias
        if attention_mask is not None:
            seen, more = _read(attention_mask, query.shape[-2], causal)
            bias = more if bias is None else bias if more is None else bias + more
        options = {"bias": bias, "scale": scaling, "dropout_p": dropout, "need_weights": wanted}
        output, weights = attend(query, key, value, seen, _settings(cast(Any, module).config, name), **options)
        return output.transpose(1, 2).contiguous(), weights

    return attention


def _refuse_undefined(
    module: nn.Module, name: str, query: Tensor, key: Tensor, mask: Tensor | None, given: dict[str, Any]
) -> None:
    model, instead = type(module).__name__, "choose eager or sdpa for this model"
    for argument, deed in UNDEFINED.items():
        if given.get(argument) is not None:
            raise BadInput(f"{model} {deed}, which {name!r} does not define: {instead}")
    here, heads = query.shape[1], getattr(module.config, "num_attention_heads", None)
    if isinstance(heads, int) and here < heads and torch.distributed.is_initialized():
        raise BadInput(
            f"{model} has {here} of {heads} heads in this process, and {name!r} cannot tell which: {instead}"
        )
    if mask is not None and (mask.ndim != 4 or mask.shape[-1] != key.shape[-2]):
        wanted = f"(batch, heads or 1, queries, keys = {key.shape[-2]})"
        raise BadInput(f"the mask of {model} must be {wanted}, got {tuple(mask.shape)}")
    window = given.get("sliding_window")
    if mask is None and (given.get("cu_seq_lens_q") is not None or (window is not None and window < key.shape[-2])):
        raise BadInput(
            f"{model} has a window or several sequences in a row, and gives {name!r} no mask of it: {instead}"
        )


def _is_cross(module: nn.Module, causal: bool) -> bool:
    """Whether queries and keys are of two sequences, which no argument tells."""
    if "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False):
        return True
    if causal:
        return False
    if not hasattr(module, "is_decoder") and _takes_keys(type(module)):
        raise BadInput(
            f"{type(module).__name__} may attend to another sequence, and does not say when: choose eager or sdpa"
        )
    return bool(getattr(module, "is_decoder", False))


@cache
def _takes_keys(layer: type[nn.Module]) -> bool:
    """Whether a layer can be given keys of another sequence."""
    return not KEYS.isdisjoint(inspect.signature(layer.forward).parameters)


def _attend_across(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    bias: Tensor | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Plain attention, by transformers itself."""
    width = value.shape[-1]
    value = with_units(value) if need_weights else value
    options = {"dropout": dropout, "scaling": scaling, "is_causal": False, "position_bias": bias}
    output, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    return (output[..., :width], output[..., width:].transpose(1, 2)) if need_weights else (output, None)


def _read(mask: Tensor, queries: int, causal: bool) -> tuple[Seen, Tensor | None]:
    """What a mask means, read once for all layers, and the numbers that it adds to the scores."""
    allowed, bias = split_mask(mask)
    if allowed is not mask or mask.is_inference():  # its versions are not counted
        return read_mask(allowed, queries, causal=causal), bias
    key = (mask._version, queries, causal)
    known = _READ.get(mask)
    if known is None or known[0] != key:
        seen = read_mask(mask, queries, causal=causal)
        known = _READ[mask] = (key, seen._replace(mask=None) if seen.dense else seen)  # it must not keep itself alive
    seen = known[1]
    return (seen._replace(mask=mask.expand(-1, -1, queries, -1)[..., : seen.keys]) if seen.dense else seen), None


_READ = WeakIdKeyDictionary()
_CAUSAL = WeakIdKeyDictionary()  # the configs of layers that say so

for _name in NAMES:
    AttentionInterface.register(_name, torch.compiler.disable(_attention(_name)))  # it looks at the values of masks
    AttentionMaskInterface.register(_name, las_mask)
PreTrainedModel.get_correct_attn_implementation = _follow(PreTrainedModel.get_correct_attn_implementation)
