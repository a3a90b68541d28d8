"""IMDB reviews, by characters or bytes: is the writer pleased? The arena's Text task (Maas et al. 2011)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.data import characters
from longlens.data.datasets import Metric, Samples, Sequences, Split, SplitName
from longlens.data.sources import Remote, Source, official
from longlens.data.store import Details, Writer
from longlens.errors import BadInput
from longlens.options import Count, Size
from longlens.tasks.base import EndedLength, Head, Spec, TrainTestTask, register

ARCHIVE = Remote(
    "aclImdb_v1.tar.gz",
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
    "md5:7c2ac02c03563afcf9b574c7e56c153a",
)
VOCABULARY_SIZE = 136  # with characters that occur 15 times in the training set, and the special tokens
LONGEST = 1_000_000  # bytes of a review, far above that of any
ALL = 500_000_000  # bytes of all reviews, far above those of the set


@register("text")
@dataclass(frozen=True, kw_only=True)
class Text(TrainTestTask):
    """Reviews of films, good or bad.

    Args:
        level: Tokens: characters as in S4, or bytes as in the arena (which numbers them from 1, and has no end token).
        max_length: Length to which longer reviews are cut, including the end token.
        min_count: Occurrences in the training set below which a character is unknown.
        validation: Validation set: a part of the training set, or the test set itself, as the arena and S4 do.
        valid_size: Reviews held out of the training set for validation.
        seed: Seed that decides which reviews are held out.
    """

    level: Literal["chars", "bytes"] = "chars"
    max_length: EndedLength = 4096
    min_count: Count = 15
    validation: Literal["train", "test"] = "train"
    valid_size: Size = 2_500

    summary: ClassVar[str] = "IMDB reviews by characters: good or bad"
    origin: ClassVar[str] = "download, 84 MB"
    head: ClassVar[Head] = "classify"
    metric: ClassVar[Metric] = "accuracy"
    sizes: ClassVar[Mapping[str, int]] = {"train": 25_000, "test": 25_000}

    @property
    def spec(self) -> Spec:
        return Spec("tokens", len(self.vocabulary()), self.max_length, self.head, 2, self.metric)

    def vocabulary(self) -> list[str]:
        if self.level == "bytes":
            return [*characters.SPECIALS, *(f"<{byte:02x}>" for byte in range(256))]
        return self.prepared.detail("symbols", list[str])

    def stored(self, name: Literal["train", "test"]) -> Sequences:
        return self.sequences(name, max_length=self.max_length, end=characters.EOS)

    def load(self, name: SplitName, epoch: int) -> Split:
        if self.validation == "test":
            return self.stored("train" if name == "train" else "test")
        return super().load(name, epoch)

    def store_name(self) -> str:
        return f"text-{self.level}"

    def identity(self) -> Mapping[str, Any]:
        rare = {"min_count": self.min_count} if self.level == "chars" else {}
        return {"data": "imdb", "version": 1, "level": self.level, **rare}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        reviews = _read(official(source, ARCHIVE, self.import_command()))
        symbols = None
        for split in self.sizes:
            texts = [text for label in ("neg", "pos") for _, text in sorted(reviews[split, label])]
            labels = np.repeat(np.arange(2, dtype=np.uint8), [len(reviews[split, label]) for label in ("neg", "pos")])
            if self.level == "bytes":
                encoded = characters.utf8(texts)
                values = encoded.values.astype(np.uint16) + len(characters.SPECIALS)
            else:
                encoded = characters.code_points(texts)
                symbols = symbols or characters.frequent(np.bincount(encoded.values), self.min_count)
                values = characters.look_up(encoded.values, symbols)
            writer.append(split, "values", values)
            writer.append(split, "lengths", encoded.lengths)
            writer.append(split, "labels", labels)
        details: Details = {"sizes": dict(self.sizes), "symbols": symbols, "source": str(source or ARCHIVE.urls[0])}
        if symbols and self.min_count == 15 and len(symbols) != VOCABULARY_SIZE:
            details["warning"] = f"the vocabulary has {len(symbols)} symbols; that of IMDB has {VOCABULARY_SIZE}"
        return details

    def render(self, samples: Samples, row: int) -> str:
        ids = samples.inputs[row, : samples.lengths[row]]
        text = characters.shown_bytes(ids) if self.level == "bytes" else characters.shown(ids, self.vocabulary())
        return f"{text}\n= {('negative', 'positive')[samples.targets[row]]}"


Reviews = dict[tuple[str, str], list[tuple[int, str]]]


def _read(source: Source) -> Reviews:
    """Numbers and texts of the reviews, by split and label."""
    reviews: Reviews = {(split, label): [] for split in Text.sizes for label in ("neg", "pos")}
    pattern = r"(.*/)?(train|test)/(neg|pos)/\d{1,9}_\d+\.txt"
    for name, data in source.files(pattern, limit=LONGEST, total=ALL):
        split, label, file = name.split("/")[-3:]
        try:
            reviews[split, label].append((int(file.partition("_")[0]), data.decode()))
        except UnicodeDecodeError as error:
            raise BadInput(f"{name} in {source.path} is not UTF-8 text: {error}") from None
    for (split, label), found in reviews.items():
        expected = Text.sizes[split] // 2
        if len(found) != expected:
            raise BadInput(
                f"{source.path} has {len(found):,} reviews in aclImdb/{split}/{label}; IMDB has {expected:,}: "
                f"the archive {ARCHIVE.urls[0]} has them all"
            )
    return reviews
