"""Your own sequences: a folder of CSV, JSONL or .npy files becomes a task.

The folder has ``train``, ``valid`` and ``test`` files, or fewer: what is missing is held out of the training set, where
a sample of each class stays. A single file may have any name, and is cut into three. Formats:

- ``train.csv``: a header with a column ``label``. The sequence is in the column ``input`` (text, or numbers with spaces
  between them), or in all other columns, a number each, where empty cells at the end make it shorter.
- ``train.jsonl``: an object a line, ``{"input": …, "label": …}``. The input is a text, a list of numbers, or a list of
  lists of numbers (channels).
- ``train.inputs.npy`` (N, L) or (N, L, C), ``train.labels.npy`` (N,), and ``train.lengths.npy`` (N,) if they differ.
"""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from longlens.tasks import characters
from longlens.tasks.base import SPLITS, Head, Metric, Spec, SplitName, StoredTask, register
from longlens.tasks.datasets import Samples, Sequences, as_tokens, offsets_of
from longlens.tasks.store import Details, Writer
from longlens.tasks.stream import Stream

FORMATS = (".csv", ".jsonl", ".inputs.npy")
SPECIALS = ("<pad>", "<unk>")  # before the values of a vocabulary
UNK = 1
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


@register("files")
@dataclass(frozen=True, kw_only=True)
class Files(StoredTask):
    """Your own sequences, from a folder of CSV, JSONL or .npy files.

    Args:
        path: the folder, or one file.
        inputs: tokens (whole numbers or characters) or real numbers. By default, texts are tokens, and so are numbers
            if all are written without a fraction (1, not 1.0) and in one channel.
        labels: classes, or numbers to be predicted. By default, they are to be predicted if one has a fraction.
        standardize: shift and scale real inputs, channel by channel, and numbers to be predicted, to mean 0 and
            deviation 1 over the training set.
        max_length: cut longer sequences to this. By default none is cut.
        valid_share: the part that is held out for validation, if there is no file of it.
        test_share: the part that is held out for the test, if there is no file of it.
        seed: which samples are held out.
    """

    path: str
    inputs: Literal["auto", "tokens", "real"] = "auto"
    labels: Literal["auto", "classes", "numbers"] = "auto"
    standardize: bool = True
    max_length: int | None = None
    valid_share: float = 0.1
    test_share: float = 0.1
    seed: int = 0

    summary: ClassVar[str] = "your own sequences: a folder of CSV, JSONL or .npy files"
    origin: ClassVar[str] = "your own files"
    head: ClassVar[Head] = "classify"  # or regress
    metric: ClassVar[Metric] = "accuracy"  # or r2

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(Path(self.path).expanduser()))  # a Path is welcome, but not in meta.json
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 1")
        if not (self.valid_share > 0 and self.test_share > 0 and self.valid_share + self.test_share < 1):
            shares = f"valid_share is {self.valid_share} and test_share is {self.test_share}"
            raise ValueError(f"{shares}; both must be above 0, and together below 1")

    @property
    def spec(self) -> Spec:
        details = self.prepared.details
        length = min(details["max_length"], self.max_length or details["max_length"])
        if "classes" in details:
            return Spec(details["inputs"], details["size"], length, "classify", len(details["classes"]), "accuracy")
        return Spec(details["inputs"], details["size"], length, "regress", 1, "r2")

    @property
    def title(self) -> str:
        return f"files ({Path(self.path).resolve().name})"

    @property
    def slug(self) -> str:
        return "files-" + re.sub(r"[^\w.-]+", "-", Path(self.path).resolve().name)

    def vocabulary(self) -> list[str] | None:
        return self.prepared.details.get("symbols")

    def load(self, name: SplitName, epoch: int) -> Sequences:
        values, lengths, labels = (self.prepared.array(name, key) for key in ("values", "lengths", "labels"))
        transform = np.asarray if self.prepared.details["inputs"] == "real" else as_tokens
        return Sequences(values, offsets_of(lengths), labels, transform=transform, max_length=self.max_length)

    def recipe(self) -> dict[str, Any]:
        files = [part for file in _find(Path(self.path)).values() for part in _parts(file) if part.exists()]
        stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        options = asdict(self) | {"path": str(Path(self.path).resolve())}
        del options["max_length"]  # sequences are stored whole
        return {"version": 1, "files": stamps, **options}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if source is not None:
            raise ValueError("the task 'files' reads its own --path: leave out --from")
        found = _find(Path(self.path))
        tables = {split: _read(found[split]) for split in SPLITS if split in found}
        for split, table in tables.items():
            if table.kind != tables["train"].kind:
                kinds = f"{found[split]} has {table.kind} as inputs, but {found['train'].name} {tables['train'].kind}"
                raise ValueError(f"{kinds}; they must be of one kind")
        label_details, tables = self._encode_labels(tables)
        tables = self._hold_out(tables, len(label_details.get("classes", [])))
        input_details, inputs = self._encode_inputs(tables)
        targets = {split: table.labels for split, table in tables.items()}
        if "classes" not in label_details:
            label_details["label_mean"], label_details["label_deviation"], targets = self._scale(targets)
        for split in SPLITS:
            writer.append(split, "values", inputs[split])
            writer.append(split, "lengths", tables[split].lengths)
            writer.append(split, "labels", targets[split])
        longest = max(int(table.lengths.max()) for table in tables.values())
        sizes = {split: len(tables[split].lengths) for split in SPLITS}
        return {"sizes": sizes, "max_length": longest, "source": self.path, **input_details, **label_details}

    def _encode_labels(self, tables: dict[str, Table]) -> tuple[Details, dict[str, Table]]:
        """Labels as float64, or as int64 places in the list of classes."""
        labels = [label for table in tables.values() for label in table.labels]
        texts = [label for label in labels if isinstance(label, str)]
        fractions = [label for label in labels if isinstance(label, float) and not label.is_integer()]
        if texts and self.labels == "numbers":
            raise ValueError(f"the label {texts[0]!r} in {self.path} is not a number; labels='classes' allows texts")
        if texts and fractions and self.labels == "auto":
            mixed = f"the labels in {self.path} are numbers such as {fractions[0]} and texts such as {texts[0]!r}"
            raise ValueError(f"{mixed}; correct them, or use labels='classes' if all are names of classes")
        if len(set(labels)) < 2:
            raise ValueError(f"all labels in {self.path} are {labels[0]!r}; there must be two different ones at least")
        if self.labels == "numbers" or (self.labels == "auto" and fractions):
            return {}, {split: t._replace(labels=t.labels.astype(np.float64)) for split, t in tables.items()}
        classes = sorted(set(tables["train"].labels), key=lambda label: (isinstance(label, str), label))
        place = {label: index for index, label in enumerate(classes)}  # 1 and 1.0 are the same key
        for label in labels:
            if label not in place:
                missing = f"the training set of {self.path} has no label {label!r}, but another split has"
                raise ValueError(f"{missing}; add samples of it, or use labels='numbers' if they are to be predicted")
        names = [str(int(c)) if isinstance(c, float) and c.is_integer() else str(c) for c in classes]
        encoded = {split: np.array([place[label] for label in table.labels]) for split, table in tables.items()}
        return {"classes": names}, {split: tables[split]._replace(labels=encoded[split]) for split in tables}

    def _hold_out(self, tables: dict[str, Table], classes: int) -> dict[str, Table]:
        """Train, valid and test; what has no file is held out of the training set."""
        train = tables["train"]
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
                few = (
                    f"{self.path} has too few sequences, {count}{f' of {classes} classes' if classes else ''}, to hold"
                )
                raise ValueError(f"{few} out a {split} set of {share:.0%}; change {split}_share, or add a {split} file")
            parts[split] = _take(train, order[held : held + size])
            held += size
        return {"train": _take(train, order[held:]), **parts}

    def _encode_inputs(self, tables: dict[str, Table]) -> tuple[Details, dict[str, np.ndarray]]:
        """Inputs as int32 tokens (total,) or float32 numbers (total, C)."""
        text, values = tables["train"].kind == "texts", {split: table.values for split, table in tables.items()}
        one_channel = values["train"].ndim == 1
        if self.inputs == "real" and text:
            raise ValueError(f"the inputs in {self.path} are texts, not real numbers; use inputs='tokens'")
        if self.inputs == "tokens" and not (one_channel and all((v == np.floor(v)).all() for v in values.values())):
            raise ValueError(f"the inputs in {self.path} are not all whole numbers in one channel; use inputs='real'")
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
        details = self.prepared.details
        inputs = samples.inputs[row, : samples.lengths[row]]
        if details["inputs"] == "real":
            with np.printoptions(precision=3, suppress=True, threshold=40, linewidth=110):
                shown = str(inputs.squeeze(-1) if inputs.shape[1] == 1 else inputs)
        else:
            shown = ("" if details["text"] else " ").join(details["symbols"][i] for i in inputs)
        target = samples.targets[row]
        return f"{shown}\n= {details['classes'][target] if 'classes' in details else target}"


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
        details["warning"] = f"{unknown:.0%} of a split is not in training; inputs='real' is for quantities"
    return details, encoded


def _take(table: Table, rows: np.ndarray) -> Table:
    """Some rows of a table, in the order of the table."""
    rows, starts = np.sort(rows), offsets_of(table.lengths)
    values = np.concatenate([table.values[starts[r] : starts[r + 1]] for r in rows])
    return Table(table.kind, values, table.lengths[rows], table.labels[rows])


def _find(path: Path) -> dict[str, Path]:
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


def _parts(file: Path) -> list[Path]:
    """The files that belong to this one: of arrays the inputs, the labels and the lengths, which may be missing."""
    if not file.name.endswith(".inputs.npy"):
        return [file]
    stem = file.name.removesuffix("inputs.npy")
    return [file.with_name(f"{stem}{part}.npy") for part in ("inputs", "labels", "lengths")]


def _read(file: Path) -> Table:
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
    inputs, labels, lengths = (_load(part) if part.exists() else None for part in _parts(file))
    names = [part.name for part in _parts(file)]
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
