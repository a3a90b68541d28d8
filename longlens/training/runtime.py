"""How a run is carried out: none of this decides its result. No torch here."""

import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from longlens.errors import BadInput
from longlens.options import Options, Size

_RUNNING = Path("/proc/loadavg")


@dataclass(frozen=True, kw_only=True)
class Runtime(Options):
    """Where and how to run; the result is the same up to rounding.

    Args:
        runs: Folder of all runs.
        folder: Folder of this run, instead of RUNS/TASK/MIXER/HASH.
        device: Device to train on; auto is a GPU if there is one.
        threads: Threads of a process on the CPU; by default as many as the machine has free cores.
        parallel: Under torchrun: a whole model in each process (ddp), or a part of it (fsdp).
        compile: Compile the model with torch.compile.
        deterministic: Choose kernels that give the same bits each time, where torch has them.
        tf32: Use TF32 for float32 matrix products on GPUs that have it.
        checkpoint_every: Steps between checkpoints, beside those at evaluations.
        keep: Number of checkpoints to keep, beside the best.
        log_every: Steps between lines of metrics.jsonl.
        tensorboard: Write the metrics for TensorBoard as well.
        wandb: Project of Weights & Biases to send the metrics to.
    """

    runs: Path = Path("runs")
    folder: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Size | None = None
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool = False
    deterministic: bool = True
    tf32: bool = False
    checkpoint_every: Size = 500
    keep: Size = 2
    log_every: Size = 10
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tensorboard", "wandb"):
            if getattr(self, name) not in (None, False) and find_spec(name) is None:
                raise BadInput(f"{name} is not installed: pip install 'longlens[{name}]'")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores() -> float:
    """Cores that other processes use: the load of the last minute, but no more than what runs at this moment, as a
    process that has just ended is still in the load."""
    load, running = os.getloadavg()[0], 0.0
    try:
        for _ in range(5):
            running += (int(_RUNNING.read_text().split()[3].partition("/")[0]) - 1) / 5  # without this process
            time.sleep(0.02)
    except (OSError, ValueError, IndexError):
        return load
    return min(load, running)


def choose_threads(wanted: int | None, last: int | None = None, processes: int = 1) -> tuple[int, str | None]:
    """The number of threads of each of some processes, and a line to say if it is fewer than the cores.

    Threads that wait for a core that others use make a run ten times slower than one thread does. A run that resumes
    takes as many as the last time: sums in another order have other bits.
    """
    if wanted is not None:
        return wanted, None
    if os.environ.get("OMP_NUM_THREADS", "").isdigit() and int(os.environ["OMP_NUM_THREADS"]) > 0:
        return int(os.environ["OMP_NUM_THREADS"]), None
    cores, count, why = usable_cores(), last, "as when this run was started"
    if count is None:
        why = "as others use the machine" if processes == 1 else f"for each of {processes} processes"
        count = max(1, (cores - round(busy_cores())) // processes)
    if count >= cores:
        return count, None
    return count, f"{count} of {cores} cores {why}; --threads chooses another number"
