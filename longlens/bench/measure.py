"""Time and memory of functions, fair on a noisy machine."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch

from longlens.errors import BadInput
from longlens.files import write_json
from longlens.reports.sheet import Column, Sheet
from longlens.training.machine import environment

Job = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)


@dataclass
class Timing:
    """Seconds of one candidate, one entry a round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds)


def time_interleaved(
    jobs: Mapping[Key, Job],
    device: torch.device,
    rounds: int,
    *,
    on_turn: Callable[[], object] = lambda: None,
    short: float = 0.02,
    long: float = 1.0,
) -> dict[Key, Timing]:
    """Run all jobs once in turn, and that ``rounds`` times, so that a slow moment of the machine meets all of them.

    A job of less than ``short`` seconds is repeated within its turn to last so long. One of more than ``long`` seconds
    and five times the fastest takes part in the first round only: its figure need not be precise. ``on_turn`` is called
    after each turn, for a progress bar.
    """
    timings = {name: Timing() for name in jobs}
    repeats: dict[Key, int] = {}
    for job in jobs.values():
        job()  # allocators, caches, compilation
    for current in range(rounds):
        for name, job in jobs.items():
            if current == 0:
                once = _time(job, 1, device)
                repeats[name] = max(1, min(1000, int(short / max(once, 1e-9))))
                timings[name].seconds.append(once)
            elif timings[name].best < max(long, 5 * min(timing.best for timing in timings.values())):
                timings[name].seconds.append(_time(job, repeats[name], device))
            on_turn()
    return timings


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


def check_given(**lists: tuple[Any, ...] | None) -> None:
    """Refuse lists without a value; None stands for all that there are."""
    for name, values in lists.items():
        if values is not None and not values:
            raise BadInput(f"{name} must have at least one value, got none: leave it out for the default")


def write_result(out: Path | None, device: torch.device, result: dict[str, Any]) -> list[str]:
    """Write figures and the environment, if there is a place for them, and return the line that says so."""
    if out is None:
        return []
    write_json(out, {"environment": environment(device), **result})
    return [f"written to {out}"]


def make_table(title: str, rows: list[dict[str, Any]], columns: dict[str, Callable[[Any], str]]) -> Sheet:
    """A line for each row; each column has a function that shows it. The first column is text, the others numbers."""
    cells = [[show(row) for show in columns.values()] for row in rows]
    return Sheet(title, [Column(name, number=index > 0) for index, name in enumerate(columns)], cells)
