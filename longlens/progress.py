"""A progress bar on a terminal or in a notebook, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # rich is imported when there is something to show
    from rich.console import Console
    from rich.progress import ProgressColumn

EVERY = 10.0  # seconds between two lines where there is no terminal
WIDE = 100  # columns of a terminal in which a long bar has room


class Done(Protocol):
    def __call__(self, count: int, note: str = "") -> None:
        """So many are done in all; ``note`` says more about the moment, what matters most first."""


@contextmanager
def progress(
    title: str, total: int, unit: str = "", *, start: int = 0, console: "Console | None" = None
) -> Iterator[Done]:
    """``with progress("listops", 96_000, "samples") as done: done(1000)`` says that 1000 of 96,000 are done in all.

    ``start`` were done before: the time left is estimated without them. A ``total`` of 0 is not known.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = console or Console(stderr=True)
    if console.is_terminal or (console.is_jupyter and find_spec("ipywidgets")):  # without which a notebook has no bars
        columns = _columns(unit, 24 if console.width >= WIDE else 10)
        with Progress(*columns, console=console, transient=True, expand=True) as bar:
            task = bar.add_task(title, total=total or None, completed=start, note="")
            yield lambda count, note="": bar.update(task, completed=count, note=note)
    else:
        began = last = time.monotonic()

        def line(count: int, note: str = "") -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= EVERY:
                last = now
                left = (now - began) / max(count - start, 1) * (total - count)
                known = (f" of {total:,}", f"{timedelta(seconds=round(left))} left") if total else ("", "")
                parts = [f"{title}: {count:,}{known[0]} {unit}".rstrip(), note, known[1]]
                print(" · ".join(part for part in parts if part), file=sys.stderr, flush=True)

        yield line


def _columns(unit: str, width: int) -> "list[ProgressColumn]":
    """All but the title and the note keep their width: those are cut where there is no room."""
    from rich import progress
    from rich.table import Column

    fixed = Column(no_wrap=True)
    title, note = Column(no_wrap=True, max_width=30), Column(no_wrap=True, ratio=1, overflow="ellipsis")
    if unit == "bytes":
        counts = [progress.DownloadColumn(table_column=fixed)]
    else:
        counts = [progress.MofNCompleteColumn(table_column=fixed), progress.TextColumn(unit, table_column=fixed)]
    return [
        progress.TextColumn("{task.description}", markup=False, table_column=title),
        progress.BarColumn(bar_width=width, table_column=fixed),
        *counts,
        progress.TimeRemainingColumn(compact=True, table_column=fixed),
        progress.TextColumn("{task.fields[note]}", markup=False, table_column=note),
    ]
