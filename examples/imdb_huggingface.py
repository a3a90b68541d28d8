"""IMDB reviews with a model of transformers and its Trainer: plain attention and LaS, beside each other.

    pip install 'longlens[hf]' accelerate
    python examples/imdb_huggingface.py aclImdb                     # the folder of the unpacked aclImdb_v1.tar.gz

The model is a small ModernBERT that starts from nothing, the tokenizer is made of the words of the training set; with
weights from the hub it would be ``AutoModelForSequenceClassification.from_pretrained(…, attn_implementation="las")``.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorWithPadding,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import longlens.integrations.huggingface

WORDS = 8_000
SPECIALS = ["[PAD]", "[UNK]", "[CLS]"]


def read(folder: Path, most: int) -> tuple[list[str], list[int]]:
    """At most so many reviews of a split, and whether each is positive."""
    files = [
        (path, label) for label, name in enumerate(("neg", "pos")) for path in sorted((folder / name).glob("*.txt"))
    ]
    if not files:
        raise SystemExit(f"there are no reviews in {folder}: give the folder aclImdb, with train/pos, train/neg, …")
    step = -(-len(files) // most)
    texts = [path.read_text(encoding="utf-8") for path, _ in files[::step]]
    return texts, [label for _, label in files[::step]]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("<br />", " "), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=WORDS, special_tokens=SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def train(attention: str, splits: dict[str, list[dict]], tokenizer: PreTrainedTokenizerFast, args) -> dict[str, float]:
    """Train a model with an attention; its accuracy on the test set, and the seconds that it took."""
    set_seed(args.seed)
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        global_attn_every_n_layers=1, classifier_pooling="mean", max_position_embeddings=args.length,
        pad_token_id=0, cls_token_id=2, sep_token_id=2, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    model = ModernBertForSequenceClassification._from_config(config, attn_implementation=attention)
    if attention == "las":
        longlens.integrations.huggingface.configure(model, max_rate=args.max_rate, window=args.window)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, num_train_epochs=args.epochs, learning_rate=2e-3, per_device_train_batch_size=32, warmup_steps=100,
            per_device_eval_batch_size=256, weight_decay=0.01, seed=args.seed, save_strategy="no", report_to="none",
            logging_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
            train_sampling_strategy="group_by_length",
        )  # fmt: skip
        trainer = Trainer(
            model,
            options,
            train_dataset=splits["train"],
            eval_dataset=splits["test"],
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        return {"accuracy": trainer.evaluate()["eval_accuracy"], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description="IMDB with plain attention and LaS in a ModernBERT of transformers.")
    parser.add_argument("folder", type=Path, help="the folder aclImdb")
    parser.add_argument("--samples", type=int, default=5_000, help="reviews to train on, and to test on")
    parser.add_argument("--length", type=int, default=128, help="words of a review")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--max-rate", type=float, default=0.02)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", nargs="+", default=["sdpa", "las"])
    args = parser.parse_args()
    texts = {name: read(args.folder / name, args.samples) for name in ("train", "test")}
    tokenizer = make_tokenizer(texts["train"][0])
    splits = {}
    for name, (reviews, labels) in texts.items():
        ids = tokenizer(reviews, truncation=True, max_length=args.length)["input_ids"]
        splits[name] = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    for attention in args.attention:
        found = train(attention, splits, tokenizer, args)
        print(f"{attention}: accuracy {found['accuracy']:.1%} on {len(splits['test'])} reviews, ", end="")
        print(f"trained in {found['seconds']:.0f} s")


if __name__ == "__main__":
    main()
