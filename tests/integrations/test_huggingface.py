"""Models of transformers with LaS attention: what they compute, and what they refuse."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the package 'transformers' is not installed")

import transformers
from support.tiny_models import BART, MODELS, SIZES, STEEP, T5, V, inputs, outputs, tiny
from transformers import DynamicCache, StaticCache

from longlens.errors import BadInput
from longlens.integrations.huggingface import configure
from longlens.integrations.huggingface.attention import NAMES


def close(actual, expected, atol=1e-5, rtol=0):
    """Rotations, norms and rates are float32 in models of float64."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


TAKE_IT = ["llama", "qwen3", "mistral", "gpt2", "bert", "modernbert", "vit", "t5-encoder", "t5", "bart"]


@pytest.mark.parametrize("name", TAKE_IT)
def test_outputs_and_gradients_are_those_of_the_formula(name):
    given = inputs(name)
    found = {}
    for attention in ("las", "formula"):
        model = tiny(name, attention)
        result = outputs(model, **given)
        tokens = given["attention_mask"].bool() if result.shape[1] == 9 else slice(None)  # padding has no meaning
        result[tokens].square().mean().backward()
        found[attention] = result[tokens].detach(), {n: p.grad for n, p in model.named_parameters()}
    close(found["las"][0], found["formula"][0])
    close(found["las"][1], found["formula"][1], rtol=1e-5, atol=1e-5)
    plain = outputs(tiny(name, "sdpa"), **given)
    plain = plain[given["attention_mask"].bool()] if plain.shape[1] == 9 else plain
    assert (plain - found["las"][0]).abs().max() > 1e-3, "LaS shows"


@pytest.mark.parametrize("name", TAKE_IT)
def test_without_decay_and_smoothing_it_is_plain_attention(name):
    given = inputs(name)
    las, plain = (outputs(tiny(name, way, las={"max_rate": 0, "window": None}), **given) for way in ("las", "sdpa"))
    tokens = given["attention_mask"].bool() if las.shape[1] == 9 else slice(None)
    close(las[tokens], plain[tokens])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_it_trains_under_autocast(name):
    """Where queries and keys are rotated or normalized in float32, and values are in bfloat16."""
    model, given = tiny(name, "las").float(), inputs(name)
    with torch.autocast("cpu", torch.bfloat16):
        result = outputs(model, use_cache=False, **given)
    result.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("name", ["t5-encoder", "bert"])
def test_padding_on_the_left_lends_nothing_to_the_smoothing(name):
    given = inputs(name, left=True)
    las, formula = (outputs(tiny(name, way), **given)[given["attention_mask"].bool()] for way in ("las", "formula"))
    close(las, formula)


@pytest.mark.parametrize(("name", "attention"), [*(("llama", name) for name in NAMES), ("gpt2", "las")])
def test_a_left_padded_batch_is_each_sequence_alone(name, attention):
    model = tiny(name, attention, las={"chunk_size": 4} if attention == "las-chunk" else {})
    given = inputs(name, lengths=(9, 5, 3))
    together = outputs(model, **given)
    for row, length in enumerate((9, 5, 3)):
        alone = outputs(model, input_ids=given["input_ids"][row : row + 1, -length:])
        close(together[row, -length:], alone[0])


def in_parts(model, given, parts, cache):
    """The outputs for a sequence that is given in parts, after one another."""
    done, found = 0, []
    for part in parts:
        cut = {"input_ids": given["input_ids"][:, done : done + part]}
        cut["attention_mask"] = given["attention_mask"][:, : done + part]
        if "position_ids" in given:
            cut["position_ids"] = given["position_ids"][:, done : done + part]
        found.append(model(**cut, past_key_values=cache, use_cache=True).logits)
        done += part
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "attention"), [*(("llama", name) for name in NAMES), ("gpt2", "las")])
def test_with_a_cache_the_outputs_are_the_same(name, kind, attention):
    model = tiny(name, attention, las={"chunk_size": 4} if attention == "las-chunk" else {})
    given = inputs(name, lengths=(12, 7))
    whole = outputs(model, **given)
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=17)
    parts = in_parts(model, given, (6, 3, 1, 1, 1), cache)
    tokens = given["attention_mask"].bool()
    close(parts[tokens], whole[tokens])


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generate_is_the_same_with_and_without_a_cache(name):
    given = inputs(name, lengths=(6, 4))
    given.pop("decoder_input_ids", None)
    given.pop("position_ids", None)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    model = tiny(name)
    ways = [model.generate(**given, **options, use_cache=use_cache) for use_cache in (True, False)]
    ways += [model.generate(**given, **options, cache_implementation="static")] if name == "llama" else []
    for way in ways[1:]:
        assert way.sequences.tolist() == ways[0].sequences.tolist()
        close(torch.stack(way.logits), torch.stack(ways[0].logits))


@pytest.mark.parametrize("attention", NAMES)
def test_packed_documents_are_sequences_of_their_own(attention):
    model = tiny("llama", attention, las={"chunk_size": 4} if attention == "las-chunk" else {})
    documents = [torch.randint(3, V, (1, length)) for length in (6, 1, 7)]
    places = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    packed = outputs(model, input_ids=torch.cat(documents, dim=1), position_ids=places, use_cache=False)
    close(packed, torch.cat([outputs(model, input_ids=d) for d in documents], dim=1))


def test_packed_documents_do_not_see_the_padding_of_another_row():
    """Whose queries see tokens, as its own documents do."""
    model, tokens = tiny("llama"), torch.randint(3, V, (2, 12))
    document = torch.tensor([0] * 4 + [1] * 8)
    mask = ((document[:, None] == document) & torch.ones(12, 12, dtype=torch.bool).tril()).repeat(2, 1, 1, 1)
    alone = outputs(model, input_ids=tokens, attention_mask=mask)
    mask[1, :, :, 10:] = False
    padded = outputs(model, input_ids=tokens, attention_mask=mask)
    close(padded[0], alone[0], atol=1e-12)
    close(padded[1, :10], alone[1, :10], atol=1e-12)


def test_custom_masks_are_computed_by_the_formula():
    tokens = torch.randint(3, V, (2, 9))
    prefix = torch.ones(9, 9, dtype=torch.bool).tril()
    prefix[:4, :4] = True  # the first tokens see each other
    scattered = torch.rand(2, 1, 9, 9) > 0.4
    scattered |= torch.eye(9, dtype=torch.bool)
    for mask in (prefix.expand(2, 1, -1, -1), scattered):
        las, formula = (
            outputs(tiny("llama", way), input_ids=tokens, attention_mask=mask) for way in ("las", "formula")
        )
        close(las, formula)
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        close(outputs(tiny("llama"), input_ids=tokens, attention_mask=added), las)


def test_a_mask_that_was_changed_in_place_is_read_again():
    model, tokens = tiny("llama"), torch.randint(3, V, (1, 6))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    outputs(model, input_ids=tokens, attention_mask=mask)
    mask[..., 0] = False
    changed = outputs(model, input_ids=tokens, attention_mask=mask)
    close(changed, outputs(model, input_ids=tokens, attention_mask=mask.clone()))


def test_masks_that_do_not_fit_are_refused(monkeypatch):
    layer = tiny("llama").model.layers[0].self_attn
    attend = transformers.AttentionInterface()["las"]
    heads = torch.randn(1, 4, 3, 6, dtype=torch.float64)
    with pytest.raises(BadInput, match=r"must be \(batch, heads or 1, queries, keys = 3\), got \(1, 1, 3, 5\)"):
        attend(layer, heads, heads, heads, torch.ones(1, 1, 3, 5, dtype=torch.bool))
    with pytest.raises(BadInput, match="a window or several sequences in a row, and gives 'las' no mask of it"):
        attend(layer, heads, heads, heads, None, sliding_window=2)
    with pytest.raises(BadInput, match="with a cache the queries must be the last positions"):
        attend(layer, heads[:, :, :2], heads, heads, torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()[None, None])
    with pytest.raises(BadInput, match="3 queries and 2 keys without being causal"):
        attend(layer, heads, heads[:, :, :2], heads[:, :, :2], None, is_causal=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(BadInput, match="has 2 of 4 heads in this process, and 'las' cannot tell which"):
        attend(layer, heads[:, :2], heads[:, :2], heads[:, :2], None)


def test_a_sliding_window_with_a_cache():
    """Keys that a window has passed are gone, and their values with them, which smoothing would need."""
    given = inputs("mistral", lengths=(9, 9))
    model = tiny("mistral", "l-attention", las={"max_rate": 0.3})
    parts = in_parts(model, given, (4, 1, 1, 2, 1), DynamicCache(config=model.config))
    close(parts, outputs(model, **given))
    model = tiny("mistral")
    in_parts(model, given, (3, 1, 1), DynamicCache(config=model.config))  # within the window
    with pytest.raises(BadInput, match=r"hides more, as sliding windows do: use l-attention, or no cache"):
        in_parts(model, given, (4, 1, 1, 1), DynamicCache(config=model.config))
    with pytest.raises(BadInput, match="hides more"):
        in_parts(model, given, (4, 4), DynamicCache())


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5"])
def test_attention_weights_are_those_of_the_formula(name):
    given = inputs(name)
    las, formula = (tiny(name, way)(**given, output_attentions=True) for way in ("las", "formula"))
    keys = [key for key in formula if key.endswith("attentions") and formula[key]]
    assert len(keys) == (3 if name == "t5" else 1)
    for key in keys:
        assert len(las[key]) == 2, "one for each layer"
        for ours, theirs in zip(las[key], formula[key], strict=True):
            if name in ("llama", "gpt2"):  # padding sees nothing
                rows = given["attention_mask"].bool()[:, None].expand(theirs.shape[:3])
                ours, theirs = ours[rows], theirs[rows]
            close(ours, theirs)


def test_weights_of_a_static_cache_have_its_length():
    model, tokens = tiny("llama"), torch.randint(3, V, (1, 5))
    cache = StaticCache(config=model.config, max_cache_len=8)
    weights = model(tokens, past_key_values=cache, output_attentions=True).attentions[0]
    close(weights[..., :5], model(tokens, output_attentions=True).attentions[0])
    assert weights.shape[-1] == 8
    assert not weights[..., 5:].any()


def test_dropout_of_the_weights_is_on_in_training_alone():
    model = tiny("llama", attention_dropout=0.5)
    given = inputs("llama")
    close(outputs(model, **given), outputs(model, **given), atol=0)
    model.train()
    assert (outputs(model, **given) - outputs(model, **given)).abs().max() > 1e-3


def test_settings_are_saved_and_loaded(tmp_path):
    model, given = tiny("llama", las={"max_rate": 0.2, "window": 7}), inputs("llama")
    first, expected = tmp_path / "first", outputs(model, **given)
    model.save_pretrained(first)
    again = transformers.AutoModelForCausalLM.from_pretrained(first)
    close(outputs(again, **given), expected, atol=0)
    assert again.config.las == {
        "attention": "las", "max_rate": 0.2, "window": 7, "side": "past", "chunk_size": None, "schedule": "exp-uniform"
    }  # fmt: skip
    again.save_pretrained(tmp_path / "second")
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    close(outputs(third, **given), expected, atol=0)
    plain = transformers.AutoModelForCausalLM.from_pretrained(first, attn_implementation="sdpa")
    close(outputs(plain, **given), outputs(tiny("llama", "sdpa"), **given), atol=0)
    plain.save_pretrained(tmp_path / "plain")
    assert "attn_implementation" not in (tmp_path / "plain" / "config.json").read_text()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_what_is_saved_is_not_plain_attention_where_longlens_is_missing(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'Specified `attn_implementation="las"` is not supported' in done.stderr


@pytest.mark.slow
def test_the_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs the package 'accelerate'")
    model = tiny("llama").float()
    tokens = [3 + (7 * start + torch.arange(12)) % 20 for start in range(16)]  # each follows from the one before it
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=12, learning_rate=1e-2, per_device_train_batch_size=8, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=6,
    )  # fmt: skip
    trainer = transformers.Trainer(model, options, train_dataset=samples)
    trainer.train()
    first, last = (record["loss"] for record in trainer.state.log_history if "loss" in record)
    assert last < first
    trainer.save_model()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "las"
    close(outputs(again, input_ids=tokens[0][None]), outputs(model.eval(), input_ids=tokens[0][None]))


def test_the_implementation_of_a_model_can_be_changed():
    given = inputs("t5")
    model = tiny("t5", "sdpa", las=None)
    plain = outputs(model, **given)
    configure(model, **STEEP)
    close(outputs(model, **given), outputs(tiny("t5"), **given), atol=0)
    model.set_attn_implementation("l-attention")
    expected = outputs(tiny("t5", "l-attention", las={"max_rate": 0.3}), **given)
    close(outputs(model, **given), expected, atol=0)
    configure(model, "las-chunk", window=5)
    assert model.config.las["chunk_size"] == 128
    assert model.config.las["max_rate"] == 0.3
    configure(model, "las")
    assert model.config.las["chunk_size"] is None
    model.set_attn_implementation("sdpa")
    close(outputs(model, **given), plain, atol=0)


def test_chunks_of_another_variant_are_not_meant_also_after_plain_attention():
    model = tiny("llama", "las-chunk", las={"max_rate": 0.3, "chunk_size": 4})
    for name, chunk_size in (("las-chunk", 4), ("las", None)):
        model.set_attn_implementation("sdpa")
        model.set_attn_implementation(name)
        assert model.config.las["chunk_size"] == chunk_size
        assert model.config.las["max_rate"] == 0.3


def test_settings_of_a_model_are_those_of_the_models_in_it():
    config = transformers.CLIPConfig(text_config=SIZES, vision_config=TOWER | {"image_size": 8, "patch_size": 4})
    config.las = {"max_rate": 0.0, "window": None}  # plain attention
    model = transformers.CLIPModel._from_config(config, attn_implementation="las").double().eval()
    given = {"input_ids": torch.randint(3, V, (2, 9)), "pixel_values": torch.randn(2, 3, 8, 8).double()}
    las = model(**given).logits_per_text
    model.set_attn_implementation("sdpa")
    close(las, model(**given).logits_per_text, atol=1e-12)


@pytest.mark.parametrize("name", ["gptj", "bloom", "falcon", "mpt", "deberta", "mamba"])
def test_a_model_that_computes_its_attention_itself_says_so(name):
    with pytest.raises(BadInput, match=rf"{MODELS[name][0]} computes its attention itself.* cannot take .*'las'"):
        tiny(name)
    with pytest.raises(BadInput, match="computes its attention itself"):
        configure(tiny(name, "eager", las=None))


@pytest.mark.parametrize(("name", "reason"), [("gemma2", "caps its scores"), ("gpt-oss", "has attention sinks")])
def test_what_las_does_not_define_is_refused(name, reason):
    with pytest.raises(BadInput, match=f"Attention {reason}, which 'las' does not define: choose eager"):
        outputs(tiny(name), **inputs(name))


TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
AUDIO = {"patch_embeds_hidden_size": 8, "hidden_size": 16, "depths": [1, 1], "num_attention_heads": [1, 1]}
HALF = {  # models of which a part is on the interface, or whose decoders leave causality to the mask
    "PegasusXForConditionalGeneration": BART,
    "BigBirdPegasusForConditionalGeneration": BART,
    "NllbMoeForConditionalGeneration": BART | {"num_experts": 2, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
    "InformerModel": {"prediction_length": 3, "lags_sequence": [1], "encoder_layers": 1, "decoder_layers": 1},
    "GitForCausalLM": SIZES | {"vision_config": TOWER | {"image_size": 8, "patch_size": 4}},
    "ClapAudioModel": AUDIO | {"window_size": 4, "spec_size": 32, "num_mel_bins": 8},
    "LongT5EncoderModel": T5,
}


@pytest.mark.parametrize("name", HALF)
def test_a_model_that_does_not_promise_to_be_on_the_interface_is_refused(name):
    made = getattr(transformers, name)
    reason = rf"{name} does not promise that all of its attention can be replaced .* cannot take .*'las'"
    with pytest.raises(BadInput, match=reason):
        made._from_config(made.config_class(**HALF[name]), attn_implementation="las")
    model = made._from_config(made.config_class(**HALF[name]), attn_implementation="eager")
    for change in (configure, lambda model: model.set_attn_implementation("las")):
        with pytest.raises(BadInput, match=reason):
            change(model)


def test_layers_that_leave_causality_to_the_mask_get_one():
    """Also where all are tokens, and a causal layer needs none; and a model is known to be on the interface by name."""
    tokens, later = torch.randint(3, V, (1, 9)), torch.randint(3, V, (1, 9))
    tokens[:, -1] = 2  # the end, which the first of them looks for
    changed = torch.cat([tokens[:, :5], later[:, 5:8], tokens[:, 8:]], dim=1)
    texts = transformers.Aimv2TextModel._from_config(transformers.Aimv2TextConfig(**SIZES), attn_implementation="las")
    switch = transformers.SwitchTransformersConfig(**T5, num_experts=2)
    switch = transformers.SwitchTransformersForConditionalGeneration._from_config(switch, attn_implementation="las")
    for model, prefix, more in ((texts, "", {}), (switch, "decoder_", {"input_ids": later})):
        before, after = (
            outputs(
                model.double().eval(), **more, **{f"{prefix}input_ids": x, f"{prefix}attention_mask": x.new_ones(1, 9)}
            )
            for x in (tokens, changed)
        )
        close(after[:, :5], before[:, :5], atol=1e-12)
        assert (after - before)[:, 5:].abs().max() > 1e-6


def test_a_centered_window_is_for_encoders():
    centered = STEEP | {"side": "centered"}
    outputs(tiny("bert", las=centered), **inputs("bert"))
    for given in (inputs("llama"), {"input_ids": torch.randint(3, V, (1, 4))}):
        with pytest.raises(BadInput, match="side must be past in causal attention, got centered"):
            outputs(tiny("llama", las=centered), **given)
    outputs(tiny("modernbert", las=centered), **inputs("modernbert"))  # with a window to both sides


@pytest.mark.parametrize(
    ("las", "reason"),
    [
        ({"max_rates": 0.1}, "attention 'las' has no option 'max_rates'; did you mean 'max_rate'?"),
        ({"window": 4}, "window must be an odd number of at least 1 or none, got 4"),
        ({"window": [3]}, "window must be an odd number"),
        ([5], "config.las must be a dict of settings"),
    ],
)
def test_wrong_settings_are_refused(las, reason):
    config = transformers.LlamaConfig(**MODELS["llama"][1])
    config.las = las
    with pytest.raises(BadInput, match=reason.replace("?", r"\?")):
        transformers.LlamaForCausalLM._from_config(config, attn_implementation="las")
    with pytest.raises(BadInput, match="attn_implementation must be one of las, las-chunk"):
        configure(tiny("llama"), "sdpa")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("None", "transformers is not installed: pip install 'longlens[hf]'"),
        (
            "types.SimpleNamespace(__version__='4.57.6')",
            "transformers must be of version 5.22 or newer, got 4.57.6: pip install --upgrade 'longlens[hf]'",
        ),
    ],
)
def test_transformers_that_is_missing_or_old_is_one_sentence(module, reason):
    code = f"import sys, types; sys.modules['transformers'] = {module}; import longlens.integrations.huggingface"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"ImportError: {reason}"
