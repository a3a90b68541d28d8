"""The machine of a run: threads, kernels, memory, and what a result was made on. torch is imported when it is used."""

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longlens import __version__
from longlens.training.runtime import Runtime

if TYPE_CHECKING:
    import torch

_RUNNING = Path("/proc/loadavg")
_STATUS = Path("/proc/self/status")


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


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """For a while; then as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def choose_kernels(runtime: Runtime, device: "torch.device") -> Iterator[None]:
    """Kernels that give the same bits each time, where torch has them; TF32 for products of float32 on a GPU. For a
    while; then those of before."""
    import torch

    settings: Any = torch.utils.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = False
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if runtime.tf32 else "highest")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        settings.fill_uninitialized_memory = filled
        torch.set_float32_matmul_precision(precision)


class PeakMemory:
    """Bytes beyond those at the start: of tensors on a GPU, of the whole process on a CPU."""

    def __init__(self, device: "torch.device"):
        import torch

        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
        self.before = _now()

    def value(self) -> int:
        import torch

        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, _peak() - self.before)


def _now() -> int:
    return _status("VmRSS") or _peak()


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def environment(device: "torch.device") -> dict[str, object]:
    """Versions, commit, processor and threads: what a figure or a result was made on."""
    import torch

    return {
        "longlens": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    """Of the checkout that this package is in, if it is in one; ``+changes`` if files differ from it."""
    folder = Path(__file__).parents[1]
    if not (folder.parent / ".git").exists():
        return None
    try:
        options = {"cwd": folder, "capture_output": True, "text": True, "check": True, "timeout": 10}
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **options).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno", "--", "."], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
