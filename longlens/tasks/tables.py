"""Sequences and labels in CSV, JSONL and .npy files, as tables of numbers. ``files.py`` describes the formats."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longlens.tasks import characters
from longlens.tasks.base import SPLITS
from longlens.tasks.datasets import offsets_of

FORMATS = (".csv", ".jsonl", ".inputs.npy")
LARGEST = float(np.finfo(np.float32).max)

Label = str | int | float


class Row(NamedTuple):
    """A sequence and its label, as they were read."""

    place: str  # file and line, for error sentences
    sequence: str | np.ndarray  # a text, or numbers (L,) or (L, C) in int64 or float64
    label: Label


class Table(NamedTuple):
    """The sequences of a file or a split, one after another."""

    kind: str  # of the inputs, for error sentences
    values: np.ndarray  # (total,) or (total, C) int64 or float64; code points of texts
    lengths: np.ndarray  # (N,)
    labels: np.ndarray  # (N,) as they were read, then int64 classes or float64 numbers


def take_rows(table: Table, rows: np.ndarray) -> Table:
    """Some rows of a table, in the order of the table."""
    rows, starts = np.sort(rows), offsets_of(table.lengths)
    values = np.concatenate([table.values[starts[r] : starts[r + 1]] for r in rows])
    return Table(table.kind, values, table.lengths[rows], table.labels[rows])


def find_files(path: Path) -> dict[str, Path]:
    """The file of each split. A single one is the training set, whatever its name."""
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}; path must be one with sequences")
    files = [path] if path.is_file() else sorted(path.iterdir())
    files = [file for file in files if file.name.endswith(FORMATS) and file.is_file() and file.name[0] != "."]
    if not files:
        raise ValueError(f"{path} has no .csv, .jsonl or .inputs.npy file: help('longlens.tasks.files') describes them")
    if len(files) == 1:
        return {"train": files[0]}
    split_of = {split + suffix: split for split in SPLITS for suffix in FORMATS}
    found = {split_of.get(file.name, ""): file for file in files}
    listed = f"{path} has the files {', '.join(file.name for file in files)}"
    if "" in found or "train" not in found:
        raise ValueError(f"{listed}; name them train, valid and test, or keep one only")
    if len(found) < len(files):
        raise ValueError(f"{listed}, two of which are for the same split; keep one of them")
    return found


def companions(file: Path) -> list[Path]:
    """The files that belong to this one: of arrays the inputs, the labels and the lengths, which may be missing."""
    if not file.name.endswith(".inputs.npy"):
        return [file]
    stem = file.name.removesuffix("inputs.npy")
    return [file.with_name(f"{stem}{part}.npy") for part in ("inputs", "labels", "lengths")]


def read_table(file: Path) -> Table:
    reader = {".csv": _read_csv, ".jsonl": _read_jsonl, ".npy": _read_npy}[file.suffix]
    try:
        rows = list(reader(file))
        if not rows:
            raise ValueError(f"{file} has no sequences; it must have one at least")
        kind = _kind(rows[0])
        for row in rows:
            if not len(row.sequence):
                raise ValueError(f"{row.place}: the sequence is empty; give it a value, or leave out the line")
            if _kind(row) != kind:
                raise ValueError(f"{row.place} has {_kind(row)}, but {rows[0].place} has {kind}; use one kind of input")
        if kind == "texts":
            values = characters.code_points([str(row.sequence) for row in rows]).values.astype(np.int64)
        else:
            values = np.concatenate([row.sequence for row in rows])
    except UnicodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}; save it as UTF-8") from None
    lengths = np.array([len(row.sequence) for row in rows], dtype=np.int64)
    labels = np.array([row.label for row in rows], dtype=object)
    return Table(kind, values, lengths, labels)


def _kind(row: Row) -> str:
    if isinstance(row.sequence, str):
        return "texts"
    return "numbers" if row.sequence.ndim == 1 else f"numbers in {row.sequence.shape[1]} channels"


def _read_csv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default allows 131,072 characters in a cell; sequences may be longer
    in_one_column = []
    with open(file, newline="", encoding="utf-8-sig") as text:
        lines = csv.reader(text, strict=True)  # strict: a quote that is never closed is an error
        try:
            header = [name.strip() for name in next(lines, [])]
            _check_header(header, file)
            label = header.index("label")
            for cells in lines:
                place = f"{file}, line {lines.line_num}"
                if not cells:  # a blank line
                    continue
                if len(cells) != len(header):
                    raise ValueError(f"{place} has {len(cells)} cells; the header has {len(header)}, so must each line")
                target = _label(cells[label], place)
                if "input" in header:
                    in_one_column.append(Row(place, cells[header.index("input")], target))
                else:
                    yield Row(place, _parse(cells[:label] + cells[label + 1 :], place), target)
        except csv.Error as error:
            raise ValueError(f"{file}, line {lines.line_num}: {error}; check the commas and quotes there") from None
    yield from _numbers_or_texts(in_one_column)


def _check_header(header: list[str], file: Path) -> None:
    if header.count("label") != 1 or header.count("input") > 1:
        columns = ", ".join(header) or "(none)"
        raise ValueError(f"{file}, line 1: the columns are {columns}; one must be 'label', and one may be 'input'")
    if "input" not in header and ("" in header or len(header) == 1):
        # pandas writes its index without a name, and it is no part of the sequence
        raise ValueError(
            f"{file}, line 1: without 'input', all columns but 'label' are the sequence; each needs a name"
        )


def _numbers_or_texts(rows: list[Row]) -> list[Row]:
    """The column ``input``: numbers if most cells are numbers with spaces between them, otherwise texts.

    Most, not all, so that a single bad number is an error, not a reason to read all of them as characters.
    """
    split = [str(row.sequence).split() for row in rows]
    numbers = [words for words in split if all(_number(word) is not None for word in words)]
    if any(len(words) > 1 for words in numbers) and 2 * len(numbers) > len(rows):
        return [row._replace(sequence=_parse(words, row.place)) for row, words in zip(rows, split, strict=True)]
    if rows and all(re.fullmatch(r"[\d\s.eE+-]*[,;\[][\d\s.eE+,;\[\]-]*", str(row.sequence)) for row in rows):
        given = f"{rows[0].place}: the input {rows[0].sequence!r:.60} has commas or brackets"
        raise ValueError(f"{given}; write numbers as 0.5 2.5, with spaces between them, and texts of digits as JSONL")
    return rows


def _read_jsonl(file: Path) -> Iterator[Row]:
    with open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                sample = json.loads(line)
            except ValueError as error:
                raise ValueError(f'{place} is not JSON: {error}; it must be {{"input": …, "label": …}}') from None
            if not isinstance(sample, dict) or not {"input", "label"} <= sample.keys():
                raise ValueError(f'{place} is {sample!r:.60}; it must be {{"input": …, "label": …}}')
            given = sample["input"]
            sequence = given if isinstance(given, str) else _array(given, place)
            yield Row(place, sequence, _label(sample["label"], place))


def _read_npy(file: Path) -> Iterator[Row]:
    inputs, labels, lengths = (_load(part) if part.exists() else None for part in companions(file))
    names = [part.name for part in companions(file)]
    if inputs is None or labels is None:
        raise ValueError(f"{file} needs {names[1]} beside it, with a label for each sequence")
    if inputs.ndim not in (2, 3) or inputs.dtype.kind not in "biuf":
        raise ValueError(f"{file} is {inputs.dtype} {inputs.shape}; it must be numbers (N, L) or (N, L, C)")
    count, longest = inputs.shape[:2]
    if labels.shape != (count,) or labels.dtype.kind not in "biufUS":
        given = f"{names[1]} beside {file} is {labels.dtype} {labels.shape}"
        raise ValueError(f"{given}; it must be numbers or texts ({count},)")
    if lengths is None:
        lengths = np.full(count, longest)
    elif lengths.shape != (count,) or lengths.dtype.kind not in "iu" or ((lengths < 1) | (lengths > longest)).any():
        raise ValueError(f"{names[2]} beside {file} must be {count} whole numbers from 1 to {longest}")
    texts = labels.astype(str) if labels.dtype.kind == "S" else labels
    for i, (length, label) in enumerate(zip(lengths.tolist(), texts.tolist(), strict=True)):
        place = f"{file}, row {i}"
        yield Row(place, _array(inputs[i, :length], place), _label(label, place))


def _load(file: Path) -> np.ndarray:
    try:
        with open(file, "rb") as opened:
            return np.lib.format.read_array(opened, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{file} is not a plain array: {error}; write it with np.save, without objects") from None


def _array(given: Any, place: str) -> np.ndarray:
    """A list of numbers, or of lists of them, as int64 or float64; (L, 1) becomes (L,)."""
    try:
        array = np.asarray(given)
    except ValueError:  # lists of different sizes
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2) or 0 in array.shape[1:]:
        allowed = "a text, a list of numbers of 64 bits, or a list of such lists of one size"
        raise ValueError(f"{place}: the input is {given!r:.60}; it must be {allowed}")
    wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    usable = np.abs(wide) <= LARGEST if array.dtype.kind == "f" else wide == array  # nan is not
    if not usable.all():
        bad = f"{place}: the input has the number {array[~usable][0]}"
        raise ValueError(f"{bad}; all must be finite and fit into float32 or int64; leave out padding")
    return wide[:, 0] if wide.shape[1:] == (1,) else wide


def _parse(cells: list[str], place: str) -> np.ndarray:
    """Numbers as they are written; empty cells at the end are none."""
    cells = [cell.strip() for cell in cells]
    while cells and not cells[-1]:
        cells.pop()
    numbers = [_number(cell) for cell in cells]
    if None in numbers:
        bad = f"{place}: a value of the sequence is {cells[numbers.index(None)]!r}"
        raise ValueError(f"{bad}; it must be a number, and only cells at the end may be empty")
    return _array(numbers, place)


def _label(given: Any, place: str) -> Label:
    """A number if it is written as one, otherwise a text: 007 is not the class 7, and true is not the class 1."""
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, str):
        text = given.strip()
        number = None if re.match(r"[+-]?0\d", text) else _number(text)
        given = text if number is None else number
    if isinstance(given, str) and given:
        return given
    if isinstance(given, int | float) and abs(given) <= LARGEST:  # nan is not
        return given
    raise ValueError(f"{place}: the label is {given!r:.60}; it must be a finite number or a text, and not empty")


def _number(text: str) -> int | float | None:
    """The number that is written there, if any."""
    try:
        number = float(text)
        number = int(text) if text.lstrip("+-").isdecimal() else number
    except ValueError:
        return None
    return None if "_" in text else number  # Python reads 1_0 as 10
