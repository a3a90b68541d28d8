"""Your own sequences: a folder of CSV, JSONL, .npy, Parquet or Arrow files becomes a task.

The folder has ``train``, ``valid`` and ``test`` files, or fewer: what is missing is held out of the training set, where
a sample of each class stays. A single file may have any name, and is cut into three. Formats:

- Tables: ``train.csv`` (cells between commas, semicolons or tabs, which is found), ``train.tsv``, and with pyarrow
  ``train.parquet``, ``train.arrow`` or ``train.feather``. A header has the names of the columns, one of which is
  ``label`` (or the option ``label_column``). The sequence of a row is in the column ``input`` (text, or numbers with
  spaces between them), or in all other columns, or those of the option ``columns``, a number each, where empty cells at
  the end make it shorter.
- Tables in long form have a row for each time step: ``group_column`` says to which sequence it belongs, all other
  columns are channels, ``time_column`` gives their order, and the label is the same in all rows of a sequence. They are
  read in one go if the rows of a sequence follow each other.
- ``train.jsonl``: an object a line, ``{"input": …, "label": …}``. The input is a text, a list of numbers, or a list of
  lists of numbers (channels).
- ``train.inputs.npy`` (N, L) or (N, L, C), ``train.labels.npy`` (N,), and ``train.lengths.npy`` (N,) if they differ.

In Python, ``create_task("files", frame=…)`` takes a pandas DataFrame, or a pair (inputs, labels) of arrays or lists,
instead of a path; it is stored in the cache folder.
"""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from longlens.data.codec import class_name
from longlens.data.datasets import SPLITS, Metric, Samples, Sequences, SplitName, Stream, as_tokens
from longlens.data.folds import cut_fold
from longlens.data.readers import Layout, Records, companions, find_files, read_splits
from longlens.data.screening import equal_labels, screen
from longlens.data.store import Details, Prepared, Writer, expand
from longlens.errors import BadInput
from longlens.options import Count, Fraction, Seed, Several, Size, shorten
from longlens.tasks.base import Head, Length, Spec, StoredTask, register

SPECIALS = ("<pad>", "<unk>")  # before the values of a vocabulary
UNK = 1
DELIMITERS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "space": " "}  # by names that can be typed


@register("files")
@dataclass(frozen=True, kw_only=True)
class Files(StoredTask):
    """Your own sequences, from a folder of CSV, JSONL, .npy, Parquet or Arrow files.

    Args:
        path: One file, or a folder with the files: train.csv, and if there are such, valid.csv and test.csv.
        inputs: Tokens (whole numbers or characters) or real numbers. By default, texts are tokens, and so are numbers
            if all are written without a fraction (1, not 1.0) and in one channel.
        labels: Classes, or numbers to be predicted. By default, they are to be predicted if one has a fraction.
        standardize: Shift and scale real inputs, channel by channel, and numbers to be predicted, to mean 0 and
            deviation 1 over the training set.
        max_length: Length to which longer sequences are cut; none are cut by default.
        valid_share: Fraction of the training set held out for validation, if there is no file of it.
        test_share: Fraction of the training set held out for the test, if there is no file of it.
        seed: Seed that decides which samples are held out.
        folds: Number of parts into which all samples are cut, each with its share of every class; one is the test set.
        fold: Number of the part that is the test set, from 0.
        label_column: Column with the labels.
        input_column: Column with whole sequences, if there is one of this name.
        ignore: Columns of a table to leave out.
        columns: Columns of a table that are the sequence, or its channels; by default all others.
        delimiter: Character between the cells of a text table, or tab; by default a comma, semicolon or tab is found.
        group_column: Column that names the sequence of each row, in a table with a row for each time step.
        time_column: Column with the time of each row (numbers or dates), by which the rows of a group are sorted.
    """

    path: str
    inputs: Literal["auto", "tokens", "real"] = "auto"
    labels: Literal["auto", "classes", "numbers"] = "auto"
    standardize: bool = True
    max_length: Length | None = None
    valid_share: Fraction = 0.1
    test_share: Fraction = 0.1
    seed: Seed = 0
    folds: Several | None = None
    fold: Count = 0
    label_column: str = "label"
    input_column: str = "input"
    ignore: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    delimiter: str | None = None
    group_column: str | None = None
    time_column: str | None = None

    summary: ClassVar[str] = "your own sequences: a file or a folder of CSV, JSONL, .npy or Parquet"
    origin: ClassVar[str] = "your own files"
    head: ClassVar[Head] = "classify"  # or regress
    metric: ClassVar[Metric] = "accuracy"  # or r2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "path", str(expand(self.path, "path")))
        valid, test = self.valid_share, self.test_share
        if valid + test >= 1:
            raise BadInput(f"valid_share and test_share must be below 1 together, got {valid} and {test}")
        if self.fold >= (self.folds or 1):
            raise BadInput(f"fold must be from 0 to one less than folds, got {self.fold} of {self.folds or 'no folds'}")
        if self.folds is not None and self.test_share != type(self).test_share:
            raise BadInput(f"test_share must be left out, as one of {self.folds} folds is the test set")
        if self.delimiter is not None:
            object.__setattr__(self, "delimiter", DELIMITERS.get(self.delimiter.lower(), self.delimiter))
            if len(self.delimiter) != 1 or self.delimiter.isalnum() or self.delimiter in '\r\n\0"+-._\ufeff':
                given = f"got {shorten(self.delimiter)}"
                raise BadInput(f"delimiter must be one character that is in no number, or tab, {given}")
        if self.time_column is not None and self.group_column is None:
            raise BadInput("time_column is for tables with a row for each time step: give group_column as well")
        single = (self.label_column, self.group_column, self.time_column)
        given = Counter(name for name in (*single, *self.columns, *self.ignore) if name is not None)
        for name, count in given.items():
            if not name or count > 1:
                options = "label_column, group_column, time_column, columns and ignore"
                raise BadInput(
                    f"{options} must name different columns, got {shorten(name)!r}{' twice' if name else ''}"
                )

    @classmethod
    def make(cls, values: Mapping[str, Any], what: str) -> Self:
        if "frame" in values:
            from longlens.data.frames import store_frame

            if "path" in values:
                raise BadInput(f"{what} needs 'path' or 'frame', got both")
            options = {name: value for name, value in values.items() if name != "frame"}
            values = options | {"path": str(store_frame(values["frame"], options))}
        return super().make(values, what)

    @property
    def layout(self) -> Layout:
        """Which columns are what: the options that have the names of its fields."""
        given = self.values()
        return Layout(**{field.name: given[field.name] for field in fields(Layout) if field.name in given})

    @cached_property
    def prepared(self) -> Prepared:
        """The stored set. What looks wrong in it is said when its first use makes it; 'data prepare' says it, too."""
        is_new = not self.is_prepared()
        prepared = super().prepared
        for warning in notes(prepared.details) if is_new and self.fold == 0 else ():  # once for all folds
            print(f"longlens: {self.title}: {warning}", file=sys.stderr, flush=True)
        return prepared

    @property
    def spec(self) -> Spec:
        prepared = self.prepared
        inputs: Any = prepared.detail("inputs", Literal["tokens", "real"])
        size, longest = prepared.detail("size", Size), prepared.detail("max_length", Size)
        length = min(longest, self.max_length or longest)
        if "classes" in prepared.details:
            return Spec(inputs, size, length, "classify", len(prepared.detail("classes", list[str])), "accuracy")
        return Spec(inputs, size, length, "regress", 1, "r2")

    @property
    def title(self) -> str:
        folds = "" if self.folds is None else f", {self.folds} folds"
        return f"files ({Path(self.path).resolve().name}{folds})"

    @property
    def slug(self) -> str:
        return "files-" + re.sub(r"[^\w.-]+", "-", Path(self.path).resolve().name)

    def vocabulary(self) -> list[str] | None:
        return self.prepared.detail("symbols", list[str]) if "symbols" in self.prepared.details else None

    def load(self, name: SplitName, epoch: int) -> Sequences:
        transform = np.asarray if self.vocabulary() is None else as_tokens
        return self.sequences(name, transform=transform, max_length=self.max_length)

    def identity(self) -> dict[str, Any]:
        files = [part for file in find_files(Path(self.path)).values() for part in companions(file) if part.exists()]
        stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        options = self.values() | {"path": str(Path(self.path).resolve())}
        del options["max_length"]  # sequences are stored whole
        if self.folds is None:  # as before there were folds
            del options["folds"], options["fold"]
        for name in Layout.__dataclass_fields__:
            if options.get(name) == getattr(Layout, name):  # as before there were such options
                del options[name]
        return {"version": 1, "files": stamps, **options}

    def fingerprint(self) -> str:
        """The checksum of the arrays and of what they mean: names, scales and columns are not in the arrays."""
        text = json.dumps([super().fingerprint(), self.codec()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def codec(self) -> dict[str, Any]:
        prepared = self.prepared
        names = ("mean", "deviation", "classes", "label_mean", "label_deviation", "symbols", "layout")
        known = {name: prepared.details[name] for name in names if name in prepared.details}
        known["cut"] = self.max_length is not None and self.max_length <= prepared.detail("max_length", Size)
        if self.vocabulary() is None:
            return {"form": "real", **known}
        form = "characters" if prepared.detail("text", bool) else "values"
        return {"form": form, "specials": len(SPECIALS), "unknown": UNK, **known}

    def check_source(self, source: Path) -> None:
        raise BadInput("the task 'files' reads its own --path: leave out --from")

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        found = find_files(Path(self.path))
        if self.folds is not None and len(found) > 1:
            others = f"{self.path} has a {next(split for split in SPLITS[1:] if split in found)} file"
            raise BadInput(f"folds cut all samples of one file, and {others}: join the files, or leave out folds")
        tables = read_splits(found, self.layout)
        numeric = not any(isinstance(label, str) for label in tables["train"].labels)
        label_details, tables = self._encode_labels(tables)
        all_train = tables["train"]
        tables = self._hold_out(tables, len(label_details.get("classes", [])))
        input_details, inputs = self._encode_inputs(tables)
        targets = {split: table.labels for split, table in tables.items()}
        if "classes" not in label_details:
            label_details["label_mean"], label_details["label_deviation"], targets = self._scale(targets)
        for split in SPLITS:
            writer.append(split, values=inputs[split], lengths=tables[split].lengths, labels=targets[split])
        longest = max(int(table.lengths.max()) for table in tables.values())
        sizes = {split: len(tables[split].lengths) for split in SPLITS}
        details = {"sizes": sizes, "max_length": longest, "source": self.path, **input_details, **label_details}
        details["layout"] = all_train.layout.to_json()
        unasked = self.inputs == "auto" and "text" in details and not details["text"] and "warning" not in details
        symbols = details["size"] - len(SPECIALS) if unasked else 0
        details["warnings"] = screen(all_train, details.get("classes", ()), numeric_classes=numeric, symbols=symbols)
        if "classes" not in details:
            details["warnings"] += equal_labels(tables)
        return details

    def _encode_labels(self, tables: dict[str, Records]) -> tuple[Details, dict[str, Records]]:
        """Labels as float64, or as int64 places in the list of classes."""
        labels = [label for table in tables.values() for label in table.labels]
        texts = [label for label in labels if isinstance(label, str)]
        fractions = [label for label in labels if isinstance(label, float) and not label.is_integer()]
        if texts and self.labels == "numbers":
            given = f"the label {shorten(texts[0])!r} in {self.path}"
            raise BadInput(f"{given} is not a number; labels='classes' allows texts")
        if texts and fractions and self.labels == "auto":
            mixed = f"numbers such as {fractions[0]} and texts such as {shorten(texts[0])!r}"
            raise BadInput(f"the labels in {self.path} are {mixed}; correct them, or use labels='classes' for names")
        if len(set(labels)) < 2:
            raise BadInput(f"all labels in {self.path} are {shorten(labels[0])}; there must be two different ones")
        if self.labels == "numbers" or (self.labels == "auto" and fractions):
            return {}, {split: t._replace(labels=t.labels.astype(np.float64)) for split, t in tables.items()}
        classes = sorted(set(tables["train"].labels), key=lambda label: (isinstance(label, str), label))
        place = {label: index for index, label in enumerate(classes)}  # 1 and 1.0 are the same key
        for label in labels:
            if label not in place:
                missing = f"the training set of {self.path} has no label {shorten(label)}, but another split has"
                raise BadInput(f"{missing}; add samples of it, or use labels='numbers' if they are to be predicted")
        names = [class_name(label) for label in classes]
        encoded = {split: np.array([place[label] for label in table.labels]) for split, table in tables.items()}
        return {"classes": names}, {split: tables[split]._replace(labels=encoded[split]) for split in tables}

    def _hold_out(self, tables: dict[str, Records], classes: int) -> dict[str, Records]:
        """Train, valid and test; what has no file is held out of the training set."""
        train = tables["train"]
        if self.folds is not None:
            how: Any = {"folds": self.folds, "fold": self.fold, "valid_share": self.valid_share, "seed": self.seed}
            rows = cut_fold(train.labels, classes=classes > 0, **how)
            return {split: train.take(chosen) for split, chosen in rows.items()}
        count = len(train.lengths)
        order = Stream("files", self.seed).permutation(count)
        if classes:  # one sample of each goes to the end, to stay in the training set
            first = np.unique(train.labels[order], return_index=True)[1]
            order = np.concatenate([np.delete(order, first), order[first]])
        parts, held = {}, 0
        for split, share in (("valid", self.valid_share), ("test", self.test_share)):
            if split in tables:
                parts[split] = tables[split]
                continue
            size = round(count * share)
            if size < 1 or held + size > count - max(classes, 1):
                few = f"too few sequences, {count}{f' of {classes} classes' if classes else ''}"
                held_out = f"to hold out a {split} set of {share:.0%}; change {split}_share, or add a {split} file"
                raise BadInput(f"{self.path} has {few}, {held_out}")
            parts[split] = train.take(order[held : held + size])
            held += size
        return {"train": train.take(order[held:]), **parts}

    def _encode_inputs(self, tables: dict[str, Records]) -> tuple[Details, dict[str, np.ndarray]]:
        """Inputs as int32 tokens (total,) or float32 numbers (total, C)."""
        text, values = tables["train"].kind == "texts", {split: table.values for split, table in tables.items()}
        one_channel = values["train"].ndim == 1
        if self.inputs == "real" and text:
            raise BadInput(f"the inputs in {self.path} are texts, not real numbers; use inputs='tokens'")
        if self.inputs == "tokens" and not (one_channel and all((v == np.floor(v)).all() for v in values.values())):
            raise BadInput(f"the inputs in {self.path} are not all whole numbers in one channel; use inputs='real'")
        written_whole = all(np.issubdtype(v.dtype, np.integer) for v in values.values())
        if self.inputs == "tokens" or (self.inputs == "auto" and one_channel and written_whole):
            return _tokens(values, text)
        if one_channel:
            values = {split: v[:, None] for split, v in values.items()}
        mean, deviation, scaled = self._scale(values)
        return {"inputs": "real", "size": values["train"].shape[1], "mean": mean, "deviation": deviation}, scaled

    def _scale(self, parts: dict[str, np.ndarray]) -> tuple[Any, Any, dict[str, np.ndarray]]:
        """The mean and the deviation that the parts are freed of, if at all, and the parts in float32."""
        train = parts["train"]
        mean, deviation = np.zeros(train.shape[1:]), np.ones(train.shape[1:])
        if self.standardize:
            # The deviation of a constant is not always 0: rounding may leave 1e-17, which must not be divided by.
            mean, deviation = train.mean(axis=0), np.where(train.min(axis=0) < train.max(axis=0), train.std(axis=0), 1)
        scaled = {split: ((part - mean) / deviation).astype(np.float32) for split, part in parts.items()}
        return mean.tolist(), deviation.tolist(), scaled

    def render(self, samples: Samples, row: int) -> str:
        prepared = self.prepared
        inputs = samples.inputs[row, : samples.lengths[row]]
        symbols = self.vocabulary()
        if symbols is None:
            with np.printoptions(precision=3, suppress=True, threshold=40, linewidth=110):
                shown = str(inputs.squeeze(-1) if inputs.shape[1] == 1 else inputs)
        else:
            shown = ("" if prepared.detail("text", bool) else " ").join(symbols[i] for i in inputs)
        target = samples.targets[row]
        if "classes" in prepared.details:
            target = prepared.detail("classes", list[str])[target]
        return f"{shown}\n= {target}"

    def curves(self, split: SplitName, first: int, count: int) -> tuple[dict[str, list[np.ndarray]], list[str]]:
        """So many sequences (L, C) of each class from a sample on, as they were before scaling, and the names of their
        channels. Numbers to be predicted are cut into three classes of equal size."""
        prepared = self.prepared
        labels, sequences = np.asarray(prepared.array(split, "labels")), self.load(split, 0)
        if "classes" in prepared.details:
            names = [f"class {name}" for name in prepared.detail("classes", list[str])]
        else:
            mean, deviation = prepared.detail("label_mean", float), prepared.detail("label_deviation", float)
            bounds = np.quantile(labels, [0, 1 / 3, 2 / 3, 1])
            ends = [f"{end * deviation + mean:.3g}" for end in bounds]
            names = [f"labels from {low} to {high}" for low, high in pairwise(ends)]
            labels = np.searchsorted(bounds[1:3], labels)
        found = {}
        scale, shift = (np.array(prepared.detail(name, list[float])) for name in ("deviation", "mean"))
        for place, name in enumerate(names):
            rows = first + np.flatnonzero(labels[first:] == place)[:count]
            if len(rows):
                taken = sequences.take(rows)
                found[name] = [
                    row[:length] * scale + shift for row, length in zip(taken.inputs, taken.lengths, strict=True)
                ]
        is_old = "layout" not in prepared.details  # made before there were layouts
        layout = Layout() if is_old else Layout.from_json(prepared.detail("layout", dict[str, Any]))
        is_long = layout.group_column is not None
        return found, list(layout.columns) if is_long else [f"channel {i + 1}" for i in range(len(scale))]


def _tokens(values: dict[str, np.ndarray], text: bool) -> tuple[Details, dict[str, np.ndarray]]:
    """Places in the vocabulary, which has the values of the training set."""
    known = np.unique(values["train"])
    symbols = [*SPECIALS, *(chr(v) if text else str(int(v)) for v in known)]
    encoded = {}
    for split, those in values.items():
        place = np.minimum(np.searchsorted(known, those), len(known) - 1)
        encoded[split] = np.where(known[place] == those, place + len(SPECIALS), UNK).astype(np.int32)
    details: Details = {"inputs": "tokens", "size": len(symbols), "symbols": symbols, "text": text}
    unknown = max(float((tokens == UNK).mean()) for tokens in encoded.values())
    if unknown > 0.01 and not text:
        missing = f"{unknown:.0%} of a split is not in training"
        details["warning"] = f"{missing}; if the whole numbers are quantities, use --inputs real"
    return details, encoded


def notes(details: Details) -> list[str]:
    """The warnings about a set."""
    return [*filter(None, [details.get("warning")]), *details.get("warnings", ())]
