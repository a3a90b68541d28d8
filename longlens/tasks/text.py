"""Texts by characters or bytes: the arena's Text and Retrieval tasks.

- text: IMDB reviews (Maas et al. 2011): is the writer pleased?
- retrieval: AAN (Radev et al. 2013; Tay et al. 2021): does one paper cite the other? The texts may not be
  redistributed, so there is no download of them alone: they are in the release of the arena.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.data.datasets import Metric, Samples, Sequences, Split, SplitName
from longlens.data.sources import ARENA, LONGEST_LINE, Remote, Source, official
from longlens.data.store import Details, Writer
from longlens.errors import BadInput
from longlens.options import Count, Size, shorten
from longlens.tasks.base import EndedLength, Head, Spec, StoredTask, TrainTestTask, register

SPECIALS = ("<pad>", "<unk>", "<eos>")
PAD, UNK, EOS = range(3)
UNICODE = 0x110000
SENTIMENTS = ("negative", "positive")
IMDB = Remote(
    "aclImdb_v1.tar.gz",
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
    "md5:7c2ac02c03563afcf9b574c7e56c153a",
)
IMDB_SYMBOLS = 134  # with characters that occur 15 times in the training set, and the special tokens
IMDB_COUNTED = 4_095  # characters of a review in which they are counted, as in S4
IMDB_LONGEST = 1_000_000  # bytes of a review, far above that of any
IMDB_ALL = 500_000_000  # bytes of all reviews, far above those of the set
AAN_SIZES = {"train": 147_086, "valid": 18_090, "test": 17_437}
AAN_SYMBOLS = 98
AAN_FILES = {"train": "new_aan_pairs.train.tsv", "valid": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
AT_ONCE = 2_000  # pairs that are held in memory,
MOST = 1 << 24  # or so many characters of them


@register("text")
@dataclass(frozen=True, kw_only=True)
class Text(TrainTestTask):
    """Reviews of films, good or bad.

    Args:
        level: Tokens: characters as in S4, or bytes as in the arena (which numbers them from 1, and has no end token).
        max_length: Length to which longer reviews are cut, including the end token.
        min_count: Occurrences in the training set below which a character is unknown.
        validation: Validation set: a part of the training set, or the test set itself, as the arena and S4 do.
    """

    level: Literal["chars", "bytes"] = "chars"
    max_length: EndedLength = 4096
    min_count: Count = 15
    validation: Literal["train", "test"] = "train"
    valid_size: Size = 2_500

    summary: ClassVar[str] = "IMDB reviews by characters: good or bad"
    origin: ClassVar[str] = "download, 84 MB"
    sizes: ClassVar[Mapping[str, int]] = {"train": 25_000, "test": 25_000}

    @property
    def spec(self) -> Spec:
        return Spec("tokens", len(self.vocabulary()), self.max_length, self.head, 2, self.metric)

    def vocabulary(self) -> list[str]:
        if self.level == "bytes":
            return [*SPECIALS, *(f"<{byte:02x}>" for byte in range(256))]
        return self.prepared.detail("symbols", list[str])

    def codec(self) -> dict[str, Any]:
        form = "bytes" if self.level == "bytes" else "characters"
        return {**_codec(self.vocabulary()), "form": form, "classes": list(SENTIMENTS)}

    def stored(self, name: Literal["train", "test"]) -> Sequences:
        return self.sequences(name, max_length=self.max_length, end=EOS)

    def load(self, name: SplitName, epoch: int) -> Split:
        if self.validation == "test":
            return self.stored("train" if name == "train" else "test")
        return super().load(name, epoch)

    def store_name(self) -> str:
        return f"text-{self.level}"

    def identity(self) -> Mapping[str, Any]:
        if self.level == "bytes":
            return {"data": "imdb", "version": 1, "level": "bytes"}
        return {"data": "imdb", "version": 2, "level": "chars", "min_count": self.min_count}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        reviews = _read_reviews(official(source, IMDB, self.import_command()))
        symbols = None
        for split in self.sizes:
            texts = [text for label in ("neg", "pos") for _, text in sorted(reviews[split, label])]
            labels = np.repeat(np.arange(2, dtype=np.uint8), [len(reviews[split, label]) for label in ("neg", "pos")])
            if self.level == "bytes":
                encoded = [text.encode() for text in texts]
                values = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint16) + len(SPECIALS)
                lengths = np.array([len(text) for text in encoded], dtype=np.int64)
            else:
                values, lengths = code_points(texts)
                if symbols is None:
                    counted, _ = code_points([text[:IMDB_COUNTED] for text in texts])
                    symbols = frequent(np.bincount(counted), self.min_count)
                values = look_up(values, symbols)
            writer.append(split, values=values, lengths=lengths, labels=labels)
        details: Details = {"sizes": dict(self.sizes), "symbols": symbols, "source": str(source or IMDB.urls[0])}
        if symbols and self.min_count == 15 and len(symbols) != IMDB_SYMBOLS:
            details["warning"] = f"the vocabulary has {len(symbols)} symbols; that of IMDB has {IMDB_SYMBOLS}"
        return details

    def render(self, samples: Samples, row: int) -> str:
        ids = samples.inputs[row, : samples.lengths[row]]
        if self.level == "bytes":
            text = bytes(i - len(SPECIALS) for i in ids.tolist() if i >= len(SPECIALS)).decode(errors="replace")
        else:
            text = shown(ids, self.vocabulary())
        return f"{text}\n= {SENTIMENTS[samples.targets[row]]}"


Reviews = dict[tuple[str, str], list[tuple[int, str]]]


def _read_reviews(source: Source) -> Reviews:
    """Numbers and texts of the reviews, by split and label."""
    reviews: Reviews = {(split, label): [] for split in Text.sizes for label in ("neg", "pos")}
    pattern = r"(.*/)?(train|test)/(neg|pos)/\d{1,9}_\d+\.txt"
    for name, data in source.files(pattern, limit=IMDB_LONGEST, total=IMDB_ALL):
        split, label, file = name.split("/")[-3:]
        try:
            reviews[split, label].append((int(file.partition("_")[0]), data.decode()))
        except UnicodeDecodeError as error:
            raise BadInput(f"{name} in {source.path} is not UTF-8 text: {error}") from None
    for (split, label), found in reviews.items():
        expected = Text.sizes[split] // 2
        if len(found) != expected:
            given = f"{source.path} has {len(found):,} reviews in aclImdb/{split}/{label}"
            raise BadInput(f"{given}; IMDB has {expected:,}: the archive {IMDB.urls[0]} has them all")
    return reviews


@register("retrieval")
@dataclass(frozen=True, kw_only=True)
class Retrieval(StoredTask):
    """Pairs of papers: does one cite the other?

    Args:
        max_length: Length to which longer documents are cut, including the end token.
        min_count: Occurrences in the training set below which a character is unknown.
        stand_in: Accept files in the arena's form that are not the arena's; everything made from them says so.
    """

    max_length: EndedLength = 4000
    min_count: Count = 10
    stand_in: bool = False

    summary: ClassVar[str] = "two papers by characters: does one cite the other?"
    origin: ClassVar[str] = "your own copy"
    head: ClassVar[Head] = "match"
    metric: ClassVar[Metric] = "accuracy"

    @property
    def spec(self) -> Spec:
        return Spec("tokens", len(self.vocabulary()), self.max_length, self.head, 2, self.metric)

    def load(self, name: SplitName, epoch: int) -> Sequences:
        return self.sequences(name, max_length=self.max_length, end=EOS, pairs=True)

    def vocabulary(self) -> list[str]:
        return self.prepared.detail("symbols", list[str])

    def codec(self) -> dict[str, Any]:
        return {**_codec(self.vocabulary()), "form": "characters", "classes": ["neither cites the other", "one cites"]}

    def identity(self) -> dict[str, Any]:
        return {"data": "aan", "version": 1, "min_count": self.min_count, "stand_in": self.stand_in}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if source is None:
            command = f"run '{self.import_command()}', where DIR has the pairs, which are in {ARENA}"
            raise BadInput(f"retrieval has no download of its own: {command}")
        found = Source(source, ARENA)
        counts = np.zeros(UNICODE, dtype=np.int64)
        for texts, _ in _read_pairs(found, AAN_FILES["train"]):
            counts += np.bincount(code_points(texts)[0], minlength=UNICODE)
        symbols = frequent(counts, self.min_count)
        sizes = dict.fromkeys(AAN_FILES, 0)
        for split, file in AAN_FILES.items():
            for texts, labels in _read_pairs(found, file):
                values, lengths = code_points(texts)
                writer.append(split, values=look_up(values, symbols), lengths=lengths, labels=labels)
                sizes[split] += len(labels)
        if sizes["train"] != AAN_SIZES["train"] and not self.stand_in:
            given = f"{AAN_FILES['train']} in {source} has {sizes['train']:,} pairs"
            wanted = f"the arena's has {AAN_SIZES['train']:,}, in {ARENA}"
            raise BadInput(f"{given}; {wanted}. Or accept these files as a stand-in, by --stand-in")
        details: Details = {"sizes": sizes, "symbols": symbols, "source": str(source)}
        if self.stand_in:
            details["stand_in"] = f"stand-in of {sizes['train']:,} pairs"
        elif sizes != AAN_SIZES or len(symbols) != AAN_SYMBOLS:
            given = f"{' / '.join(map(str, sizes.values()))} pairs and {len(symbols)} symbols"
            details["warning"] = f"{given}; published: {' / '.join(map(str, AAN_SIZES.values()))} and {AAN_SYMBOLS}"
        return details

    def render(self, samples: Samples, row: int) -> str:
        symbols, pair = self.vocabulary(), zip(samples.inputs[row], samples.lengths[row], strict=True)
        texts = "\n--\n".join(shown(ids[:length], symbols) for ids, length in pair)
        return f"{texts}\n= {'one' if samples.targets[row] else 'neither'} cites the other"


def _codec(symbols: list[str]) -> dict[str, Any]:
    """The codec of texts that are cut, then ended; rare characters of the training set are unknown, so that others may
    be."""
    known = {"specials": len(SPECIALS), "unknown": UNK, "knows_unknown": True}
    return {"symbols": symbols, "end": EOS, "cut": True, **known}


def _read_pairs(source: Source, file: str) -> Iterator[tuple[list[str], np.ndarray]]:
    """Some pairs at a time: the texts, both of a pair side by side, and the labels."""
    before = csv.field_size_limit(LONGEST_LINE)
    texts: list[str] = []
    labels: list[int] = []
    count = size = 0
    try:
        for count, row in enumerate(csv.reader((f"{line}\n" for line in source.lines(file)), delimiter="\t"), start=1):
            place = f"{file} in {source.path}, pair {count}"
            if len(row) != 5:
                raise BadInput(f"{place} must have 5 columns (label, id1, id2, text1, text2), got {len(row)}")
            if row[0] not in ("0", "1", "0.0", "1.0"):
                raise BadInput(f"{place}: the label must be 0 or 1, got {shorten(row[0])!r}")
            labels.append(int(float(row[0])))
            texts += row[3:]
            size += len(row[3]) + len(row[4])
            if len(labels) == AT_ONCE or size > MOST:
                yield texts, np.array(labels, dtype=np.uint8)
                texts, labels, size = [], [], 0
    except csv.Error as error:
        raise BadInput(f"{file} in {source.path}, after pair {count}: {error}") from None
    finally:
        csv.field_size_limit(before)
    if count == 0:
        raise BadInput(f"{file} in {source.path} is empty: the pairs are in {ARENA}")
    if labels:
        yield texts, np.array(labels, dtype=np.uint8)


def code_points(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The characters (total,) of all texts, one after another, and the lengths (N,) of the texts."""
    values = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4")
    return values, np.array([len(text) for text in texts], dtype=np.int64)


def frequent(counts: np.ndarray, min_count: int) -> list[str]:
    """A vocabulary: the special tokens, and the characters that occur ``min_count`` times, most frequent first."""
    kept = np.flatnonzero(counts >= max(min_count, 1))
    return [*SPECIALS, *(chr(c) for c in kept[np.argsort(-counts[kept], kind="stable")])]


def look_up(characters: np.ndarray, symbols: Sequence[str]) -> np.ndarray:
    """Token ids of characters; those that are not in the vocabulary are unknown."""
    dtype = np.uint8 if len(symbols) <= 256 else np.uint16 if len(symbols) <= 65536 else np.int32
    table = np.full(UNICODE, UNK, dtype=dtype)
    table[[ord(symbol) for symbol in symbols[len(SPECIALS) :]]] = np.arange(len(SPECIALS), len(symbols))
    return table[characters]


def shown(ids: np.ndarray, symbols: list[str]) -> str:
    """The text again; unknown characters as �."""
    return "".join("" if i in (PAD, EOS) else "�" if i == UNK else symbols[i] for i in ids.tolist())
