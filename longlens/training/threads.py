"""How many threads a run uses, if nobody says it. No torch here."""

import os
import time
from pathlib import Path

_RUNNING = Path("/proc/loadavg")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores() -> float:
    """Cores that other processes use: the load of the last minute, but no more than what runs at this moment, as a
    process that has just ended is still in the load."""
    load = os.getloadavg()[0]
    try:
        running = 0.0
        for _ in range(5):
            running += (int(_RUNNING.read_text().split()[3].partition("/")[0]) - 1) / 5  # without this process
            time.sleep(0.02)
        return min(load, running)
    except (OSError, ValueError, IndexError):
        return load


def choose_threads(wanted: int | None, last: int | None = None, *, processes: int = 1) -> tuple[int, str | None]:
    """The number of threads of each of some processes, and a line to say if it is fewer than the cores.

    Threads that wait for a core that others use make a run ten times slower than one thread does. A run that resumes
    takes as many as the last time: sums in another order have other bits.
    """
    if wanted is not None:
        return wanted, None
    if os.environ.get("OMP_NUM_THREADS", "").isdigit() and int(os.environ["OMP_NUM_THREADS"]) > 0:
        return int(os.environ["OMP_NUM_THREADS"]), None
    cores = usable_cores()
    why = "as when this run was started"
    count = last
    if count is None:
        why = "as others use the machine" if processes == 1 else f"for each of {processes} processes"
        count = max(1, (cores - round(busy_cores())) // processes)
    if count >= cores:
        return count, None
    return count, f"{count} of {cores} cores {why}; --threads chooses another number"
