"""A table for the terminal, Markdown, LaTeX, CSV and pandas."""

import csv
import io
from collections.abc import Iterator
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
        lines = [[column.name for column in self.columns], ["--:" if c.number else ":--" for c in self.columns]]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines + self.rows
        )

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


def plain_text(content: str, style: str = "") -> Text:
    """As it is: names of recipes and folders may be any, and are neither markup nor commands to the terminal."""
    return Text("".join(c if c.isprintable() or c == "\n" else "�" for c in content), style=style)


LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}
LATEX |= {"±": r"$\pm$", "×": r"$\times$", "–": "--"}


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
