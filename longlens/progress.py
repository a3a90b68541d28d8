"""A progress bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between two lines where there is no terminal


@contextmanager
def progress(title: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
    """``with progress("listops", 96_000, "samples") as done: done(1000)`` says that 1000 of 96,000 are done in all."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit)
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.update(task, completed=count)
    else:
        last = time.monotonic()

        def line(count: int) -> None:
            nonlocal last
            if time.monotonic() - last >= EVERY:
                last = time.monotonic()
                print(f"{title}: {count:,} of {total:,} {unit}".rstrip(), file=sys.stderr, flush=True)

        yield line
