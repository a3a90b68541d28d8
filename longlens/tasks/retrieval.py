"""AAN: does one paper cite the other? Two documents, character by character (Radev et al. 2013; Tay et al. 2021).

The texts may not be redistributed, so there is no download of them alone: they are in the release of the arena.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longlens.tasks import characters
from longlens.tasks.base import Head, Metric, Spec, SplitName, StoredTask, register
from longlens.tasks.datasets import Samples, Sequences, offsets_of
from longlens.tasks.sources import Source
from longlens.tasks.store import Details, Writer

TRAIN_SIZE = 147_086
VOCABULARY_SIZE = 98
FILES = {
    split: f"new_aan_pairs.{file}.tsv" for split, file in (("train", "train"), ("valid", "eval"), ("test", "test"))
}
COLUMNS = ("label", "id1", "id2", "text1", "text2")
WHERE = (
    "the pairs are in lra_release.gz (8 GB) of github.com/google-research/long-range-arena: unpack it, and give its "
    "folder with --from"
)


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
        return Spec("tokens", len(self.prepared.details["symbols"]), self.max_length, self.head, 2, self.metric)

    def load(self, name: SplitName, epoch: int) -> Sequences:
        values, lengths, labels = (self.prepared.array(name, key) for key in ("values", "lengths", "labels"))
        return Sequences(
            values, offsets_of(lengths), labels.astype(np.int64),
            max_length=self.max_length, end=characters.EOS, pairs=True,
        )  # fmt: skip

    def store_name(self) -> str:
        return "aan-stand-in" if self.stand_in else "aan"

    def recipe(self) -> dict[str, Any]:
        return {"data": "aan", "version": 1, "min_count": self.min_count, "stand_in": self.stand_in}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if source is None:
            raise ValueError(f"retrieval has no download of its own: {WHERE}")
        sizes: dict[str, int] = {}
        symbols: list[str] = []
        for split, file in FILES.items():
            texts, labels = _read(Source(source), file)
            if split == "train" and len(labels) != TRAIN_SIZE and not self.stand_in:
                raise ValueError(
                    f"{file} has {len(labels):,} pairs; the arena's has {TRAIN_SIZE:,}: {WHERE}. Or accept these files "
                    "as a stand-in, by --stand-in"
                )
            encoded = characters.code_points(texts)
            symbols = symbols or characters.vocabulary(encoded.values, self.min_count)
            writer.append(split, "values", characters.look_up(encoded.values, symbols))
            writer.append(split, "lengths", encoded.lengths)
            writer.append(split, "labels", labels)
            sizes[split] = len(labels)
        details: Details = {"sizes": sizes, "symbols": symbols, "source": str(source)}
        if sizes["train"] != TRAIN_SIZE:
            details["stand_in"] = f"stand-in of {sizes['train']:,} pairs"
        elif len(symbols) != VOCABULARY_SIZE:
            details["warning"] = f"the vocabulary has {len(symbols)} symbols; published results have {VOCABULARY_SIZE}"
        return details

    def render(self, samples: Samples, row: int) -> str:
        symbols = self.prepared.details["symbols"]
        texts = [
            characters.shown(ids[:n], symbols) for ids, n in zip(samples.inputs[row], samples.lengths[row], strict=True)
        ]
        verdict = "one cites the other" if samples.targets[row] else "neither cites the other"
        return "\n--\n".join(texts) + f"\n= {verdict}"


def _read(source: Source, file: str) -> tuple[list[str], np.ndarray]:
    """The texts of all pairs, both of a pair side by side, and the labels."""
    try:
        text = source.read(file).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} in {source.path} is not UTF-8 text: {error}") from None
    except ValueError as error:
        raise ValueError(f"{error}: {WHERE}") from None
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    texts: list[str] = []
    labels: list[int] = []
    for row in csv.reader(io.StringIO(text, newline=""), delimiter="\t"):
        place = f"{file} in {source.path}, pair {len(labels) + 1}"
        if len(row) != len(COLUMNS):
            raise ValueError(f"{place} has {len(row)} columns; it must have {len(COLUMNS)}: {', '.join(COLUMNS)}")
        if row[0] not in ("0", "1", "0.0", "1.0"):
            raise ValueError(f"{place} has the label {row[0]!r}; it must be 0 or 1")
        labels.append(int(float(row[0])))
        texts += row[3:]
    if not labels:
        raise ValueError(f"{file} in {source.path} is empty: {WHERE}")
    return texts, np.array(labels, dtype=np.uint8)
