"""Sequences and labels in CSV, JSONL and .npy files, as arrays of numbers. ``longlens.tasks.files`` describes the
formats."""

import csv
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longlens.data.datasets import SPLITS, offsets_of
from longlens.data.store import map_npy
from longlens.errors import BadInput
from longlens.options import shorten

FORMATS = (".csv", ".jsonl", ".inputs.npy")
LARGEST = float(np.finfo(np.float32).max)

Label = str | int | float


class Record(NamedTuple):
    """A sequence and its label, as they were read."""

    place: str  # file and line, for error sentences
    sequence: str | np.ndarray  # a text, or numbers (L,) or (L, C) in int64 or float64
    label: Label


class Records(NamedTuple):
    """The sequences of a file or a split, one after another."""

    kind: str  # of the inputs, for error sentences
    values: np.ndarray  # (total,) or (total, C) int64 or float64; code points of texts
    lengths: np.ndarray  # (N,)
    labels: np.ndarray  # (N,) as they were read, then int64 classes or float64 numbers

    def take(self, rows: np.ndarray) -> "Records":
        """Some of the records, in the order in which they are here."""
        rows, starts = np.sort(rows), offsets_of(self.lengths)
        values = np.concatenate([self.values[starts[r] : starts[r + 1]] for r in rows])
        return Records(self.kind, values, self.lengths[rows], self.labels[rows])


def find_files(path: Path) -> dict[str, Path]:
    """The file of each split. A single one is the training set, whatever its name."""
    if not (path.is_dir() or path.is_file()):
        raise BadInput(f"there is no file or folder {path}; path must be one with sequences")
    files = [path] if path.is_file() else sorted(path.iterdir())
    files = [file for file in files if file.name.endswith(FORMATS) and file.is_file() and file.name[0] != "."]
    if not files:
        raise BadInput(f"{path} has no .csv, .jsonl or .inputs.npy file: help('longlens.tasks.files') describes them")
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


def read_records(file: Path) -> Records:
    """All sequences and labels of a file. BadInput says what is wrong with it, and where."""
    reader = {".csv": _read_csv, ".jsonl": _read_jsonl, ".npy": _read_npy}[file.suffix]
    try:
        records = list(reader(file))
        if not records:
            raise BadInput(f"{file} has no sequences; it must have one at least")
        kind = _kind(records[0])
        for record in records:
            if not len(record.sequence):
                raise BadInput(f"{record.place}: the sequence is empty; give it a value, or leave out the line")
            if _kind(record) != kind:
                first = f"but {records[0].place} has {kind}"
                raise BadInput(f"{record.place} has {_kind(record)}, {first}; use one kind of input")
        if kind == "texts":
            joined = "".join(str(record.sequence) for record in records)
            values = np.frombuffer(joined.encode("utf-32-le"), "<u4").astype(np.int64)
        else:
            values = np.concatenate([record.sequence for record in records])
    except UnicodeError as error:
        raise BadInput(f"{file} is not a text in UTF-8: {error}; save it as UTF-8") from None
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror or error}") from error
    lengths = np.array([len(record.sequence) for record in records], dtype=np.int64)
    labels = np.array([record.label for record in records], dtype=object)
    return Records(kind, values, lengths, labels)


def _kind(record: Record) -> str:
    if isinstance(record.sequence, str):
        return "texts"
    return "numbers" if record.sequence.ndim == 1 else f"numbers in {record.sequence.shape[1]} channels"


def _read_csv(file: Path) -> Iterator[Record]:
    in_one_column = []
    # The default allows 131,072 characters in a cell; sequences may be longer.
    before = csv.field_size_limit(2**31 - 1)
    with file.open(newline="", encoding="utf-8-sig") as text:
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
                    raise BadInput(f"{place} must have {len(header)} cells like the header, got {len(cells)}")
                target = _label(cells[label], place)
                if "input" in header:
                    in_one_column.append(Record(place, cells[header.index("input")], target))
                else:
                    yield Record(place, _parse(cells[:label] + cells[label + 1 :], place), target)
        except csv.Error as error:
            raise BadInput(f"{file}, line {lines.line_num}: {error}; check the commas and quotes there") from None
        finally:
            csv.field_size_limit(before)
    yield from _numbers_or_texts(in_one_column)


def _check_header(header: list[str], file: Path) -> None:
    if "label" not in header:
        columns = shorten(", ".join(header)) if any(header) else "(none)"
        raise BadInput(f"{file}, line 1: one column must be 'label', and one may be 'input', got {columns}")
    if "input" not in header and ("" in header or len(header) == 1):
        # pandas writes its index without a name, and it is no part of the sequence
        raise BadInput(f"{file}, line 1: without 'input', all columns but 'label' are the sequence; each needs a name")
    for name in filter(None, header):
        if header.count(name) > 1:
            raise BadInput(f"{file}, line 1: the columns must have different names, got {shorten(name)!r} twice")


def _numbers_or_texts(records: list[Record]) -> list[Record]:
    """The column ``input``: numbers if most cells are numbers with spaces between them, otherwise texts.

    Most, not all, so that a single bad number is an error, not a reason to read all of them as characters.
    """
    split = [str(record.sequence).split() for record in records]
    numbers = [words for words in split if all(_number(word) is not None for word in words)]
    if any(len(words) > 1 for words in numbers) and 2 * len(numbers) > len(records):
        pairs = zip(records, split, strict=True)
        return [record._replace(sequence=_parse(words, record.place)) for record, words in pairs]
    listed = re.compile(r"[\d\s.eE+-]*[,;\[][\d\s.eE+,;\[\]-]*")
    if records and all(listed.fullmatch(str(record.sequence)) for record in records):
        given = f"{records[0].place}: the input {shorten(records[0].sequence)!r} has commas or brackets"
        raise BadInput(f"{given}; write numbers as 0.5 2.5, with spaces between them, and texts of digits as JSONL")
    return records


def _read_jsonl(file: Path) -> Iterator[Record]:
    form = '{"input": …, "label": …}'
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                sample = json.loads(line)
                if not isinstance(sample, dict) or not {"input", "label"} <= sample.keys():
                    raise BadInput(f"{place} must be {form}, got {shorten(sample)}")
                given = sample["input"]
                sequence = given if isinstance(given, str) else _array(given, place)
                record = Record(place, sequence, _label(sample["label"], place))
            except BadInput:
                raise
            except RecursionError:
                raise BadInput(f"{place} must be {form}, got something that is nested too deeply") from None
            except ValueError as error:  # it is not JSON, or has a number of too many digits
                raise BadInput(f"{place} must be {form}, got what cannot be read: {error}") from None
            yield record


def _read_npy(file: Path) -> Iterator[Record]:
    inputs, labels, lengths = (_load(part) if part.exists() else None for part in companions(file))
    names = [part.name for part in companions(file)]
    if inputs is None or labels is None:
        raise BadInput(f"{file} needs {names[1]} beside it, with a label for each sequence")
    if inputs.ndim not in (2, 3) or inputs.dtype.kind not in "biuf":
        raise BadInput(f"{file} must be numbers (N, L) or (N, L, C), got {inputs.dtype} {inputs.shape}")
    count, longest = inputs.shape[:2]
    if labels.shape != (count,) or labels.dtype.kind not in "biufUS":
        given = f"{labels.dtype} {labels.shape}"
        raise BadInput(f"{names[1]} beside {file} must be numbers or texts ({count},), got {given}")
    if lengths is None:
        lengths = np.full(count, longest)
    elif lengths.shape != (count,) or lengths.dtype.kind not in "iu" or ((lengths < 1) | (lengths > longest)).any():
        raise BadInput(f"{names[2]} beside {file} must be {count} whole numbers from 1 to {longest}")
    texts = labels.astype(str) if labels.dtype.kind == "S" else labels
    for i, (length, label) in enumerate(zip(lengths.tolist(), texts.tolist(), strict=True)):
        place = f"{file}, row {i}"
        yield Record(place, _array(inputs[i, :length], place), _label(label, place))


def _load(file: Path) -> np.ndarray:
    if not file.is_file():
        raise BadInput(f"{file} is not a file that can be read")
    try:
        with file.open("rb") as opened:
            return map_npy(opened)
    except BadInput as error:
        raise BadInput(f"{file} is not a plain array: {error}; write it with np.save, without objects") from None


def _array(given: Any, place: str) -> np.ndarray:
    """A list of numbers, or of lists of them, as int64 or float64; (L, 1) becomes (L,)."""
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):  # lists of different sizes
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2) or 0 in array.shape[1:]:
        allowed = "a text, a list of numbers of 64 bits, or a list of such lists of one size"
        raise BadInput(f"{place}: the input must be {allowed}, got {shorten(given)}")
    if array.dtype.kind == "f" and isinstance(given, list):
        # Whole numbers that need more than 64 bits become real ones, and then all others would be real as well.
        flat = given if array.ndim == 1 else list(chain.from_iterable(given))
        if flat and not any(isinstance(number, float) for number in flat):
            raise BadInput(f"{place}: whole numbers must fit into int64, got {shorten(max(flat, key=abs))}")
    wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    usable = np.abs(wide) <= LARGEST if array.dtype.kind == "f" else wide == array  # nan is not
    if not usable.all():
        bad = f"got {array[~usable][0]}"
        raise BadInput(f"{place}: all numbers must be finite and fit into float32 or int64, {bad}; leave out padding")
    return wide[:, 0] if wide.shape[1:] == (1,) else wide


def _parse(cells: list[str], place: str) -> np.ndarray:
    """Numbers as they are written; empty cells at the end are none."""
    cells = [cell.strip() for cell in cells]
    while cells and not cells[-1]:
        cells.pop()
    numbers = [_number(cell) for cell in cells]
    if None in numbers:
        given = f"got {shorten(cells[numbers.index(None)])!r}"
        raise BadInput(f"{place}: a value must be a number, and only cells at the end may be empty, {given}")
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
        given.encode()  # half a character is found here, and not when it is shown
        return given
    if isinstance(given, int | float) and abs(given) <= LARGEST:  # nan is not
        return given
    raise BadInput(f"{place}: the label must be a finite number or a text, and not empty, got {shorten(given)}")


def _number(text: str) -> int | float | None:
    """The number that is written there, if any."""
    try:
        number = float(text)
        if text.lstrip("+-").isdecimal() and abs(number) <= LARGEST:  # larger ones are refused in any case
            number = int(text)
    except ValueError:
        return None
    return None if "_" in text else number  # Python reads 1_0 as 10
