"""Models with any mixer are models of transformers: the same outputs after a round trip, in ``generate`` and in
``Trainer``; and tokenizers give the tokens of our codecs."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from longlens import create_model, create_task, list_mixers
from longlens.data.codec import Codec
from longlens.errors import BadInput
from longlens.mixers.registry import find_mixer
from longlens.models.model import is_causal, loss_sum
from longlens.tasks.base import Spec

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from longlens.integrations import huggingface as hf  # noqa: E402

LENGTH, WORDS = 24, 11
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


def assert_same(found, wanted):
    """Up to the order of sums, which the place of a tensor in memory decides."""
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def make_config(mixer="las", kind="classify", *, options=None, **others):
    model = {"depth": 1, "width": 16, "tied": kind == "language"}
    how = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "model_options": model, "num_labels": 3, **others}
    return hf.LaSConfig(mixer=mixer, mixer_options=options if options is not None else {"heads": 2}, **how)


def make_lm(**others):
    return hf.LaSForCausalLM(make_config(kind="language", **others)).eval()


def padded():
    """Tokens (3, L), and where there are some."""
    tokens = torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(LENGTH) < torch.tensor([[LENGTH], [9], [3]])


def save_and_load(model, folder, **options):
    """As in another process: new memory is not 0, so that what nobody fills is noticed."""
    model.save_pretrained(folder)
    auto = f"AutoModel{type(model).__name__.removeprefix('LaS')}"
    torch.full((200_000,), torch.nan)
    return getattr(transformers, auto).from_pretrained(folder, **options)


@pytest.mark.zoo
@pytest.mark.parametrize("kind", ["classify", "language"])
@pytest.mark.parametrize("name", list_mixers())
@torch.no_grad()
def test_a_round_trip_changes_nothing(name, kind, small_options, tmp_path):
    more = {"bidirectional": False} if kind == "language" and "bidirectional" in find_mixer(name).options else {}
    config = make_config(name, kind, options=small_options(name, **more))
    if kind == "language" and not is_causal(config.make_mixer(), 16):
        with pytest.raises(BadInput, match="needs a causal mixer"):
            hf.LaSForCausalLM(config)
        return
    torch.manual_seed(0)
    model = (hf.LaSForSequenceClassification if kind == "classify" else hf.LaSForCausalLM)(config).eval()
    torch.manual_seed(0)
    ours = create_model(config.make_spec(kind), config.make_mixer(), **config.model_options).eval()
    tokens, mask = padded()
    loaded = save_and_load(model, tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}
    json.loads((tmp_path / "config.json").read_text())
    wanted = ours(tokens, mask)
    for found in (model, loaded):
        assert_same(found(tokens, mask).logits, wanted)
    left = torch.stack([row.roll(LENGTH - int(count)) for row, count in zip(tokens, mask.sum(1), strict=True)])
    turned = loaded(left, mask.flip(1).long()).logits
    if kind == "classify":
        assert_same(turned, wanted)
    for row, count in enumerate(mask.sum(1).tolist() if kind == "language" else []):
        assert_same(turned[row, LENGTH - count :], wanted[row, :count])


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize("norm", ["batch", "rms"])
def test_every_buffer_comes_back(positions, norm, tmp_path):
    options = {"depth": 2, "width": 16, "norm": norm, "positions": positions, "pooling": "last", "head_width": 5}
    model = hf.LaSForSequenceClassification(make_config(model_options=options, channels=2, shape=[4, 6]))
    values = torch.randn(3, LENGTH, 2)
    model(input_values=values)  # running means of batch norm
    loaded = save_and_load(model.eval(), tmp_path)
    assert_same(loaded(input_values=values).logits, model(input_values=values).logits)


@torch.no_grad()
def test_in_half_precision_and_with_a_new_head(tmp_path):
    model, (tokens, _) = make_lm(), padded()
    half = save_and_load(model, tmp_path, dtype=torch.bfloat16)
    assert half.dtype == half(tokens).logits.dtype == torch.bfloat16
    torch.testing.assert_close(half(tokens).logits.float(), model(tokens).logits, atol=0.05, rtol=0.05)
    assert half.model.head.linear.weight is half.model.embedding.values.weight
    torch.full((200_000,), torch.nan)
    other = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    assert other(tokens).logits.shape == (3, 4)
    assert 0 < other.model.head.linear.weight.abs().max() <= 16**-0.5  # as torch makes a new one
    blocks, before = other.model.blocks.state_dict(), model.model.blocks.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in blocks.items())


@torch.no_grad()
def greedy(model, tokens, count):
    """The most likely token after the last of the window, so many times."""
    for _ in range(count):
        scores = model.model(tokens[:, -LENGTH:])[:, -1]
        tokens = torch.cat([tokens, scores.argmax(dim=-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("more", [{}, {"use_cache": True}, {"attention_mask": torch.ones(2, 5, dtype=torch.int64)}])
@pytest.mark.parametrize("mixer", ["las", "s4d"])
def test_generate_is_a_loop_over_the_window(mixer, more):
    learned = {"depth": 1, "width": 16, "positions": "learned"}  # of which there are as many as the window has
    model = make_lm(mixer=mixer, options={}, model_options=learned)
    tokens = torch.randint(WORDS, (2, 5))
    found = model.generate(tokens, max_new_tokens=LENGTH, do_sample=False, **more)
    wanted = greedy(model, tokens, LENGTH)
    assert len(wanted[0].unique()) > 1
    assert_same(found, wanted)


def test_generate_with_padding_on_the_left_and_with_beams():
    model = make_lm()
    torch.nn.init.normal_(model.model.embedding.values.weight)
    tokens, mask = torch.randint(WORDS, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert_same(found[0, 3:], greedy(model, tokens[:1, 3:], 6)[0])
    assert_same(found[1], greedy(model, tokens[1:], 6)[0])
    best = model.generate(tokens, attention_mask=mask, max_new_tokens=3, num_beams=3, do_sample=False)
    assert best.shape == (2, 11)


def test_the_loss_is_ours():
    tokens, mask = padded()
    labels = torch.tensor([0, 2, 1])
    model = hf.LaSForSequenceClassification(make_config()).eval()
    found = model(tokens, mask, labels=labels)
    torch.testing.assert_close(found.loss, loss_sum(model.model.spec, found.logits, labels) / 3)
    assert [part.shape for part in model(tokens, mask, labels=labels, return_dict=False)] == [(), (3, 3)]
    model = make_lm()
    targets = tokens.masked_fill(~mask, -100)
    found = model(tokens, mask, labels=targets)
    wanted = loss_sum(model.model.spec, found.logits[:, :-1], targets[:, 1:]) / (targets[:, 1:] != -100).sum()
    torch.testing.assert_close(found.loss, wanted)


@pytest.mark.parametrize("positions", [None, 4])
def test_numbers_of_real_values(positions, tmp_path):
    count = positions or 1
    config = make_config(channels=1, num_labels=count, target_positions=positions, problem_type="regression")
    model, values = hf.LaSForSequenceClassification(config).eval(), torch.randn(2, LENGTH)
    labels = torch.randn(2, count)
    found = save_and_load(model, tmp_path)(input_values=values, labels=labels)
    wanted = model.model(values.unsqueeze(-1)).view(2, count)
    assert_same(found.logits, wanted)
    torch.testing.assert_close(found.loss, (wanted - labels).square().mean())


class Rows(torch.utils.data.Dataset):
    """Tokens whose label is whether the fourth is a large one; of a language, the tokens themselves."""

    def __init__(self, language):
        tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(0))
        tokens = tokens // 6 if language else tokens
        self.rows = [{"input_ids": row, "labels": row if language else int(row[3] > 5)} for row in tokens]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("kind", ["classify", "language"])
def test_the_trainer_trains_it(kind, tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    language = kind == "language"
    model = make_lm() if language else hf.LaSForSequenceClassification(make_config(num_labels=2))
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=12,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = Rows(language)
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
    assert trainer.predict(rows).predictions.shape == ((64, LENGTH, WORDS) if language else (64, 2))
    trainer.save_model(str(tmp_path / "model"))
    saved = type(model).from_pretrained(tmp_path / "model")
    tokens, _ = padded()
    with torch.no_grad():
        assert_same(saved(tokens).logits, trainer.model.eval()(tokens).logits)


def test_what_is_wrong_is_said():
    model, (tokens, mask) = hf.LaSForSequenceClassification(make_config()).eval(), padded()
    holes = mask.clone()
    holes[0, 4] = False
    with pytest.raises(BadInput, match=r"attention_mask must be 1 for tokens without a gap"):
        model(tokens, holes)
    with pytest.raises(BadInput, match=r"attention_mask must have the shape .* = \(3, 24\), got \(24,\)"):
        model(tokens, mask[0])
    with pytest.raises(BadInput, match="the inputs of this model must be input_ids, got input_values"):
        model(input_values=torch.randn(3, LENGTH))
    with pytest.raises(BadInput, match="input_ids must be given"):
        model()
    with pytest.raises(BadInput, match="mixer 'las' has no option 'windw'; did you mean 'window'"):
        make_config(options={"windw": 3})
    with pytest.raises(BadInput, match="model_options has no option 'dept'; did you mean 'depth'"):
        make_config(model_options={"dept": 3})
    with pytest.raises(BadInput, match=r"hidden_size must be given as model_options={'width': …}"):
        make_config(hidden_size=32)
    with pytest.raises(BadInput, match=r"num_attention_heads must be given as mixer_options={'heads': …}"):
        make_config(num_attention_heads=4)
    with pytest.raises(BadInput, match="vocab_size must be a whole number of at least 1, got 0"):
        make_config(vocab_size=0)
    with pytest.raises(BadInput, match="channels must be none for a language model"):
        hf.LaSForCausalLM(make_config(channels=2))
    with pytest.raises(BadInput, match="num_labels must be 1 for regression, got 3"):
        hf.LaSForSequenceClassification(make_config(problem_type="regression"))


def test_without_transformers_the_way_to_get_it_is_said(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("longlens.integrations.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers is not installed: pip install 'longlens\[hf\]'"):
        importlib.import_module("longlens.integrations.huggingface")


SPECIALS = ["<pad>", "<unk>", "<eos>"]
BYTES = [f"<{byte:02x}>" for byte in range(256)]
ENDED = {"specials": 3, "unknown": 1, "knows_unknown": True, "end": 2, "cut": True}
CODECS = {
    "characters": {"form": "characters", "symbols": [*SPECIALS, *"etaoinshrdlu ETA.,<>/\né|`"], **ENDED},
    "bytes": {"form": "bytes", "symbols": [*SPECIALS, *BYTES], **ENDED},
    "plain bytes": {"form": "bytes", "symbols": BYTES},
    "words": {"form": "words", "symbols": ["<unk>", "the", "of", "<eos>", "="], "unknown": 0, "knows_unknown": True},
}
ODD = "caf\u00e9 e\u0301 \U0001f600 <pad><eos> <unk>\r\n the\u3000of\x1cthe\x85of\xa0= \x00 \u2028.\tthe"


@pytest.mark.parametrize("name", CODECS)
def test_a_tokenizer_gives_the_tokens_of_the_codec(name, tmp_path):
    spec = Spec("tokens", len(CODECS[name]["symbols"]), 300, "classify", 2, "accuracy")
    codec = Codec.make(spec, CODECS[name])
    hf.make_tokenizer(codec).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = README.read_text().split("\n\n")
    texts = [text for text in [*texts, ODD] if codec.cut or len(text.encode()) <= 300]
    assert len(texts) > 30
    for text in texts:
        wanted = codec.encode(text, "text", like_a_split=True).tolist()
        assert tokenizer(text, truncation=codec.cut)["input_ids"] == wanted
    if name == "plain bytes":
        assert tokenizer.decode(tokenizer(ODD)["input_ids"]) == ODD


def test_a_tokenizer_of_listops_refuses_what_our_codec_refuses():
    task = create_task("listops")
    tokenizer, codec = hf.make_tokenizer(Codec.make(task.spec, task.codec())), Codec.make(task.spec, task.codec())
    for text in ("[MAX 3 4 [MIN 2 3 ] ]", "( ( ( [SM 1 ) 2 ) ] )"):
        assert tokenizer(text)["input_ids"] == codec.encode(text, "text").tolist()
    batch = tokenizer(["[SM 1 2 ]", "3"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1].tolist() == [*codec.encode("3", "text").tolist(), 0, 0, 0]
    assert batch["attention_mask"].sum(1).tolist() == [5, 2]
    for text in ("[MAX 3 x ]", "[MAX <eos> 3 ]"):
        with pytest.raises(BadInput, match="must have symbols of the training set"):
            codec.encode(text, "text")
        with pytest.raises(Exception, match="Missing"):
            tokenizer(text)
