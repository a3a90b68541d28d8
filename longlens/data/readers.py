"""Sequences and labels in files, one at a time or as arrays. ``longlens.tasks.files`` describes the formats."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longlens.data.datasets import SPLITS, offsets_of
from longlens.data.store import map_npy
from longlens.data.tables import ARROW_TABLES, TEXT_TABLES, open_table, resolve_layout, table_records
from longlens.data.values import Layout, Record, label_hint, read_array, read_label
from longlens.errors import BadInput
from longlens.options import shorten

FORMATS = (*TEXT_TABLES, ".jsonl", ".inputs.npy", *ARROW_TABLES)
OF_TABLES = ("ignore", "columns", "delimiter", "group_column", "time_column")  # options that only they have


class Records(NamedTuple):
    """The sequences of a file or a split, one after another."""

    kind: str  # of the inputs, for error sentences
    values: np.ndarray  # (total,) or (total, C) int64 or float64; code points of texts
    lengths: np.ndarray  # (N,)
    labels: np.ndarray  # (N,) as they were read, then int64 classes or float64 numbers
    layout: Layout  # with what was found in the file

    def take(self, rows: np.ndarray) -> "Records":
        """Some of the records, in the order in which they are here."""
        rows, starts = np.sort(rows), offsets_of(self.lengths)
        values = np.concatenate([self.values[starts[r] : starts[r + 1]] for r in rows])
        return self._replace(values=values, lengths=self.lengths[rows], labels=self.labels[rows])


def find_files(path: Path) -> dict[str, Path]:
    """The file of each split. A single one is the training set, whatever its name."""
    if not (path.is_dir() or path.is_file()):
        raise BadInput(f"there is no file or folder {path}; path must be one with sequences")
    files = [path] if path.is_file() else sorted(path.iterdir())
    files = [file for file in files if file.name.endswith(FORMATS) and file.is_file() and file.name[0] != "."]
    if not files:
        formats = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise BadInput(f"{path} has no {formats} file: help('longlens.tasks.files') describes them")
    if len(files) == 1:
        return {"train": files[0]}
    split_of = {split + suffix: split for split in SPLITS for suffix in FORMATS}
    found = {split_of.get(file.name, ""): file for file in files}
    listed = f"{path} has the files {', '.join(file.name for file in files)}"
    if "" in found or "train" not in found:
        raise BadInput(f"{listed}; name them train, valid and test, or keep one only")
    if len(found) < len(files):
        raise BadInput(f"{listed}, two of which are for the same split; keep one of them")
    return found


def companions(file: Path) -> list[Path]:
    """The files that belong to this one: of arrays the inputs, the labels and the lengths, which may be missing."""
    if not file.name.endswith(".inputs.npy"):
        return [file]
    stem = file.name.removesuffix("inputs.npy")
    return [file.with_name(f"{stem}{part}.npy") for part in ("inputs", "labels", "lengths")]


def iter_records(file: Path, layout: Layout, *, with_labels: bool) -> Iterator[Record]:
    """The sequences of a file, one at a time and in bounded memory. BadInput says what is wrong with it, and where.

    Without labels, those of the records are None, and a column of labels that is there is left alone. Any .npy file
    can then be read. What the layout says of tables does not matter for other formats: a model that was trained on a
    table can be used with them.
    """
    readers = {".jsonl": _read_jsonl, ".npy": _read_npy} | dict.fromkeys((*TEXT_TABLES, *ARROW_TABLES), table_records)
    if file.suffix not in readers:
        endings = ", ".join(readers)
        raise BadInput(f"{file} must be a file that ends in one of {endings}; convert it to one of them")
    first = None
    try:
        for record in readers[file.suffix](file, layout, with_labels=with_labels):
            first = first or record
            if not len(record.sequence):
                raise BadInput(f"{record.place}: the sequence is empty; give it a value, or leave out the line")
            if record.kind != first.kind:
                but = f"but {first.place} has {first.kind}"
                raise BadInput(f"{record.place} has {record.kind}, {but}; use one kind of input")
            if isinstance(record.sequence, str):
                record.sequence.encode()  # half a character is found here
            yield record
    except UnicodeError as error:
        raise BadInput(f"{file} is not a text in UTF-8: {error}; save it as UTF-8") from None
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror or error}") from error
    if first is None:
        raise BadInput(f"{file} has no sequences; it must have one at least")


def read_records(file: Path, layout: Layout | None = None) -> Records:
    """All sequences and labels of a file. What the layout names must have a meaning in it."""
    layout = layout or Layout()
    if file.suffix == ".jsonl":
        layout.refuse(str(file), OF_TABLES, "has an object in each line")
    if file.suffix == ".npy":
        layout.refuse(str(file), ("label_column", "input_column", *OF_TABLES), "is an array")
    if file.suffix in ARROW_TABLES:
        layout.refuse(str(file), ("delimiter",), "is not a text")
    if file.suffix in (*TEXT_TABLES, *ARROW_TABLES):
        with suppress(UnicodeError, OSError):  # which is told below
            layout = resolve_layout(file, layout)
    sequences, labels, kind = [], [], ""
    for record in iter_records(file, layout, with_labels=True):
        sequences.append(record.sequence)
        labels.append(record.label)
        kind = record.kind
    if kind == "texts":
        values = np.frombuffer("".join(sequences).encode("utf-32-le"), "<u4").astype(np.int64)
    else:
        values = np.concatenate(sequences)
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return Records(kind, values, lengths, np.array(labels, dtype=object), layout)


def read_splits(files: Mapping[str, Path], layout: Layout) -> dict[str, Records]:
    """All sequences and labels of each file, in the columns of the training set. One that is to be ignored need not be
    in all of the files."""
    names = {split: _column_names(file, layout) for split, file in files.items()}
    layouts = {}
    for split in files:
        elsewhere = set().union(*names.values()) - names[split]
        layouts[split] = replace(layout, ignore=tuple(name for name in layout.ignore if name not in elsewhere))
    found = {"train": read_records(files["train"], layouts["train"])}
    for split in SPLITS[1:]:
        if split in files:
            found[split] = _read_like(found["train"], files["train"].name, files[split], layouts[split])
    return found


def _column_names(file: Path, layout: Layout) -> set[str]:
    if file.suffix in (*TEXT_TABLES, *ARROW_TABLES):
        with suppress(UnicodeError, OSError):  # which is told when it is read
            return set(open_table(file, layout, with_labels=True).header)
    return set()


def _read_like(train: Records, train_name: str, file: Path, layout: Layout) -> Records:
    """Another file, whose columns and whose kind of inputs must be those of the training set. Shorter sequences have
    fewer columns at their end."""
    wanted = train.layout.columns
    found = read_records(file, train.layout if layout.group_column else layout)
    if found.layout.columns != wanted and set(found.layout.columns) == set(wanted):
        found = read_records(file, train.layout)  # in the same order
    for name, there in zip_longest(found.layout.columns if wanted else (), wanted):
        if name not in (None, there):
            where = f"which {train_name} has not" if there is None else f"where {train_name} has {shorten(there)!r}"
            both = f"{file} has the column {shorten(name)!r} {where}"
            raise BadInput(f"{both}; give both the same columns, or choose them by --columns or --ignore")
    if found.kind != train.kind:
        kinds = f"{file} has {found.kind} as inputs, but {train_name} {train.kind}"
        raise BadInput(f"{kinds}; they must be of one kind")
    return found


def _read_jsonl(file: Path, layout: Layout, *, with_labels: bool) -> Iterator[Record]:
    key, label_key = layout.input_column, layout.label_column
    form = f'{{"{key}": …, "{label_key}": …}}' if with_labels else f'{{"{key}": …}}'
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                sample = json.loads(line)
                if not isinstance(sample, dict) or key not in sample or (with_labels and label_key not in sample):
                    no_label = with_labels and isinstance(sample, dict) and label_key not in sample
                    hint = label_hint(label_key, list(sample)) if no_label else ""
                    raise BadInput(f"{place} must be {form}, got {shorten(sample)}{hint}")
                given = sample[key]
                sequence = given if isinstance(given, str) else read_array(given, place)
                record = Record(place, sequence, read_label(sample[label_key], place) if with_labels else None)
            except BadInput:
                raise
            except RecursionError:
                raise BadInput(f"{place} must be {form}, got something that is nested too deeply") from None
            except ValueError as error:  # it is not JSON, or has a number of too many digits
                raise BadInput(f"{place} must be {form}, got what cannot be read: {error}") from None
            yield record


def _read_npy(file: Path, _: Layout, *, with_labels: bool) -> Iterator[Record]:
    labels_file, lengths_file = [*companions(file)[1:], None, None][:2]  # an array alone has neither
    inputs = _load(file)
    labels = _load(labels_file) if with_labels and labels_file and labels_file.exists() else None
    lengths = _load(lengths_file) if lengths_file and lengths_file.exists() else None
    if with_labels and labels is None:
        beside = labels_file.name if labels_file else "a .labels.npy file"
        raise BadInput(f"{file} needs {beside} beside it, with a label for each sequence")
    if inputs.ndim not in (2, 3) or inputs.dtype.kind not in "biuf":
        raise BadInput(f"{file} must be numbers (N, L) or (N, L, C), got {inputs.dtype} {inputs.shape}")
    count, longest = inputs.shape[:2]
    if lengths is not None:
        fit = lengths.shape == (count,) and lengths.dtype.kind in "iu"
        if not fit or ((lengths < 1) | (lengths > longest)).any():
            name = companions(file)[2].name
            raise BadInput(f"{name} beside {file} must be {count} whole numbers from 1 to {longest}")
    if labels is not None and (labels.shape != (count,) or labels.dtype.kind not in "biufUS"):
        name, given = companions(file)[1].name, f"{labels.dtype} {labels.shape}"
        raise BadInput(f"{name} beside {file} must be numbers or texts ({count},), got {given}")
    for row in range(count):
        place = f"{file}, row {row}"
        length = longest if lengths is None else int(lengths[row])
        label = read_label(_plain(labels[row]), place) if labels is not None else None
        yield Record(place, read_array(inputs[row, :length], place), label)


def _plain(label: Any) -> Any:
    """A label of an array as Python has it."""
    given = label.item()
    return given.decode() if isinstance(given, bytes) else given


def _load(file: Path) -> np.ndarray:
    if not file.is_file():
        raise BadInput(f"{file} is not a file that can be read")
    try:
        with file.open("rb") as opened:
            return map_npy(opened)
    except BadInput as error:
        raise BadInput(f"{file} is not a plain array: {error}; write it with np.save, without objects") from None
