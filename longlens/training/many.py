"""Many runs: each in a process of its own, on this machine or on a Ray cluster.

A run that fails is reported and does not stop the others; one that is finished already is not run again.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longlens.progress import progress
from longlens.training.config import Config
from longlens.training.events import Interrupted, StopSignals
from longlens.training.run import read_result, run_folder
from longlens.training.runtime import Runtime

INTERRUPTED = 75  # exit code of a run that was stopped and saved (EX_TEMPFAIL: try again)
FAILED = 3  # exit code of a run that cannot go on as it is

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Order:
    """One run, for another process."""

    config: Config
    runtime: Runtime
    folder: Path
    quiet: bool  # its messages go to log.txt in its folder

    def to_json(self) -> str:
        return json.dumps(
            {"config": self.config.model_dump(mode="json"), "runtime": self.runtime.model_dump(mode="json")}
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result or an error."""

    config: Config
    folder: Path
    result: dict[str, Any] | None = None
    error: str | None = None
    was_there: bool = False  # finished before


def run_many(
    configs: list[Config],
    runtime: Runtime,
    *,
    engine: Engine = "local",
    jobs: int = 1,
    address: str | None = None,
) -> list[Outcome]:
    """All runs, ``jobs`` at a time; on Ray, as many as the cluster has room for."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1")
    if runtime.folder is not None:
        raise ValueError("folder is for a single run: leave it out")
    runtime = runtime.model_copy(update={"runs": runtime.runs.absolute()})
    if jobs > 1 and runtime.threads is None:
        runtime = runtime.model_copy(update={"threads": max(1, (os.cpu_count() or 1) // jobs)})
    quiet = jobs > 1 or engine == "ray"
    orders = [Order(config, runtime, run_folder(config, runtime), quiet) for config in configs]
    outcomes: dict[Path, Outcome] = {}
    waiting = []
    for order in {order.folder: order for order in orders}.values():  # the same config twice is one run
        result = read_result(order.folder)
        if result is None:
            waiting.append(order)
        else:
            outcomes[order.folder] = Outcome(order.config, order.folder, result, was_there=True)
    if waiting:
        run_all = _run_locally if engine == "local" else _run_on_ray
        with progress("runs", len(waiting)) if quiet else nullcontext(lambda count: None) as done:
            for outcome in run_all(waiting, jobs, address):
                outcomes[outcome.folder] = outcome
                done(sum(order.folder in outcomes for order in waiting))
    return [outcomes[folder] for folder in dict.fromkeys(order.folder for order in orders)]


def _run_locally(orders: list[Order], jobs: int, address: str | None) -> Iterator[Outcome]:
    if address is not None:
        raise ValueError("address is that of a Ray cluster: choose the engine ray, or leave it out")
    started = Started()
    with StopSignals() as stop, ThreadPoolExecutor(jobs) as pool:
        running: set[Future[Outcome]] = {pool.submit(launch, order, started) for order in orders}
        while running:
            done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done if not future.cancelled())
            if stop.asked:
                for future in running:
                    future.cancel()
                started.stop()
    if stop.asked:
        raise Interrupted("stopped, and the runs are saved")


def _run_on_ray(orders: list[Order], jobs: int, address: str | None) -> Iterator[Outcome]:
    from longlens.integrations.ray import launch_on_ray

    return launch_on_ray(orders, address)


class Started:
    """The processes that are at work, so that they can be told to stop."""

    def __init__(self) -> None:
        self.lock, self.processes, self.stopped = threading.Lock(), set[subprocess.Popen[str]](), False

    def add(self, command: list[str], **options: Any) -> subprocess.Popen[str] | None:
        with self.lock:
            if self.stopped:
                return None
            process = subprocess.Popen(command, **options)
            self.processes.add(process)
            return process

    def stop(self) -> None:
        with self.lock:
            if not self.stopped:
                self.stopped = True
                for process in self.processes:
                    process.terminate()


def launch(order: Order, started: Started | None = None) -> Outcome:
    """One run in a process of its own, to its end."""
    order.folder.mkdir(parents=True, exist_ok=True)
    log = (order.folder / "log.txt").open("a") if order.quiet else None
    try:
        process = (started or Started()).add(
            [sys.executable, "-m", "longlens.training.many"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True,
        )  # fmt: skip
        if process is None:
            return Outcome(order.config, order.folder, error="not started")
        said, text = "", order.to_json()
        try:
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):  # Ray can cancel it only between two waits
                    said, _ = process.communicate(text, timeout=1)
                text = None
        except BaseException:
            process.terminate()
            process.wait()
            raise
    finally:
        if log is not None:
            log.close()
    result = read_result(order.folder) if process.returncode == 0 else None
    if result is not None:
        return Outcome(order.config, order.folder, result)
    where = f"; {order.folder / 'log.txt'} has more" if order.quiet else ""
    reason = said.strip() or f"its process ended with the code {process.returncode}{where}"
    return Outcome(order.config, order.folder, error=reason)


def _work() -> None:
    """The other process: train what the input asks for; the output is the reason of a failure."""
    from longlens.training.loop import train
    from longlens.training.run import RunError

    order = json.loads(sys.stdin.read())
    try:
        train(Config.model_validate(order["config"]), Runtime.model_validate(order["runtime"]))
    except Interrupted as stopped:
        print(stopped)
        sys.exit(INTERRUPTED)
    except (RunError, ValueError, OSError) as error:
        print(error)
        sys.exit(FAILED)


if __name__ == "__main__":
    _work()
