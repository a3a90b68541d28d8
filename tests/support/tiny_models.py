"""Tiny random models of transformers in float64, and Eq. 4 as an attention implementation to compare with."""

import math

import torch
import transformers
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import longlens.integrations.huggingface  # noqa: F401 (registers)

V = 31
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 6}
GPT2 = {"vocab_size": V, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64, "pad_token_id": 0} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"vocab_size": V, "d_model": 24, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
BART = {"vocab_size": V, "d_model": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART |= {"decoder_start_token_id": 2, "max_position_embeddings": 64, "dropout": 0.0}
BART |= {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("layers", 2), ("ffn_dim", 20))}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
VIT = {name: SIZES[name] for name in list(SIZES)[:4]} | {"image_size": 12, "patch_size": 4}
MODERN = SIZES | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
MODELS = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "bert": ("BertModel", SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "modernbert": ("ModernBertModel", MODERN),
    "vit": ("ViTModel", VIT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5-encoder": ("T5EncoderModel", T5),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "gptj": ("GPTJForCausalLM", {"vocab_size": V, "n_embd": 24, "n_head": 4, "n_layer": 1, "rotary_dim": 2}),
    "bloom": ("BloomForCausalLM", {"vocab_size": V, "hidden_size": 24, "n_head": 4, "n_layer": 1}),
    "falcon": ("FalconForCausalLM", SIZES),
    "mpt": ("MptForCausalLM", {"vocab_size": V, "d_model": 24, "n_heads": 4, "n_layers": 1}),
    "deberta": ("DebertaV2Model", SIZES),
    "mamba": ("MambaForCausalLM", {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 1}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED),
    "gpt-oss": ("GptOssForCausalLM", GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1}),
}
STEEP = {"max_rate": 0.3, "window": 3}  # with which both show in a few tokens


def tiny(name, attention="las", las=STEEP, **more):
    """A model whose parameters are none of 0 or 1, the same for each name and size."""
    class_name, sizes = MODELS[name]
    made = getattr(transformers, class_name)
    config = made.config_class(**(sizes | more))
    if las is not None:
        config.las = dict(las)
    model = made._from_config(config, attn_implementation=attention).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def inputs(name, lengths=(9, 5), left=None):
    """Arguments of a model: tokens with padding, on the left for language models, or images."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12, dtype=torch.float64)}
    left = name in ("llama", "qwen3", "mistral", "gpt2") if left is None else left
    longest = max(lengths)
    place = torch.arange(longest).flip(0) if left else torch.arange(longest)
    mask = (place < torch.tensor(lengths)[:, None]).long()
    given = {"input_ids": torch.randint(3, V, mask.shape) * mask, "attention_mask": mask}
    if name in ("t5", "bart"):
        given["decoder_input_ids"] = torch.randint(3, V, (len(lengths), 11))
    if name == "gpt2":
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return given


def outputs(model, **given):
    """Logits, or the last hidden states."""
    found = model(**given)
    return found.logits if "logits" in found else found.last_hidden_state


def formula(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None, **kwargs
):
    """AP(softmax(mask(exp(-a·|i-j|) ⊙ QKᵀ·scale + bias)))·V with its matrices; plain between two sequences."""
    heads, settings = query.shape[1], getattr(module.config, "las", STEEP)
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale
    is_cross = query.shape[-2] != key.shape[-2]
    place = torch.arange(key.shape[-2])
    if not is_cross:
        kept = torch.linspace(1, math.exp(-settings["max_rate"]), heads, dtype=torch.float64)  # exp(-a)
        scores = scores * kept[:, None, None] ** (place[:, None] - place).abs()
    if position_bias is not None:
        scores = scores + position_bias
    weights = torch.softmax(scores.masked_fill(~attention_mask, -1e30), dim=-1)
    if not is_cross:
        steps = place[:, None] - place
        pool = ((steps >= 0) & (steps < settings["window"])).double() / settings["window"]
        weights = weights @ pool * attention_mask.any(-2, keepdim=True)  # padding is outside of the sequence
    return (weights @ value).transpose(1, 2), weights


def full_mask(**given):
    return sdpa_mask(**(given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))


AttentionInterface.register("formula", formula)
AttentionMaskInterface.register("formula", full_mask)
