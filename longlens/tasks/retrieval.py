"""AAN: does one paper cite the other? Two documents, character by character (Radev et al. 2013; Tay et al. 2021).

The texts may not be redistributed, so there is no download of them alone: they are in the release of the arena.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longlens.data import characters
from longlens.data.datasets import Metric, Samples, Sequences, SplitName
from longlens.data.sources import ARENA, LONGEST_LINE, Source
from longlens.data.store import Details, Writer
from longlens.errors import BadInput
from longlens.options import Count, shorten
from longlens.tasks.base import EndedLength, Head, Spec, StoredTask, register

SIZES = {"train": 147_086, "valid": 18_090, "test": 17_437}
VOCABULARY_SIZE = 98
AT_ONCE = 2_000  # pairs that are held in memory,
MOST = 1 << 24  # or so many characters of them
FILES = {
    split: f"new_aan_pairs.{file}.tsv" for split, file in (("train", "train"), ("valid", "eval"), ("test", "test"))
}
COLUMNS = ("label", "id1", "id2", "text1", "text2")


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
        return self.sequences(name, max_length=self.max_length, end=characters.EOS, pairs=True)

    def vocabulary(self) -> list[str]:
        return self.prepared.detail("symbols", list[str])

    def store_name(self) -> str:
        return "retrieval-stand-in" if self.stand_in else "retrieval"

    def identity(self) -> dict[str, Any]:
        return {"data": "aan", "version": 1, "min_count": self.min_count, "stand_in": self.stand_in}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if source is None:
            raise BadInput(
                f"retrieval has no download of its own: run '{self.import_command()}', where DIR has the pairs, which "
                f"are in {ARENA}"
            )
        found = Source(source, ARENA)
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
            raise BadInput(
                f"{FILES['train']} in {source} has {sizes['train']:,} pairs; the arena's has {SIZES['train']:,}, in "
                f"{ARENA}. Or accept these files as a stand-in, by --stand-in"
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
    """Some pairs at a time: the texts, both of a pair side by side, and the labels."""
    before = csv.field_size_limit(LONGEST_LINE)
    texts: list[str] = []
    labels: list[int] = []
    count = size = 0
    try:
        for count, row in enumerate(csv.reader((f"{line}\n" for line in source.lines(file)), delimiter="\t"), start=1):
            _check(row, f"{file} in {source.path}, pair {count}")
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


def _check(row: list[str], place: str) -> None:
    if len(row) != len(COLUMNS):
        raise BadInput(f"{place} must have {len(COLUMNS)} columns ({', '.join(COLUMNS)}), got {len(row)}")
    if row[0] not in ("0", "1", "0.0", "1.0"):
        raise BadInput(f"{place}: the label must be 0 or 1, got {shorten(row[0])!r}")
