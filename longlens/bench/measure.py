"""What all benchmarks share: candidates measured in turn, tables that are whole at any width, a file of the figures."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console, ConsoleOptions
from torch import Tensor

from longlens.errors import BadInput
from longlens.files import check_out, write_json
from longlens.options import Device
from longlens.reports.sheet import Column, Sheet, plain_text
from longlens.training.machine import choose_device, environment

Job = Callable[[], object]
Passes = dict[str, Job]  # "forward", and "forward_backward" where there is a backward
Row = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)

NAMES = ("attention", "layer", "model", "package", "task")  # columns of names, not of numbers


def begin(device: Device, out: Path | None, **lists: tuple[Any, ...] | None) -> torch.device:
    """The device, unless a list has no value (None stands for all that there are) or ``out`` cannot be written."""
    for name, values in lists.items():
        if values is not None and not values:
            raise BadInput(f"{name} must have at least one value, got none: leave it out for the default")
    where = choose_device(device)
    check_out(out)
    return where


def passes(function: Callable[..., Tensor], inputs: Sequence[Tensor], parameters: Iterable[Tensor] = ()) -> Passes:
    """Two jobs: a function of tensors whose output has the shape of the first, and the same with all gradients."""
    weight = torch.randn_like(inputs[0])
    leaves = [x.requires_grad_() for x in (*inputs, *parameters)]

    def forward_backward() -> None:
        torch.autograd.grad(function(*inputs), leaves, weight, allow_unused=True)

    return {"forward": torch.no_grad()(lambda: function(*inputs)), "forward_backward": forward_backward}


def time_interleaved(
    jobs: Mapping[Key, Job],
    device: torch.device,
    rounds: int,
    *,
    on_turn: Callable[[int], object] = lambda turn: None,
    short: float = 0.02,
    long: float = 1.0,
) -> dict[Key, float]:
    """The best seconds of each job. All run once in turn, and that ``rounds`` times, so that a slow moment of the
    machine meets all of them.

    A job of less than ``short`` seconds is repeated within its turn to last so long. One of more than ``long`` seconds
    and five times the fastest takes part in the first round only: its figure need not be precise. ``on_turn`` is called
    after each turn with the number of turns so far, for a progress bar.
    """
    best: dict[Key, float] = {}
    repeats: dict[Key, int] = {}
    for job in jobs.values():
        job()  # allocators, caches, compilation
    for turn, (current, name) in enumerate(product(range(rounds), jobs), start=1):
        if current == 0:
            best[name] = _time(jobs[name], 1, device)
            repeats[name] = max(1, min(1000, int(short / max(best[name], 1e-9))))
        elif best[name] < max(long, 5 * min(best.values())):
            best[name] = min(best[name], _time(jobs[name], repeats[name], device))
        on_turn(turn)
    return best


def _time(job: Job, repeats: int, device: torch.device) -> float:
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        job()
    synchronize()
    return (time.perf_counter() - start) / repeats


def peak_memory(job: Job, device: torch.device) -> int:
    """The most bytes of tensors that ``job`` holds at once, beyond what was there before it."""
    job()  # what is allocated once and kept is not the job's
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        job()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    results = getattr(profiler.profiler, "kineto_results")  # noqa: B009 (not in torch's type hints)
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


def write_result(out: Path | None, device: torch.device, **result: Any) -> list[str]:
    """Write figures and the environment, if there is a place for them, and return the line that says so."""
    if out is None:
        return []
    write_json(out, {"environment": environment(device), **result})
    return [f"written to {out}"]


def make_table(title: str, rows: Iterable[Row], columns: Mapping[str, str], *notes: str) -> Sheet:
    """A line for each row. Each column has a format: ``{"step": "{step_ms:.1f} ms"}``."""

    def show(form: str, row: Row) -> str:
        try:
            return form.format_map(row)
        except (KeyError, TypeError):  # it was not measured: there is nothing, or None
            return "–"

    heads = [Column(name, int(name not in (*NAMES, "L")), number=name not in NAMES) for name in columns]
    return SplitSheet(title, heads, [[show(form, row) for form in columns.values()] for row in rows], list(notes))


class SplitSheet(Sheet):
    """A table that is cut into several where the terminal is narrow: columns of rank 0 are in all of them, the others
    follow each other."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        parts = self._parts(options.max_width)
        for number, part in enumerate(parts, start=1):
            title = self.title if len(parts) == 1 else f"{self.title} ({number} of {len(parts)})"
            columns = [self.columns[index]._replace(rank=0) for index in part]
            yield Sheet(title, columns, [[row[index] for index in part] for row in self.rows])
        yield from map(plain_text, self.notes)

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
