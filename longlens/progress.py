"""A progress bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between two lines where there is no terminal


class Done(Protocol):
    def __call__(self, count: int, note: str = "") -> None:
        """So many are done in all; ``note`` says more about the moment."""


@contextmanager
def progress(title: str, total: int, unit: str = "", *, start: int = 0) -> Iterator[Done]:
    """``with progress("listops", 96_000, "samples") as done: done(1000)`` says that 1000 of 96,000 are done in all.

    ``start`` were done before: the time left is estimated without them.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn()
        columns = *columns, TextColumn(unit), TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total, completed=start, note="")
            yield lambda count, note="": bar.update(task, completed=count, note=note)
    else:
        began = last = time.monotonic()

        def line(count: int, note: str = "") -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= EVERY:
                last = now
                left = (now - began) / max(count - start, 1) * (total - count)
                parts = [f"{title}: {count:,} of {total:,} {unit}".rstrip(), note, f"{_clock(left)} left"]
                print(" · ".join(part for part in parts if part), file=sys.stderr, flush=True)

        yield line


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
