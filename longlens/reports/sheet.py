"""A table for the terminal, Markdown, LaTeX, CSV and pandas."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

WRAPPED = 16  # the least width of a column whose cells may have several lines


class Column(NamedTuple):
    """A column. Where the terminal is narrow, cells of those that ``wrap`` have several lines; then columns are left
    out, those of the largest ``rank`` first. 0 is always shown."""

    name: str
    rank: int = 0
    number: bool = False  # aligned to the right
    wrap: bool = False


@dataclass
class Sheet:
    """Rows of texts under named columns."""

    title: str
    columns: list[Column]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        shown = self._fitting(options.max_width)
        title = plain_text(self.title, "table.title") if self.title else None
        table = Table(title=title, title_justify="left")
        for index in shown:
            column = self.columns[index]
            width = None if column.wrap else self._width(index)
            table.add_column(
                plain_text(column.name), justify="right" if column.number else "left", width=width, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(plain_text(row[index]) for index in shown))
        yield table
        hidden = [column.name for index, column in enumerate(self.columns) if index not in shown]
        if hidden:
            yield plain_text(f"not shown at this width: {', '.join(hidden)}")
        yield from map(plain_text, self.notes)

    def _fitting(self, width: int) -> list[int]:
        """The columns that fit, in their order."""
        shown = list(range(len(self.columns)))
        least = [min(self._width(i), WRAPPED) if self.columns[i].wrap else self._width(i) for i in shown]
        while 1 + sum(3 + least[i] for i in shown) > width and max(self.columns[i].rank for i in shown) > 0:
            shown.remove(max(shown, key=lambda i: (self.columns[i].rank, i)))
        return shown

    def _width(self, index: int) -> int:
        return max(plain_text(cell).cell_len for cell in (self.columns[index].name, *(row[index] for row in self.rows)))

    def to_markdown(self) -> str:
        rows = [[_markdown(cell) for cell in row] for row in ([column.name for column in self.columns], *self.rows)]
        rows.insert(1, ["--:" if column.number else ":--" for column in self.columns])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def to_latex(self) -> str:
        kinds = "".join("r" if column.number else "l" for column in self.columns)
        names = " & ".join(_latex(column.name) for column in self.columns)
        lines = [" & ".join(map(_latex, row)) for row in self.rows]
        body = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", rf"{names} \\", r"\midrule"]
        return "\n".join([*body, *(rf"{line} \\" for line in lines), r"\bottomrule", r"\end{tabular}"])

    def to_csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[column.name for column in self.columns], *self.rows])
        return text.getvalue()

    def to_rows(self) -> list[dict[str, Any]]:
        """A dict for each row, in which numbers are numbers, in the units of the table, and what is empty is None. Of
        two numbers in a cell, ``44.2 ± 1.5``, the second is in a column ``test ±``."""
        names = [column.name or "name" for column in self.columns]
        names = [f"{name} ({index + 1})" if name in names[:index] else name for index, name in enumerate(names)]
        rows = []
        for row in self.rows:
            values: dict[str, Any] = {}
            for name, column, cell in zip(names, self.columns, row, strict=True):
                values |= _read_numbers(name, cell) if column.number else {name: cell}
            rows.append(values)
        return rows


def write_sheets(sheets: Sequence[Sheet], form: str) -> str:
    """Several tables in one text, without their notes: markdown, latex, csv or json."""
    if form == "json":
        tables = [{"title": sheet.title, "rows": sheet.to_rows()} for sheet in sheets]
        return json.dumps(tables, indent=1, ensure_ascii=False) + "\n"
    if form == "csv":
        return (sheets[0] if len(sheets) == 1 else _join(sheets)).to_csv()
    if form == "markdown":
        parts = [f"**{_markdown(s.title)}**\n\n{s.to_markdown()}" if s.title else s.to_markdown() for s in sheets]
    else:
        parts = [f"% {' '.join(s.title.split())}\n{s.to_latex()}" if s.title else s.to_latex() for s in sheets]
    return "\n\n".join(parts) + "\n"


def _join(sheets: Sequence[Sheet]) -> Sheet:
    """One table of several, whose titles are its first column: it has all columns that any of them has."""
    names = list(dict.fromkeys(column.name for sheet in sheets for column in sheet.columns))
    joined = Sheet("", [Column("table"), *map(Column, names)])
    for sheet in sheets:
        own = [column.name for column in sheet.columns]
        joined.rows += [
            [sheet.title, *(row[own.index(name)] if name in own else "" for name in names)] for row in sheet.rows
        ]
    return joined


NUMBER = r"([-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)(?: ?[^\W\d]+| ?%)?"
NUMBERS = re.compile(rf"×?{NUMBER}(?: ?([±×]) ?{NUMBER})?")


def _read_numbers(name: str, cell: str) -> dict[str, Any]:
    """The value of a cell in a column of numbers, or both of them; a text if it is something else."""
    match = NUMBERS.fullmatch(cell.strip())
    if match is None:
        return {name: None if cell in ("", "–") else cell}
    first, sign, second = match.groups()
    return {name: _number(first)} | ({f"{name} {sign}": _number(second)} if sign else {})


def _number(text: str) -> int | float:
    text = text.replace(",", "").replace("−", "-")
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def plain_text(content: str, style: str = "") -> Text:
    """As it is: names of recipes and folders may be any, and are neither markup nor commands to the terminal."""
    return Text("".join(c if c.isprintable() or c == "\n" else "�" for c in content), style=style)


LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}
LATEX |= {"±": r"$\pm$", "×": r"$\times$", "–": "--", "−": "$-$", "·": r"$\cdot$", "²": "$^2$", "…": r"\dots{}"}
LATEX |= {"<": "$<$", ">": "$>$", "|": "$|$", "\n": " "}


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def _markdown(text: str) -> str:
    """A cell in one line, in which nothing but letters has a meaning; an _ has none inside of a word."""
    text = re.sub(r"[\\|*`<]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
    return text.replace("\n", " ")
