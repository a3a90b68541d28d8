"""Many runs: each in a process of its own, on this machine or on a Ray cluster. No torch here.

A run that fails is reported and does not stop the others; one that is finished already is not run again.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from longlens.errors import BadInput, Interrupted, LongLensError
from longlens.mixers.registry import layer_options, list_mixers
from longlens.mixers.registry import register as name_layer
from longlens.options import Option, Size
from longlens.progress import progress
from longlens.tasks.base import list_tasks
from longlens.tasks.base import register as name_task
from longlens.training.config import Config, Engine, Runtime
from longlens.training.logs import StopSignals, notify, open_to_append
from longlens.training.run import fingerprint, last_threads, read_result, run_folder

MOST_SAID = 10_000  # characters of an error: a pipe, which is read when the process has ended, holds 65,536 bytes


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result or an error."""

    config: Config
    folder: Path
    result: dict[str, Any] | None = None
    error: str | None = None
    was_there: bool = False  # finished before
    data: str = ""  # fingerprints of the data and of the source of a user's own layer,
    source: str = ""  # where runs of others may be beside it

    def values(self) -> dict[str, Any]:
        """All in which runs can differ, by dotted names."""
        return self.config.values() | {"data": self.data[:8], "source": self.source[:8]}


@dataclass(frozen=True)
class RunRequest:
    """One run, for another process."""

    config: Config
    runtime: Runtime
    folder: Path
    quiet: bool  # its messages go to log.txt in its folder

    def to_json(self) -> str:
        """On one line."""
        log = None if self.quiet else self.folder / "log.txt"  # for the traceback of a bug
        values = {"config": self.config.to_json(), "runtime": self.runtime.values(), "command": sys.argv, "log": log}
        task, preset = type(self.config.task), self.config.mixer.preset
        defaults = {name: option.default for name, option in preset.options.items()}
        values |= {"task": (task.__module__, task.__name__), "layer": (preset.module, preset.layer_name)}
        values |= {"fixed": dict(preset.fixed), "defaults": defaults, "path": [*map(os.path.abspath, sys.path)]}
        return json.dumps(values, default=str)


def run_many(
    configs: list[Config],
    runtime: Runtime,
    *,
    engine: Engine = "local",
    jobs: int = 1,
    address: str | None = None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """All runs, ``jobs`` at a time; on Ray, as many as the cluster has room for. ``ended`` hears of each at once."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None and main.name == __name__:  # in the process of a run
        raise BadInput("a module of layers or tasks starts runs when it is imported: do so if __name__ == '__main__'")
    if "RANK" in os.environ:
        raise BadInput("torchrun is for train: compare, sweep and reproduce start processes of their own, without it")
    engine, jobs = Option("engine", Engine).check(engine), Option("jobs", Size).check(jobs)
    if engine == "local" and address is not None:
        raise BadInput("address is that of a Ray cluster: choose the engine ray, or leave it out")
    quiet = jobs > 1 or engine == "ray"
    with StopSignals() as stop:
        stop.done = "stopped before the first run"
        requests = _make_requests(configs, runtime, jobs if engine == "local" else None, quiet)
        outcomes: dict[Path, Outcome] = {}
        waiting: list[RunRequest] = []
        for request in {request.folder: request for request in requests}.values():  # the same config twice is one run
            result = error = None
            try:
                result = read_result(request.folder)
            except BadInput as problem:  # one damaged run does not hide the others
                error = str(problem)
            if result is None and error is None:
                waiting.append(request)
            else:
                outcomes[request.folder] = Outcome(request.config, request.folder, result, error, error is None)
                ended(outcomes[request.folder])
        if waiting:
            stop.defer("stopped at once: runs may have lost what came after their last checkpoint")
            if engine == "ray":  # by name, as integrations know this room and not the other way round
                running = import_module("longlens.integrations.ray").run_on_ray(waiting, address, stop)
            else:
                running = _run_locally(waiting, jobs, stop)
            with progress("runs", len(waiting)) if quiet else nullcontext(lambda count: None) as done:
                for count, outcome in enumerate(running, 1):
                    outcomes[outcome.folder] = outcome
                    ended(outcome)
                    done(count)
    return [outcomes[folder] for folder in dict.fromkeys(request.folder for request in requests)]


def _make_requests(configs: list[Config], runtime: Runtime, jobs: int | None, quiet: bool) -> list[RunRequest]:
    """Each with its folder, and with as many threads as are free, or as its run had before it was stopped."""
    from longlens.training.machine import choose_threads  # torch

    runtime = replace(runtime, runs=runtime.runs.absolute())
    threads, note = runtime.threads or 1, None  # on Ray: what a run asks the cluster for
    if jobs is not None:
        threads, note = choose_threads(runtime.threads, processes=jobs)
    data: dict[str, str] = {}  # runs of a comparison have the same data, which is looked at once
    requests = []
    for config in configs:
        task = f"{config.task.name} {config.task.values()}"
        data[task] = data.get(task) or config.task.fingerprint()
        folder = run_folder(config, runtime, fingerprint(config, data[task]))
        last = last_threads(folder)
        own = threads if last is None else choose_threads(runtime.threads, last)[0]
        requests.append(RunRequest(config, replace(runtime, threads=own), folder, quiet))
    if note is not None:
        notify(note)
    return requests


def _run_locally(requests: list[RunRequest], jobs: int, stop: StopSignals) -> Iterator[Outcome]:
    started = ProcessPool()
    gpus: SimpleQueue[str | None] = SimpleQueue()
    visible = visible_gpus() if jobs > 1 and requests[0].runtime.device != "cpu" else []
    for gpu in islice(cycle(visible if len(visible) > 1 else [None]), jobs):
        gpus.put(gpu)

    def run(request: RunRequest) -> Outcome:
        gpu = gpus.get()
        try:
            result, error = launch(request.to_json(), request.folder, request.quiet, started, gpu)
        finally:
            gpus.put(gpu)
        return Outcome(request.config, request.folder, result, error)

    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future[Outcome]] = {pool.submit(run, request) for request in requests}
        try:
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
                if stop.asked:
                    raise Interrupted("stopped, and the runs are saved")
        finally:
            for future in running:
                future.cancel()
            started.stop()


def visible_gpus() -> list[str]:
    """The GPUs of this machine that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


class ProcessPool:
    """The processes that are at work, so that they can be told to stop."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.processes: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def start(self, command: list[str], **options: Any) -> "subprocess.Popen[str] | None":
        with self.lock:
            if self.stopped:
                return None
            process = subprocess.Popen(command, **options)
            self.processes.add(process)
            return process

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.processes:
                process.terminate()


def launch(
    request: str, folder: Path, quiet: bool, pool: ProcessPool | None = None, gpu: str | None = None
) -> tuple[dict[str, Any] | None, str | None]:
    """One run in a process of its own, to its end: its result, or its error. The process ends if this one does: its
    input, which stays open, ends then."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = open_to_append(folder / "log.txt") if quiet else None
    except (BadInput, OSError) as error:
        return None, str(error)
    with log or nullcontext():
        process = (pool or ProcessPool()).start(
            [sys.executable, "-m", "longlens.training.many"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        )
        if process is None:
            return None, "not started"
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(f"{request}\n")
                process.stdin.flush()
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):  # Ray can cancel it only between two waits
                    process.wait(timeout=1)
            said = process.stdout.read().strip()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
    try:
        result = read_result(folder) if process.returncode == 0 else None
    except BadInput as error:
        return None, str(error)
    if result is not None:
        return result, None
    more = f"; {folder / 'log.txt'} has more" if (folder / "log.txt").exists() else ""
    return None, said or f"its process ended with the code {process.returncode}{more}"


def _work() -> None:
    """The other process: train what the input asks for. The output is the reason of a failure and nothing else: what a
    layer prints goes where the messages go."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    log: Path | None = None
    try:
        with StopSignals():
            request = json.loads(sys.stdin.readline())
            threading.Thread(target=_end_with_parent, daemon=True).start()
            log = Path(request["log"]) if request["log"] else None
            sys.argv = request["command"]
            _import_own(request)
            from longlens.training.loop import train_run

            config = Config.from_json(request["config"], "the request")
            train_run(config, Runtime.make(request["runtime"], "the runtime"))
    except LongLensError as error:
        print(str(error)[:MOST_SAID], file=answer, flush=True)
        sys.exit(error.exit_code)
    except Exception as error:  # a bug, of ours or of a user's layer
        traceback.print_exc()
        if log is not None:
            with open_to_append(log) as file:
                traceback.print_exc(file=file)
        print(f"{type(error).__name__}: {error}"[:MOST_SAID], file=answer, flush=True)
        sys.exit(1)


def _import_own(request: dict[str, Any]) -> None:
    """A user's task and layer, of modules that neither LONGLENS_IMPORT nor an entry point need name: the process that
    asks for the run has imported them. It may also have given them their names."""
    sys.path[:] = dict.fromkeys([*request["path"], *sys.path])
    task, mixer = request["config"]["task"], request["config"]["mixer"]
    if task not in list_tasks():
        found = _import_class(*request["task"])
        if task not in list_tasks():
            name_task(task)(found)
    if mixer not in list_mixers():
        layer = _import_class(*request["layer"])
        if mixer not in list_mixers():
            known = layer_options(layer, mixer)
            fixed, defaults = (
                {name: known[name].check(value) for name, value in request[key].items()}
                for key in ("fixed", "defaults")
            )
            name_layer(mixer, fixed=fixed, **defaults)(layer)


def _import_class(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _end_with_parent() -> None:
    """Save and end when the process that has started this one is gone, also if it was killed."""
    while os.read(0, 1024):  # not by sys.stdin, whose lock would be held when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _work()
