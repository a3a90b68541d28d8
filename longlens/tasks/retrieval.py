"""AAN: does one paper cite the other? Two documents, character by character (Radev et al. 2013; Tay et al. 2021).

The texts may not be redistributed, so there is no download of them alone: they are in the release of the arena.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longlens.tasks import characters
from longlens.tasks.base import Head, Metric, Spec, SplitName, StoredTask, register
from longlens.tasks.datasets import Samples, Sequences
from longlens.tasks.sources import ARENA, Source
from longlens.tasks.store import Details, Writer

SIZES = {"train": 147_086, "valid": 18_090, "test": 17_437}
VOCABULARY_SIZE = 98
BLOCK = 2_000  # pairs that are held in memory at once
FILES = {
    split: f"new_aan_pairs.{file}.tsv" for split, file in (("train", "train"), ("valid", "eval"), ("test", "test"))
}
COLUMNS = ("label", "id1", "id2", "text1", "text2")
WHERE = f"the pairs are in {ARENA}: unpack it, and give its folder with --from"


@register("retrieval")
@dataclass(frozen=True, kw_only=True)
class Retrieval(StoredTask):
    """Pairs of papers: does one cite the other?

    Args:
        max_length: longer documents are cut to this, the end token included.
        min_count: characters that are rarer in the training set are unknown.
        stand_in: accept files in the arena's form that are not the arena's. Everything made from them says so.
    """

    max_length: int = 4000
    min_count: int = 10
    stand_in: bool = False

    summary: ClassVar[str] = "two papers by characters: does one cite the other?"
    origin: ClassVar[str] = "your own copy"
    head: ClassVar[Head] = "match"
    metric: ClassVar[Metric] = "accuracy"

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; a document and its end need at least 2")

    @property
    def spec(self) -> Spec:
        return Spec("tokens", len(self.vocabulary()), self.max_length, self.head, 2, self.metric)

    def load(self, name: SplitName, epoch: int) -> Sequences:
        return self.sequences(name, max_length=self.max_length, end=characters.EOS, pairs=True)

    def vocabulary(self) -> list[str]:
        return self.prepared.details["symbols"]

    def store_name(self) -> str:
        return "retrieval-stand-in" if self.stand_in else "retrieval"

    def recipe(self) -> dict[str, Any]:
        return {"data": "aan", "version": 1, "min_count": self.min_count, "stand_in": self.stand_in}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if source is None:
            raise ValueError(f"retrieval has no download of its own: {WHERE}")
        found = Source(source)
        counts = np.zeros(characters.UNICODE, dtype=np.int64)
        for texts, _ in _read(found, FILES["train"]):
            counts += np.bincount(characters.code_points(texts).values, minlength=characters.UNICODE)
        symbols = characters.frequent(counts, self.min_count)
        sizes = dict.fromkeys(FILES, 0)
        for split, file in FILES.items():
            for texts, labels in _read(found, file):
                encoded = characters.code_points(texts)
                writer.append(split, "values", characters.look_up(encoded.values, symbols))
                writer.append(split, "lengths", encoded.lengths)
                writer.append(split, "labels", labels)
                sizes[split] += len(labels)
        if sizes["train"] != SIZES["train"] and not self.stand_in:
            raise ValueError(
                f"{FILES['train']} has {sizes['train']:,} pairs; the arena's has {SIZES['train']:,}: {WHERE}. Or "
                "accept these files as a stand-in, by --stand-in"
            )
        details: Details = {"sizes": sizes, "symbols": symbols, "source": str(source)}
        if self.stand_in:
            details["stand_in"] = f"stand-in of {sizes['train']:,} pairs"
        elif sizes != SIZES or len(symbols) != VOCABULARY_SIZE:
            given = f"{' / '.join(map(str, sizes.values()))} pairs and {len(symbols)} symbols"
            details["warning"] = f"{given}; published: {' / '.join(map(str, SIZES.values()))} and {VOCABULARY_SIZE}"
        return details

    def render(self, samples: Samples, row: int) -> str:
        symbols = self.vocabulary()
        texts = [
            characters.shown(ids[:n], symbols) for ids, n in zip(samples.inputs[row], samples.lengths[row], strict=True)
        ]
        verdict = "one cites the other" if samples.targets[row] else "neither cites the other"
        return "\n--\n".join(texts) + f"\n= {verdict}"


def _read(source: Source, file: str) -> Iterator[tuple[list[str], np.ndarray]]:
    """Blocks of pairs: the texts, both of a pair side by side, and the labels."""
    try:
        opened = source.open(file)
    except ValueError as error:
        raise ValueError(f"{error}: {WHERE}") from None
    csv.field_size_limit(2**31 - 1)
    texts: list[str] = []
    labels: list[int] = []
    count = 0
    with io.TextIOWrapper(opened, encoding="utf-8", newline="") as lines:
        try:
            for count, row in enumerate(csv.reader(lines, delimiter="\t"), start=1):
                _check(row, f"{file} in {source.path}, pair {count}")
                labels.append(int(float(row[0])))
                texts += row[3:]
                if len(labels) == BLOCK:
                    yield texts, np.array(labels, dtype=np.uint8)
                    texts, labels = [], []
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} in {source.path} is not UTF-8 text: {error}") from None
        except csv.Error as error:
            raise ValueError(f"{file} in {source.path}, after pair {count}: {error}") from None
    if count == 0:
        raise ValueError(f"{file} in {source.path} is empty: {WHERE}")
    if labels:
        yield texts, np.array(labels, dtype=np.uint8)


def _check(row: list[str], place: str) -> None:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{place} has {len(row)} columns; it must have {len(COLUMNS)}: {', '.join(COLUMNS)}")
    if row[0] not in ("0", "1", "0.0", "1.0"):
        raise ValueError(f"{place} has the label {row[0]!r}; it must be 0 or 1")
