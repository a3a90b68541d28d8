"""A run that is being trained: its folder, its processes, the signals to stop, and its checkpoints."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from longlens.errors import BadInput, RunError
from longlens.tasks.base import SplitName
from longlens.training import checkpoint as checkpoints
from longlens.training.checkpoint import Checkpoint
from longlens.training.config import Config, Runtime
from longlens.training.logs import Logs, StopSignals, notify
from longlens.training.machine import (
    PeakMemory,
    Processes,
    choose_kernels,
    choose_threads,
    environment,
    join_processes,
    keep_memory,
    keep_random,
    use_threads,
)
from longlens.training.run import RunFolder, disk_full_as_run_error, last_threads, run_folder
from longlens.training.run import fingerprint as find_fingerprint
from longlens.training.step import Evaluated, Schedule, evaluate


class NotFinite(Exception):  # noqa: N818 (it is told to the user as a RunError)
    """A loss or a weight of a step is not a finite number."""

    def __init__(self, what: str, step: int):
        super().__init__(what)
        self.step = step


@dataclass
class TrainState:
    """What a checkpoint holds beside tensors."""

    step: int = 0  # steps done
    evaluated: int = 0  # step of the last evaluation
    best: float | None = None  # merit of the best evaluation, as a rule its metric, and its step
    best_step: int | None = None
    last: float | None = None
    losses: float = 0.0  # sum since the last line of metrics.jsonl, and the step of that line
    logged: int = 0
    tokens: int = 0  # trained on
    seconds: float = 0.0  # in all
    training_seconds: float = 0.0  # of these, in steps of training
    computing_seconds: float = 0.0  # of these, in forward, backward and optimizer
    peak_memory: int | None = None  # not known of a second run in a process

    @classmethod
    def from_json(cls, values: Any) -> "TrainState":
        """The state that ``asdict`` gave. BadInput if it is another."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise BadInput(f"the state must have {', '.join(sorted(names))}")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            problem = error.errors()[0]
            raise BadInput(f"{problem['loc'][0]} of the state cannot be read: {problem['msg']}") from None

    def score(self, metric: float, merit: float, higher_is_better: bool) -> None:
        """Note an evaluation on the validation set, and whether it is the best by its merit: the metric, if it is a
        number."""
        self.evaluated = self.step
        self.last = metric
        if self.best is None or (merit > self.best if higher_is_better else merit < self.best):
            self.best = merit
            self.best_step = self.step

    def take_mean_loss(self) -> float:
        """The mean loss of the steps since the last line."""
        mean = self.losses / (self.step - self.logged)
        self.losses = 0.0
        self.logged = self.step
        return mean


class Clock:
    """Adds the seconds that pass to the state of a run."""

    def __init__(self, state: TrainState, began: float):
        self.state = state
        self.mark = began
        self.rate_mark = (state.training_seconds, state.tokens)
        self.count(training=False)

    def count(self, *, training: bool) -> None:
        """The seconds since the last count: of training, or of something else."""
        now = time.perf_counter()
        self.state.seconds += now - self.mark
        if training:
            self.state.training_seconds += now - self.mark
        self.mark = now

    @contextmanager
    def computing(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.state.computing_seconds += time.perf_counter() - start

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Around logs, evaluations and checkpoints."""
        self.count(training=True)
        yield
        self.count(training=False)

    def tokens_per_second(self) -> float:
        """The speed of training since the last call."""
        seconds, tokens = self.rate_mark
        self.rate_mark = (self.state.training_seconds, self.state.tokens)
        return (self.state.tokens - tokens) / max(self.state.training_seconds - seconds, 1e-9)


def count_losses(
    waiting: list[tuple[Tensor, int]], state: TrainState, processes: Processes, asked: bool
) -> tuple[bool, float]:
    """Add the losses and tokens of the last steps to the state. They wait on their device until then, so that a GPU
    need not be waited for in each step. Returns what all processes agree on: whether one of them was asked to stop, and
    the seconds of training."""
    tokens = sum(count for _, count in waiting)
    facts = torch.tensor([tokens, asked, state.training_seconds], dtype=torch.float64, device=processes.device)
    parts = torch.stack([loss for loss, _ in waiting]).double()
    *losses, tokens, stops, seconds = processes.sum(torch.cat([parts, facts])).tolist()
    for step, loss in enumerate(losses, state.step - len(losses) + 1):
        if not math.isfinite(loss):
            raise NotFinite(f"the loss is {loss}", step)
    state.losses += sum(losses)
    state.tokens += round(tokens)
    waiting.clear()
    return stops > 0, seconds / processes.count


@dataclass
class Learner:
    """What learns, and where it stands."""

    model: nn.Module
    parallel: nn.Module  # the same model as all processes train it
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    parameters: int  # how many
    class_weights: Tensor | None = None  # in the loss
    state: TrainState = field(init=False)  # these two from ``resume`` on
    clock: Clock = field(init=False)


@contextmanager
def open_run(config: Config, runtime: Runtime, fingerprint: str | None = None) -> Iterator["OpenRun"]:
    """Prepare the data, meet the other processes, and choose kernels and threads; in the end, give all of it back."""
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        fingerprint = fingerprint or find_fingerprint(config)
        processes = stack.enter_context(join_processes(runtime))
        folder = RunFolder(run_folder(config, runtime, fingerprint), runtime.keep)
        stack.enter_context(keep_random(processes.device))
        stack.enter_context(choose_kernels(runtime, processes.device))
        stack.enter_context(keep_memory())
        stack.enter_context(disk_full_as_run_error(folder.folder))
        stack.callback(folder.lock.release)
        run = OpenRun(config, runtime, fingerprint, folder, processes, stop)
        run.result = processes.on_first(folder.finished, config, fingerprint)
        if run.result is None:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", processes.count))
            count, run.note = processes.on_first(
                lambda: choose_threads(runtime.threads, last_threads(folder.folder), here)
            )
            stack.enter_context(use_threads(count))
        yield run


@dataclass
class OpenRun:
    """What the loop needs beside a model. All processes call its methods together."""

    config: Config
    runtime: Runtime
    fingerprint: str
    folder: RunFolder
    processes: Processes
    stop: StopSignals
    result: dict[str, Any] | None = None  # of a run that is finished already
    note: str | None = None  # on the number of threads

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.memory = PeakMemory(self.processes.device)

    def notify(self, message: str) -> None:
        if self.processes.is_first:
            notify(message)

    def claim(self) -> None:
        """Hold the folder from now on; signals to stop wait for the end of a step."""
        self.result = self.processes.on_first(self.folder.claim, self.config, self.fingerprint)
        PeakMemory.is_first &= self.result is not None  # what trains leaves memory behind
        if self.note is not None and self.result is None and self.processes.device.type == "cpu":
            self.notify(self.note)
        self.stop.defer("stopped at once: what came after the last checkpoint is not saved")

    def evaluate(self, model: nn.Module, split: SplitName) -> Evaluated:
        """The metric and the loss on as many samples as the config says; on the test set the score of each, too."""
        options, test = self.config.training, split == "test"
        samples = options.test_samples if test else options.valid_samples
        how: dict[str, Any] = {"samples": samples, "with_scores": test, "stop": self.stop}
        return evaluate(model, self.config.task, split, options, self.processes, **how)

    def resume(self, learner: Learner) -> TrainState:
        """Go on from the newest checkpoint that is whole, or begin."""
        found = self.processes.on_first(self._newest, learner)
        learner.state = TrainState()
        if found is not None:
            checkpoints.restore(found, learner.model, learner.optimizer)
            learner.schedule.load(found.state["schedule"])
            learner.state = TrainState.from_json(found.state["progress"])
        self.processes.on_first(self._note_start, learner.state, found is not None)
        learner.clock = Clock(learner.state, self.began)
        return learner.state

    def _newest(self, learner: Learner) -> Checkpoint | None:
        folders = self.folder.checkpoint_folders()
        for folder in folders:
            try:
                found = checkpoints.read(folder)
                if TrainState.from_json(found.state["progress"]).step != int(folder.name):
                    raise checkpoints.DamagedError("state.json is that of another step")
            except (checkpoints.DamagedError, ValueError) as error:
                aside = self.folder.put_aside(folder)
                notify(f"checkpoint {folder} is damaged ({error}) and kept as {aside.name}: the one before it is used")
                continue
            checkpoints.check(found, folder, learner.model, with_optimizer=True)
            return found
        if folders:
            notify("all checkpoints are damaged: starting from step 0")
        return None

    def _note_start(self, state: TrainState, resumes: bool) -> None:
        now = environment(self.processes.device) | {
            "processes": self.processes.count,
            "parallel": self.runtime.parallel if self.processes.count > 1 else None,
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        }
        changed = self.folder.note_environment(now)
        if changed and resumes:
            notify(f"resuming in another environment ({'; '.join(changed)}): results will not be bitwise identical")
        self.folder.forget_after(state.step, state.evaluated)

    def measure(self, learner: Learner) -> None:
        """Bring the seconds and the memory of the state up to date."""
        learner.clock.count(training=False)
        if (peak := self.memory.value()) is not None:
            learner.state.peak_memory = max(learner.state.peak_memory or 0, peak)

    def save(self, learner: Learner, logs: Logs) -> None:
        """Write a checkpoint of the step."""
        self.measure(learner)
        state = {"progress": asdict(learner.state), "schedule": learner.schedule.state()}
        collected = checkpoints.collect(learner.model, learner.optimizer, state)
        if self.processes.any(not collected.is_finite()):  # a gradient was not, though the loss was
            raise NotFinite("a weight is not finite", learner.state.step)

        def write() -> None:
            logs.sync()
            checkpoints.write(self.folder.checkpoint(learner.state.step), collected)
            self.folder.prune(learner.state.best_step)

        self.processes.on_first(write)

    def restore_best(self, learner: Learner) -> bool:
        """Whether the best checkpoint could be read."""
        found = self.processes.on_first(self._best, learner)
        if found is not None:
            checkpoints.restore(found, learner.model)
        return found is not None

    def _best(self, learner: Learner) -> Checkpoint | None:
        assert learner.state.best_step is not None
        folder = self.folder.checkpoint(learner.state.best_step)
        try:
            found = checkpoints.read(folder)
        except checkpoints.DamagedError as error:
            notify(f"the best checkpoint, {folder}, is damaged ({error}): only the last model is tested")
            return None
        checkpoints.check(found, folder, learner.model, with_optimizer=False)
        return found

    @contextmanager
    def explain_divergence(self, factor: Callable[[int], float]) -> Iterator[None]:
        """A number that is not finite ends the run, with what to do about it. ``factor`` is that of the learning rate
        after so many steps."""
        try:
            yield
        except NotFinite as problem:
            lr = factor(problem.step - 1) * self.config.training.lr
            saved = self.folder.checkpoint_folders()
            last = f"The last good checkpoint is {saved[0]}" if saved else "There is no checkpoint yet"
            raise RunError(
                f"{problem} at step {problem.step:,}, at a learning rate of {lr:.3g}: try a smaller lr, a smaller "
                f"clip, or a warm-up. {last}"
            ) from None
