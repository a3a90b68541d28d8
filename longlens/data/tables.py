"""Sequences in tables: CSV and TSV files, Parquet and Arrow files. ``longlens.tasks.files`` describes the forms.

A table is read as often as a form needs it, a row at a time, and is never in memory as a whole.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longlens.data.values import (
    LARGEST,
    Label,
    Layout,
    Record,
    decimal_hint,
    label_hint,
    read_array,
    read_cells,
    read_label,
    read_number,
)
from longlens.errors import BadInput, first_line
from longlens.options import nearest, shorten

TEXT_TABLES = (".csv", ".tsv")
ARROW_TABLES = (".parquet", ".arrow", ".feather")
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}  # that are found
BATCH = 1024  # rows of an Arrow file that are converted at once


class Row(NamedTuple):
    """The cells of a line; those of Arrow files have types, those of others are texts."""

    place: str
    cells: list[Any]


@dataclass(frozen=True)
class Table:
    """A file with named columns, whose rows can be read again and again."""

    file: Path
    top: str  # the place of the header, for error sentences
    header: list[str]
    rows: Callable[[], Iterator[Row]]


class Plan(NamedTuple):
    """What the columns of a table are, as their places."""

    label: int | None
    inputs: list[int]  # of the values, or of the channels; one if a cell has the whole sequence
    in_one_cell: bool
    group: int | None
    time: int | None


def table_records(file: Path, layout: Layout, *, with_labels: bool) -> Iterator[Record]:
    """The sequences of a table, one at a time."""
    table = open_table(file, layout, with_labels=with_labels)
    plan = make_plan(table, layout, with_labels=with_labels)
    if plan.group is not None:
        yield from _groups(table, plan)
        return
    cells = find_cells(table, plan) if plan.in_one_cell and layout.cells == "auto" else layout.cells
    names = [table.header[column] for column in plan.inputs]
    for place, row in table.rows():
        label = None if plan.label is None else read_label(row[plan.label], place)
        if plan.in_one_cell:
            sequence = _in_one_cell(row[plan.inputs[0]], cells, place)
        else:
            sequence = read_cells([row[column] for column in plan.inputs], place, names)
        yield Record(place, sequence, label)


def resolve_layout(file: Path, layout: Layout) -> Layout:
    """The layout with what was found in a table: by it, tables that are read later have the same meaning."""
    table = open_table(file, layout, with_labels=True)
    plan = make_plan(table, layout, with_labels=True)
    if plan.in_one_cell:
        return replace(layout, cells=find_cells(table, plan)) if layout.cells == "auto" else layout
    return replace(layout, columns=tuple(table.header[column] for column in plan.inputs))


def open_table(file: Path, layout: Layout, *, with_labels: bool) -> Table:
    """The table in a file, with its header."""
    if file.suffix in ARROW_TABLES:
        return _open_arrow(file)
    delimiter = layout.delimiter or _find_delimiter(file, layout, with_labels=with_labels)
    header = [name.strip() for name in next(_split(file, delimiter), Row("", [])).cells]

    def rows() -> Iterator[Row]:
        lines = _split(file, delimiter)
        next(lines, None)
        for place, cells in lines:
            if not cells:  # a blank line
                continue
            if len(cells) != len(header):
                hint = _other_delimiter(cells, delimiter, len(header))
                raise BadInput(f"{place} must have {len(header)} cells like the header, got {len(cells)}{hint}")
            yield Row(place, cells)

    return Table(file, f"{file}, line 1", header, rows)


def _split(file: Path, delimiter: str) -> Iterator[Row]:
    """The lines of a text file, cut into cells."""
    # The default allows 131,072 characters in a cell; sequences may be longer.
    before = csv.field_size_limit(2**31 - 1)
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            lines = csv.reader(text, delimiter=delimiter, strict=True)  # strict: a quote must be closed
            try:
                for cells in lines:
                    yield Row(f"{file}, line {lines.line_num}", cells)
            except csv.Error as error:
                marks = f"{DELIMITERS.get(delimiter, repr(delimiter))} and quotes"
                raise BadInput(f"{file}, line {lines.line_num}: {error}; check the {marks} there") from None
    finally:
        csv.field_size_limit(before)


def _find_delimiter(file: Path, layout: Layout, *, with_labels: bool) -> str:
    """The delimiter whose header has the columns that there must be; otherwise the one that is there most often."""
    if file.suffix == ".tsv":
        return "\t"
    wanted = {*layout.columns, layout.group_column, layout.time_column, layout.label_column if with_labels else None}
    wanted -= {None}
    headers: dict[str, list[str]] = {}
    for delimiter in DELIMITERS:
        try:
            headers[delimiter] = [name.strip() for name in next(_split(file, delimiter), Row("", [])).cells]
        except BadInput:  # which is told when the file is read with the delimiter that is chosen
            headers[delimiter] = []
        if wanted and wanted <= set(headers[delimiter]):
            return delimiter
    return max(headers, key=lambda delimiter: len(headers[delimiter]))


def _other_delimiter(cells: list[str], delimiter: str, count: int) -> str:
    """The end of a sentence about a line of too few or too many cells."""
    line = delimiter.join(cells)
    for other, name in DELIMITERS.items():
        if other != delimiter and len(line.split(other)) == count:
            used = DELIMITERS.get(delimiter, repr(delimiter))
            return f"; it has {name} between them, and the header {used}: use one delimiter"
    return ""


def _open_arrow(file: Path) -> Table:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise BadInput(f"{file} can only be read with pyarrow: pip install pyarrow") from None
    if not file.is_file():
        raise BadInput(f"{file} is not a file that can be read")

    def batches() -> Iterator[Any]:
        if file.suffix == ".parquet":
            with parquet.ParquetFile(file) as opened:
                yield opened.schema_arrow
                yield from opened.iter_batches(BATCH)
            return
        with arrow.memory_map(str(file)) as source:
            try:
                opened = arrow.ipc.open_file(source)
                found = map(opened.get_batch, range(opened.num_record_batches))
            except arrow.ArrowInvalid:  # the format of a stream has the same ending
                source.seek(0)
                opened = found = arrow.ipc.open_stream(source)
            yield opened.schema
            for batch in found:
                yield from (batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH))

    def checked() -> Iterator[Any]:
        try:
            yield from batches()
        except (arrow.ArrowException, OSError) as error:
            said = shorten(first_line(error))
            raise BadInput(f"{file} is not a whole {file.suffix} file: {said}; write it again") from None

    names = next(checked()).names
    kept = [place for place, name in enumerate(names) if not re.fullmatch(r"__index_level_\d+__", name)]  # of pandas

    def rows() -> Iterator[Row]:
        number, found = 0, checked()
        next(found)
        for batch in found:
            try:
                columns = [batch.column(place).to_pylist() for place in kept]
            except (ValueError, OverflowError) as error:  # such as a date after the year 9999
                said = shorten(first_line(error))
                raise BadInput(f"{file}: a value after row {number} cannot be read: {said}; correct it") from None
            for cells in zip(*columns, strict=True):
                yield Row(f"{file}, row {number}", [_plain_cell(cell) for cell in cells])
                number += 1

    return Table(file, str(file), [names[place].strip() for place in kept], rows)


def _plain_cell(cell: Any) -> Any:
    """A value of Arrow as if it were read from a text: what is missing is empty, and a date is written out."""
    if cell is None or cell != cell:  # nan
        return ""
    if isinstance(cell, date):  # a datetime is one
        return cell.isoformat()
    return float(cell) if isinstance(cell, Decimal) else cell


def make_plan(table: Table, layout: Layout, *, with_labels: bool) -> Plan:
    """Find the columns. BadInput names the one that is missing, and what there is."""
    header, own = table.header, {layout.label_column, layout.group_column, layout.time_column, *layout.ignore}
    place = {name: index for index, name in enumerate(header)}
    if with_labels and layout.label_column not in place:
        columns = shorten(", ".join(header)) if any(header) else "(none)"
        rule = f"one column must be {layout.label_column!r}, and one may be {layout.input_column!r}"
        raise BadInput(f"{table.top}: {rule}, got {columns}{label_hint(layout.label_column, header)}")
    for name, count in Counter(filter(None, header)).items():
        if count > 1:
            raise BadInput(f"{table.top}: the columns must have different names, got {shorten(name)!r} twice")
    # Where a model is used, what was ignored in training may be missing.
    ignored = layout.ignore if with_labels and not layout.columns else ()
    asked = {"columns": layout.columns, "ignore": ignored}
    asked |= {name: filter(None, [getattr(layout, name)]) for name in ("group_column", "time_column")}
    for option, names in asked.items():
        for name in names:
            if name not in place:
                role = "of the sequences" if option == "columns" else f"({option})"
                found = f"there is no column {shorten(name)!r} {role}"
                raise BadInput(f"{table.top}: {found}; {shorten(nearest(name, header))}")
    label = place[layout.label_column] if with_labels else None
    group, time = (place[name] if name else None for name in (layout.group_column, layout.time_column))
    one = layout.input_column
    if group is None and one not in layout.ignore and layout.columns in ((), (one,)):
        if one in place:
            return Plan(label, [place[one]], True, None, None)
        if layout.cells != "auto":
            raise BadInput(f"{table.top}: one column must be {one!r}, got {shorten(', '.join(header))}")
    names = layout.columns or [name for name in header if name not in own]
    if "" in names or not names:
        # pandas writes its index without a name, and it is no part of the sequence
        rule = f"without {one!r}, all columns but {layout.label_column!r} are the sequence"
        if group is not None:
            rule = "all other columns are channels"
        raise BadInput(f"{table.top}: {rule}; each needs a name")
    return Plan(label, [place[name] for name in names], False, group, time)


def find_cells(table: Table, plan: Plan) -> Literal["numbers", "texts"]:
    """What the column of sequences has: numbers if most cells are numbers with spaces between them, otherwise texts.

    Most, not all, so that a single bad number is an error, not a reason to read all of them as characters.
    """
    listed = re.compile(r"[\d\s.eE+-]*[,;\[][\d\s.eE+,;\[\]-]*")
    count = numbers = lists = longest = 0
    first = Row("", [])
    for row in table.rows():
        text = row.cells[plan.inputs[0]]
        if not isinstance(text, str):
            return "numbers"
        words = text.split()
        if all(read_number(word) is not None for word in words):
            numbers, longest = numbers + 1, max(longest, len(words))
        lists += bool(listed.fullmatch(text))
        first = first if count else row
        count += 1
    if longest > 1 and 2 * numbers > count:
        return "numbers"
    if count and lists == count:
        given = f"{first.place}: the input {shorten(first.cells[plan.inputs[0]])!r} has commas or brackets"
        raise BadInput(f"{given}; write numbers as 0.5 2.5, with spaces between them, and texts of digits as JSONL")
    return "texts"


def _in_one_cell(cell: Any, cells: str, place: str) -> Any:
    if isinstance(cell, str):
        return read_cells(cell.split(), place) if cells == "numbers" else cell
    return read_array(cell, place)


@dataclass
class _Group:
    """The rows of a sequence that were read so far."""

    label: Label | None
    values: list[list[int | float]] = field(default_factory=list)
    times: list[Any] = field(default_factory=list)


def _groups(table: Table, plan: Plan) -> Iterator[Record]:
    """The sequences of a table with a row for each time step: each as soon as its last row was read, so that only
    those are in memory whose rows are mixed with those of others."""
    left = Counter(_group_name(row, plan) for row in table.rows())
    opened: dict[str, _Group] = {}
    for row in table.rows():
        name, cells = _group_name(row, plan), row.cells
        label = None if plan.label is None else read_label(cells[plan.label], row.place)
        group = opened.setdefault(name, _Group(label))
        if label != group.label:
            both = f"got {shorten(label)} after {shorten(group.label)}"
            raise BadInput(f"{row.place}: the label must be the same in all rows of the group {name!r}, {both}")
        group.values.append([_channel(cells[column], table.header[column], row.place) for column in plan.inputs])
        if plan.time is not None:
            group.times.append(_time(cells[plan.time], row.place))
        left[name] -= 1
        if not left[name]:
            place = f"{table.file}, group {shorten(name)!r}"
            yield Record(place, read_array(_in_time(opened.pop(name), place), place), label, name)


def _group_name(row: Row, plan: Plan) -> str:
    assert plan.group is not None
    name = str(row.cells[plan.group]).strip()
    if not name:
        raise BadInput(f"{row.place}: the group is empty; it must name the sequence that the row belongs to")
    return name


def _channel(cell: Any, column: str, place: str) -> int | float:
    cell = cell.strip() if isinstance(cell, str) else cell
    number = read_number(cell)
    if number is None or not abs(number) <= LARGEST:  # nan is not
        given = f"got {shorten(cell)}{decimal_hint(cell)}"
        raise BadInput(f"{place}: {shorten(column)!r} must be a finite number in each row, {given}")
    return number


def _time(cell: Any, place: str) -> Any:
    """A number, or a date in the order of ISO 8601."""
    text = cell.strip() if isinstance(cell, str) else cell
    number = read_number(text)
    if number is not None and abs(number) <= LARGEST:
        return number
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise BadInput(
            f"{place}: the time must be a number or a date such as 2026-01-31T12:00:00, got {shorten(cell)}"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _in_time(group: _Group, place: str) -> list[list[int | float]]:
    """The values, sorted by time if there is one."""
    if not group.times:
        return group.values
    if len({isinstance(time, datetime) for time in group.times}) > 1:
        raise BadInput(f"{place}: its times must be all numbers or all dates, got both")
    order = sorted(range(len(group.times)), key=group.times.__getitem__)
    for before, after in pairwise(order):
        if group.times[before] == group.times[after]:
            twice = f"got {shorten(str(group.times[after]))} twice"
            raise BadInput(f"{place}: its times must be different, {twice}; give each sequence a group of its own")
    return [group.values[row] for row in order]
