"""A plugin of pytest: runs of a tiny task in processes of their own, which can be killed, stopped and started again."""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

ADDED = Path(__file__).with_name("added.py")  # a task and a mixer for these tests
TINY = [  # four batches an epoch, the last one half; checkpoints in the midst of epochs
    *"--recipe smoke --task.max-length 16 --task.sizes 56 16 16 --steps 24".split(),
    *"--evaluate-every 8 --checkpoint-every 3 --log-every 2 --threads 1".split(),
]
PRELOADED = [
    *("pytest", "longlens.cli.train", "longlens.training.loop", "longlens.training.many", "longlens.reports.tables"),
    *("longlens.tasks.atomic", "longlens.mixers.las", "torch.distributed.fsdp", "torch._inductor", "rich.progress"),
]
NEVER_THE_SAME = ("tokens_per_second", "overhead", "seconds", "peak_memory_bytes", "sha256")

# As ``setup`` of a run that is to be disturbed: it does not end before that, however busy the machine is.
SLOWLY = """
import time
import longlens.training.loop as loop
def slow_step(*args, step=loop.train_step):
    time.sleep(0.1)
    return step(*args)
loop.train_step = slow_step
"""

_IN_ANOTHER_PROCESS = """
import os
os.environ.update(environment)
for descriptor in (1, 2):
    os.dup2(os.open(f"{log}.{descriptor}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
exec(setup)
from longlens.cli import main
main(arguments)
"""


@dataclass
class Run:
    """A run that was started: by one process, or by several as torchrun would."""

    folder: Path
    log: Path  # with the rank and the descriptor behind it
    processes: list[BaseProcess] = field(default_factory=list)

    def wait(self, seconds: float = 300) -> "Run":
        for process in self.processes:
            process.join(seconds)
            assert process.exitcode is not None, f"still at work after {seconds} s: {self.said}"
        return self

    @property
    def code(self) -> int:
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, "it is still at work"
        return next((code for code in codes if code), 0)

    @property
    def is_running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def signal(self, number: int, process: int = 0) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[process].pid or 0, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def said(self) -> str:
        """On stderr."""
        return "".join(path.read_text() for path in sorted(self.log.parent.glob(f"{self.log.name}.?.2")))

    @property
    def printed(self) -> str:
        """On stdout."""
        return "".join(path.read_text() for path in sorted(self.log.parent.glob(f"{self.log.name}.?.1")))

    def checkpoints(self) -> list[int]:
        return checkpoints(self.folder)

    def wait_for(self, condition: Any, seconds: float = 240) -> None:
        """Until the condition holds, or the run has ended."""
        end = time.monotonic() + seconds
        while self.is_running and not condition():
            assert time.monotonic() < end, f"waited in vain: {self.said}"
            time.sleep(0.001)


class Runs:
    """Starts runs, and compares their folders."""

    def __init__(self, folder: Path, shared: dict[Any, Path]):
        self.folder = folder
        self.shared = shared
        self.started: list[Run] = []
        self.environment = {"LONGLENS_HOME": str(folder / "home"), "LONGLENS_IMPORT": str(ADDED)}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)

    def start(self, name: str | Path, *flags: Any, task: str = "atomic-cumsum", **options: Any) -> Run:
        """Begin, or resume, the run in a folder of this name."""
        folder = self.folder / name
        arguments = ["train", task, *TINY] if task == "atomic-cumsum" else ["train", task, "--threads", "1"]
        return self.command(folder, *arguments, "--folder", folder, *flags, **options)

    def command(self, folder: Path, *arguments: Any, processes: int = 1, setup: str = "", **environment: str) -> Run:
        """Any command of longlens, after the code ``setup``."""
        run = Run(folder, self.folder / f"said-{len(self.started)}")
        self.started.append(run)
        port = str(find_port())
        for rank in range(processes):
            several = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            }
            values = {
                "environment": self.environment | environment | (several if processes > 1 else {}),
                "arguments": [str(argument) for argument in arguments],
                "log": f"{run.log}.{rank}",
                "setup": setup,
            }
            run.processes.append(self.context.Process(target=exec, args=(_IN_ANOTHER_PROCESS, values)))
        for process in run.processes:
            process.start()
        return run

    def train(self, name: str | Path, *flags: Any, **options: Any) -> Run:
        """To its end."""
        return self.start(name, *flags, **options).wait()

    def undisturbed(self, *flags: Any, **options: Any) -> Path:
        """The folder of a run that nobody disturbed; made once for all tests of a session."""
        key = (flags, tuple(options.items()))
        if key not in self.shared:
            run = self.train(self.shared["folder"] / f"undisturbed-{len(self.shared)}", *flags, **options)
            assert run.code == 0, run.said
            self.shared[key] = run.folder
        return self.shared[key]

    def unfinished(self, name: str, step: int, *flags: Any) -> Path:
        """A run as a kill -9 after the checkpoint of a step leaves it, with all checkpoints before."""
        folder = self.folder / name
        shutil.copytree(self.undisturbed("--keep", "100", *flags), folder)
        (folder / "result.json").unlink()
        for found in checkpoints(folder):
            if found > step:
                shutil.rmtree(folder / "checkpoints" / f"{found:08d}")
        return folder

    def torchrun(self, folder: Path, *arguments: Any, options: str = "--standalone") -> "subprocess.Popen[str]":
        """The real one: two processes on this machine, unless the options say otherwise."""
        flags = options.split()
        flags += [] if "--nproc-per-node" in flags else ["--nproc-per-node", "2"]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, "-m", "longlens", "train", "atomic-cumsum"]
        command += [*TINY, "--folder", str(folder), *map(str, arguments)]
        said = Path(f"{folder}.said").open("a")  # noqa: SIM115
        environment = os.environ | self.environment | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=said, stderr=said, text=True, env=environment)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights and the moments of the last checkpoint."""
    last = folder / "checkpoints" / f"{checkpoints(folder)[-1]:08d}"
    return {
        f"{kind} {name}": tensor
        for kind in ("model", "optimizer")
        for name, tensor in load_file(last / f"{kind}.safetensors").items()
    }


def lines(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in NEVER_THE_SAME} for line in found]


def result(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "result.json").read_text())
    return {name: value for name, value in found.items() if name not in NEVER_THE_SAME}


def assert_same(folder: Path, other: Path) -> None:
    """Bit by bit: weights, moments, metrics and the result."""
    assert lines(folder) == lines(other)
    assert result(folder) == result(other)
    ours, theirs = tensors(folder), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def assert_close(folder: Path, other: Path, rtol: float = 1e-4) -> None:
    """Up to the order of sums.

    Adam makes a full step also of a gradient that is little but rounding, as that of a bias of the keys, which softmax
    takes out. So moments, the means of gradients, are compared everywhere, and weights where the gradient is more than
    a thousandth of the largest. Running means follow a bias before batch norm, which is such a weight.
    """
    ours, theirs = tensors(folder), tensors(other)
    assert ours.keys() == theirs.keys()
    for kind in ("exp_avg", "exp_avg_sq"):
        found, wanted = (
            torch.cat([tensor.flatten() for name, tensor in part.items() if name.endswith(f"/{kind}")])
            for part in (ours, theirs)
        )
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol * wanted.abs().max().item())
    loudest = max(tensor.max().item() for name, tensor in theirs.items() if name.endswith("/exp_avg_sq"))
    compared = 0
    for name, wanted in theirs.items():
        square = theirs.get(f"optimizer {name.removeprefix('model ')}/exp_avg_sq")
        if square is None:
            continue
        loud = square > 1e-6 * loudest
        compared += loud.sum().item()
        atol = rtol * wanted.abs().max().item()
        torch.testing.assert_close(
            ours[name][loud], wanted[loud], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert compared > 0.5 * sum(tensor.numel() for name, tensor in theirs.items() if name.endswith("/exp_avg"))
    for found, wanted in zip([*lines(folder), result(folder)], [*lines(other), result(other)], strict=True):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            is_exact = not isinstance(value, float)
            assert value == (wanted[name] if is_exact else pytest.approx(wanted[name], rel=10 * rtol, abs=1e-4)), name


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> dict[Any, Any]:
    return {"folder": tmp_path_factory.mktemp("undisturbed")}


@pytest.fixture
def runs(tmp_path, shared):
    made = Runs(tmp_path, shared)
    yield made
    for run in made.started:
        run.kill()


@pytest.fixture
def free_port() -> int:
    return find_port()


@pytest.fixture
def tiny(tmp_path) -> "Tiny":
    """Runs of the tiny task in this process."""
    return Tiny(tmp_path)


class Tiny:
    """``tiny.train("run", {"lr": 0.1}, keep=3)`` trains in this process and returns the folder and the result."""

    CHANGES: ClassVar[dict[str, Any]] = {
        "task.max_length": 16,
        "task.sizes": (56, 16, 16),
        "steps": 24,
        "evaluate_every": 8,
    }

    def __init__(self, folder: Path):
        self.folder = folder

    def config(self, changes: dict[str, Any] | None = None, *, task: str = "atomic-cumsum", mixer: str = "las") -> Any:
        from longlens.training.config import load_recipe

        return load_recipe("smoke", task, [mixer]).resolve(task, mixer, {**self.CHANGES, **(changes or {})})

    def train(self, name: str, changes: dict[str, Any] | None = None, *, mixer: str = "las", **runtime: Any) -> Path:
        from longlens.training.config import Runtime
        from longlens.training.loop import train_run

        folder = self.folder / name
        values = {"checkpoint_every": 3, "log_every": 2, "threads": 1, "keep": 100, **runtime}
        train_run(self.config(changes, mixer=mixer), Runtime(folder=folder, **values))
        return folder

    def unfinished(self, name: str, step: int = 12, changes: dict[str, Any] | None = None, **runtime: Any) -> Path:
        """A run as a kill after the checkpoint of a step leaves it."""
        folder = self.train(name, changes, **runtime)
        (folder / "result.json").unlink()
        for found in checkpoints(folder):
            if found > step:
                shutil.rmtree(folder / "checkpoints" / f"{found:08d}")
        return folder


@pytest.fixture
def compare():
    """The functions that compare folders of runs."""

    class Compare:
        same, close = staticmethod(assert_same), staticmethod(assert_close)
        lines, result, tensors = staticmethod(lines), staticmethod(result), staticmethod(tensors)

    return Compare
