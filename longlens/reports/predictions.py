"""What a model predicts, as JSONL, CSV or .npy, row by row, and as a short table."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from longlens.data.codec import Codec
from longlens.data.store import NpyWriter
from longlens.errors import BadInput
from longlens.files import check_out, open_atomic
from longlens.reports.sheet import Column, Sheet

FORMATS = (".jsonl", ".csv", ".npy")
SHOWN = 10  # rows of the table
MOST_CLASSES = 20  # whose rows are counted on the terminal


class Prediction(NamedTuple):
    """What the model says about one sequence."""

    row: int  # from 1 on
    name: str | None  # of the sequence, where the file has one
    label: str | None  # None for numbers
    numbers: np.ndarray  # (K,) probabilities of all classes, or () or (M,) numbers

    @property
    def probability(self) -> float:
        """The probability of the label."""
        return float(self.numbers.max())


Writer = Callable[[Prediction], None]


def check_predictions(out: Path | None) -> Path | None:
    """Refuse what is no place for predictions, before they are made. Its folder is made."""
    if out is not None and out.suffix.lower() not in FORMATS:
        raise BadInput(f"out must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {out}")
    return check_out(out)


@contextmanager
def open_predictions(out: Path, codec: Codec) -> Iterator[Writer]:
    """A function that writes predictions, one after another; the file is there when all are, and not before."""
    writers = {".jsonl": _write_jsonl, ".csv": _write_csv, ".npy": _write_npy}
    with open_atomic(out) as file, writers[out.suffix.lower()](file, codec) as write:
        yield write


def _named(prediction: Prediction) -> dict[str, Any]:
    """Which row it is."""
    return {"row": prediction.row} | ({} if prediction.name is None else {"name": prediction.name})


def _chances(prediction: Prediction, codec: Codec) -> dict[str, float]:
    """The probability of each class; a language has too many tokens for it."""
    if prediction.label is None or codec.head == "language":
        return {}
    return {codec.name(index): round(float(chance), 6) for index, chance in enumerate(prediction.numbers)}


@contextmanager
def _write_jsonl(file: BinaryIO, codec: Codec) -> Iterator[Writer]:
    def write(prediction: Prediction) -> None:
        values = _named(prediction)
        if prediction.label is None:
            values["value"] = prediction.numbers.tolist()
        else:
            values |= {"label": prediction.label, "probability": round(prediction.probability, 6)}
        if chances := _chances(prediction, codec):
            values["probabilities"] = chances
        file.write(f"{json.dumps(values, ensure_ascii=False)}\n".encode())

    yield write


@contextmanager
def _write_csv(file: BinaryIO, codec: Codec) -> Iterator[Writer]:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    lines = csv.writer(text, lineterminator="\n")
    begun = False

    def write(prediction: Prediction) -> None:
        nonlocal begun
        values = _named(prediction)
        if prediction.label is None:
            numbers = np.atleast_1d(prediction.numbers).tolist()
            names = ["value"] if prediction.numbers.ndim == 0 else [f"value_{i}" for i in range(1, len(numbers) + 1)]
            values |= dict(zip(names, numbers, strict=True))
        else:
            values |= {"label": prediction.label, "probability": f"{prediction.probability:.6f}"}
        values |= {f"probability_{name}": f"{chance:.6f}" for name, chance in _chances(prediction, codec).items()}
        if not begun:
            lines.writerow(values)
            begun = True
        lines.writerow(values.values())

    try:
        yield write
    finally:
        text.detach()  # it is closed by the one who opened it


@contextmanager
def _write_npy(file: BinaryIO, codec: Codec) -> Iterator[Writer]:
    """(N, classes) float32 probabilities, or (N,) or (N, M) float64 numbers."""
    array: NpyWriter | None = None

    def write(prediction: Prediction) -> None:
        nonlocal array
        row = prediction.numbers[None].astype(np.float64 if codec.head == "regress" else np.float32)
        array = array or NpyWriter(file, row)
        array.append(row)

    yield write
    if array is not None:
        array.finish()


class Summary:
    """The first rows, and how many there are of each class."""

    def __init__(self, codec: Codec):
        self.codec = codec
        self.first: list[Prediction] = []
        self.count = 0
        self.labels: Counter[str] = Counter()
        self.smallest, self.largest, self.total = np.inf, -np.inf, 0.0

    def add(self, prediction: Prediction) -> None:
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(prediction)
        if prediction.label is not None:
            self.labels[prediction.label] += 1
        else:
            self.smallest = min(self.smallest, float(prediction.numbers.min()))
            self.largest = max(self.largest, float(prediction.numbers.max()))
            self.total += float(prediction.numbers.mean())

    def table(self) -> Sheet:
        names = [Column("name")] if any(prediction.name is not None for prediction in self.first) else []
        answers = [Column("value", number=True)]
        if self.codec.head != "regress":
            answers = [Column("label", wrap=True), Column("probability", number=True)]
        sheet = Sheet("", [Column("row", number=True), *names, *answers])
        for prediction in self.first:
            cells = [f"{prediction.row:,}"] + ([prediction.name or ""] if names else [])
            if prediction.label is None:
                numbers = np.atleast_1d(prediction.numbers)
                more = " …" if len(numbers) > 4 else ""
                sheet.rows.append([*cells, " ".join(f"{number:.6g}" for number in numbers[:4]) + more])
            else:
                sheet.rows.append([*cells, prediction.label, f"{100 * prediction.probability:.1f} %"])
        if self.count > len(self.first):
            sheet.notes.append(f"… and {self.count - len(self.first):,} more rows; --out writes all of them")
        return sheet

    def line(self) -> str:
        """How many rows there are of what."""
        rows = f"{self.count:,} row{'' if self.count == 1 else 's'}"
        if self.codec.head == "regress":
            mean = self.total / max(self.count, 1)
            return f"{rows}: from {self.smallest:.6g} to {self.largest:.6g}, {mean:.6g} on average"
        common = self.labels.most_common(MOST_CLASSES)
        counts = ", ".join(f"{label!r} {count:,} ({100 * count / self.count:.1f} %)" for label, count in common)
        more = len(self.labels) - len(common)
        return f"{rows}: {counts}" + (f", and {more:,} more" if more else "")
