"""Numbers, labels and sequences as they are written in files, and the sentences about those that are not."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from longlens.errors import BadInput
from longlens.options import Option, check_options, shorten

LARGEST = float(np.finfo(np.float32).max)
LABEL_NAMES = ("label", "labels", "target", "targets", "class", "classes", "y", "category", "outcome")

Label = str | int | float


@dataclass(frozen=True)
class Layout:
    """Which columns of a table are what. For JSONL, the columns are the keys of the objects."""

    label_column: str = "label"
    input_column: str = "input"  # with the whole sequence in a cell, if there is such a column
    ignore: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # of the values or, with groups, of the channels; by default all others
    delimiter: str | None = None  # None: found in the header
    group_column: str | None = None  # of a table with a row for each time step: the sequence that it belongs to
    time_column: str | None = None
    cells: Literal["auto", "numbers", "texts"] = "auto"  # what input_column has; auto: what most of its cells have

    def to_json(self) -> dict[str, Any]:
        """As it is stored with a set or a run: what is not at its default."""
        kept = {name: value for name, value in vars(self).items() if value != getattr(Layout, name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Layout":
        """The layout that was stored; BadInput if it is none."""
        options = {field.name: Option(field.name, field.type, field.default) for field in fields(cls)}
        return cls(**check_options(options, values, "a layout"))

    def refuse(self, place: str, names: tuple[str, ...], why: str) -> None:
        """BadInput if one of the options is given, where it has no meaning."""
        for name in names:
            if getattr(self, name) != getattr(Layout, name):
                raise BadInput(f"{name} has no meaning for {place}, which {why}; leave it out")


class Record(NamedTuple):
    """A sequence and its label, as they were read."""

    place: str  # file and line, for error sentences
    sequence: str | np.ndarray  # a text, or numbers (L,) or (L, C) in int64 or float64
    label: Label | None  # None if labels were not wanted
    group: str | None = None  # the name of the sequence, where a table has one

    @property
    def kind(self) -> str:
        """What the sequence consists of, for error sentences."""
        if isinstance(self.sequence, str):
            return "texts"
        return "numbers" if self.sequence.ndim == 1 else f"numbers in {self.sequence.shape[1]} channels"


def read_array(given: Any, place: str) -> np.ndarray:
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


def read_cells(cells: list[Any], place: str, names: Sequence[str] = ()) -> np.ndarray:
    """Numbers as they are written, a cell each; empty cells at the end are none. ``names`` are those of the columns."""
    cells = [cell.strip() if isinstance(cell, str) else cell for cell in cells]
    while cells and cells[-1] == "":
        cells.pop()
    numbers = [read_number(cell) for cell in cells]
    if None in numbers:
        bad = numbers.index(None)
        hint = decimal_hint(cells[bad])
        if names and not hint and cells[bad] != "":
            column = shlex.quote(names[bad])
            hint = f"; --ignore {column} leaves out its column, --input-column {column} says that it has the sequences"
        empty = "got an empty one before others; fill it from its own row, as pandas' interpolate(axis=1) does"
        given = empty if cells[bad] == "" else f"got {shorten(cells[bad])!r}{hint}"
        raise BadInput(f"{place}: a value must be a number, and only cells at the end may be empty, {given}")
    return read_array(numbers, place)


def decimal_hint(cell: Any) -> str:
    """The end of a sentence about 0,5."""
    written = isinstance(cell, str) and re.fullmatch(r"[+-]?\d*,\d+", cell.strip())
    return "; write decimals with a point" if written else ""


def read_label(given: Any, place: str) -> Label:
    """A number if it is written as one, otherwise a text: 007 is not the class 7, and true is not the class 1."""
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, str):
        text = given.strip()
        number = None if re.match(r"[+-]?0\d", text) else read_number(text)
        given = text if number is None else number
    if isinstance(given, str) and given:
        given.encode()  # half a character is found here, and not when it is shown
        return given
    if isinstance(given, int | float) and abs(given) <= LARGEST:  # nan is not
        return given
    raise BadInput(f"{place}: the label must be a finite number or a text, and not empty, got {shorten(given)}")


def read_number(cell: Any) -> int | float | None:
    """The number that is written there, if any."""
    if isinstance(cell, bool):
        return int(cell)
    if not isinstance(cell, str):
        return cell if isinstance(cell, int | float) else None
    try:
        number = float(cell)
        if cell.lstrip("+-").isdecimal() and abs(number) <= LARGEST:  # larger ones are refused in any case
            number = int(cell)
    except ValueError:
        return None
    return None if "_" in cell else number  # Python reads 1_0 as 10


def label_hint(label_column: str, names: list[str]) -> str:
    """The end of a sentence about a missing label: a column that may be meant."""
    wanted = [label_column.lower(), *LABEL_NAMES]
    found = sorted((name for name in names if name.lower() in wanted), key=lambda name: wanted.index(name.lower()))
    return f"; if {found[0]!r} is meant, use --label-column {shlex.quote(found[0])}" if found else ""
