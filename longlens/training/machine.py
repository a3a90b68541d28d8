"""The machine of a run: its processes, threads, kernels and memory, and what a result was made on. The same loop runs
under ``python`` and under ``torchrun``."""

import ctypes
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from longlens import __version__
from longlens.data.generate import cores as usable_cores
from longlens.errors import BadInput
from longlens.training.config import Runtime

_RUNNING = Path("/proc/loadavg")
# Options of mallopt, in bytes: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD; then those that glibc reaches by itself.
_KEPT = {-1: 2**31 - 1, -3: 2**30}
_RETURNED = {-1: 2**26, -3: 2**25}
_SHELL = 2**32 - 6  # the number of the step that is the shell of salloc; srun counts from 0


@dataclass(frozen=True)
class Processes:
    """This process and how many there are."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether it holds in some process: the same answer in all."""
        if self.count == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def on_first(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the first process: its answer, or its error, in all of them."""
        if self.count == 1:
            return function(*args)
        answer_or_error: list[Any] = [None, None]
        if self.is_first:
            try:
                answer_or_error[0] = function(*args)
            except Exception as error:
                answer_or_error[1] = error
        dist.broadcast_object_list(answer_or_error, src=0, device=self.device)
        answer, error = answer_or_error
        if error is not None:
            raise error
        return answer


@contextmanager
def join_processes(runtime: Runtime) -> Iterator[Processes]:
    """Meet the processes that torchrun started, if it did."""
    device = choose_device(runtime.device)
    if "RANK" not in os.environ:
        yield Processes(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    _meet("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        # A thread of gloo may still hold the tensor of the last sum. It needs Python's lock to give it back, which the
        # end of the group holds while it waits for the thread.
        time.sleep(0.1)
        dist.destroy_process_group()


def refuse_lone_tasks() -> None:
    """Refuse to be one of several tasks of srun that do not know of each other. SLURM_NTASKS does not tell: it is that
    of the whole job in a batch script and in the shell of salloc, where a program is started once."""
    tasks, step = (os.environ.get(f"SLURM_STEP_{name}", "") for name in ("NUM_TASKS", "ID"))
    if "RANK" not in os.environ and tasks.isdecimal() and int(tasks) > 1 and step.isdecimal() and int(step) < _SHELL:
        raise BadInput(
            f"started by srun with {tasks} tasks and no RANK, this would be {tasks} trainings that do not know of each "
            "other: start it with torchrun, one task a machine (srun --ntasks-per-node=1 torchrun …), or unset "
            "SLURM_STEP_NUM_TASKS where each is to be a run of its own"
        )


def _meet(backend: str) -> None:
    if os.environ.get("GROUP_WORLD_SIZE") != "1":  # several agents, which need not agree on how often they started
        dist.init_process_group(backend)
        return
    # When torchrun starts its processes anew, its store still has the addresses of those that died.
    store, rank, count = next(rendezvous("env://"))
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device must be cpu or auto here, got cuda: torch sees no GPU")
    return torch.device(name)


def parallelize(model: nn.Module, processes: Processes, parallel: str) -> nn.Module:
    """The model for training in all processes. Both ways average the gradients over the processes."""
    if processes.count == 1:
        return model
    if parallel == "fsdp":
        for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(block)
        fully_shard(model)
        return model
    # The norms keep their running statistics alike themselves.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 renames the argument
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def without_sync(model: nn.Module, wanted: bool) -> AbstractContextManager[Any]:
    """Skip the gradient all-reduce for all but the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not wanted)
    return model.no_sync() if wanted and isinstance(model, DistributedDataParallel) else nullcontext()


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


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """For a while; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_random(device: torch.device) -> AbstractContextManager[None]:
    """Random numbers that are drawn within it, on the CPU and on this device, leave those after it as they were."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def choose_kernels(runtime: Runtime, device: torch.device) -> Iterator[None]:
    """Kernels that give the same bits each time, where torch has them; TF32 for products of float32 on a GPU. For a
    while; then those of before."""
    settings: Any = torch.utils.deterministic
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, modes[0], warn_only=modes[1])
        stack.callback(setattr, settings, "fill_uninitialized_memory", settings.fill_uninitialized_memory)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if runtime.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = False
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high" if runtime.tf32 else "highest")
        yield


@contextmanager
def keep_memory() -> Iterator[None]:
    """Keep memory that was freed for the next tensors, for a while; then give it back. The C library of Linux returns
    large blocks to the system at once, which clears each page anew for every tensor of a step: with the logits of
    33,278 words this is half of the time. Elsewhere nothing is done."""
    try:
        libc = ctypes.CDLL(None)
        set_option, trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return
    for option, value in _KEPT.items():
        set_option(option, value)
    try:
        yield
    finally:
        for option, value in _RETURNED.items():
            set_option(option, value)
        trim(0)


class PeakMemory:
    """Bytes beyond those at the start: of tensors on a GPU, of the whole process on a CPU. There the first alone is
    measured, as others find memory that it has left; they are None."""

    is_first = True

    def __init__(self, device: torch.device):
        self.device = device
        self.is_known = PeakMemory.is_first or device.type == "cuda"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
        self.before = _used("VmRSS")

    def value(self) -> int | None:
        if not self.is_known:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, _used("VmHWM") - self.before)


def _used(name: str) -> int:
    """Bytes of this process, now (VmRSS) or at most (VmHWM); without Linux' answer, the most that it ever had."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def environment(device: torch.device) -> dict[str, object]:
    """Versions, commit, processor and threads."""
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
    """The commit of the checkout that this package is in, if it is in one; ``+changes`` if files differ from it."""
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
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()
