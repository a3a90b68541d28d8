"""A table of many columns, for terminals of any width."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.markup import escape

from longlens.reports.sheet import Sheet


class SplitSheet(Sheet):
    """A table that is cut into several where the terminal is narrow: columns of rank 0 are in all of them, the others
    follow each other."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        parts = self._parts(options.max_width)
        for number, part in enumerate(parts, start=1):
            title = self.title if len(parts) == 1 else f"{self.title} ({number} of {len(parts)})"
            columns = [self.columns[index]._replace(rank=0) for index in part]
            yield Sheet(title, columns, [[row[index] for index in part] for row in self.rows])
        yield from map(escape, self.notes)

    def _parts(self, width: int) -> list[list[int]]:
        """The columns of each table: as few tables as fit into the width, and these about equally wide."""
        repeated = [index for index, column in enumerate(self.columns) if column.rank == 0]
        others = [index for index, column in enumerate(self.columns) if column.rank > 0]
        needed = [self._width(index) + 3 for index in range(len(self.columns))]

        def fill(room: int) -> list[list[int]]:
            tables: list[list[int]] = [[]]
            for index in others:
                if tables[-1] and sum(needed[other] for other in tables[-1]) + needed[index] > room:
                    tables.append([])
                tables[-1].append(index)
            return tables

        room = max(1, width - 1 - sum(needed[index] for index in repeated))
        narrowest = min(range(1, room + 1), key=lambda room: (len(fill(room)), room))
        return [[*repeated, *part] for part in fill(narrowest)]
