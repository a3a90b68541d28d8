"""The training loop, from top to bottom.

A step's samples follow from the seed and the step, its random numbers from the seed, the step and the process. So a
checkpoint says all with the step that it belongs to, and a run that was killed ends as if it had not been.
"""

import errno
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longlens.environment import environment
from longlens.models.model import Model, count_parameters
from longlens.tasks.base import Metric
from longlens.tasks.batches import Batch
from longlens.tasks.metrics import higher_is_better
from longlens.training import checkpoint as checkpoints
from longlens.training.config import Config
from longlens.training.distributed import Processes, join_processes, parallelize
from longlens.training.evaluate import evaluate
from longlens.training.events import Interrupted, StopSignals, tell_events
from longlens.training.memory import PeakMemory
from longlens.training.optimizer import make_optimizer, set_learning_rate
from longlens.training.run import RunError, RunFolder, read_result, run_folder, write_text
from longlens.training.runtime import Runtime
from longlens.training.schedule import Schedule
from longlens.training.step import ahead, train_step


@dataclass
class Standing:
    """Where a run stands: what a checkpoint holds beside tensors."""

    step: int = 0  # steps done
    evaluated: int = 0  # the step of the last evaluation
    best: float | None = None  # metric on the validation set, and the step that had it
    best_step: int | None = None
    last: float | None = None
    losses: float = 0.0  # sum since the last line of metrics.jsonl, and its step
    logged: int = 0
    tokens: int = 0  # trained on
    seconds: float = 0.0  # in all
    training: float = 0.0  # of these, in steps of training
    computing: float = 0.0  # of these, in forward, backward and optimizer
    peak_memory: int = 0


def train(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train, and return the result. A finished run gives its result at once, an unfinished one goes on."""
    runtime = runtime or Runtime()
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        processes = stack.enter_context(join_processes(runtime))
        stack.enter_context(_reproducible())
        run = RunFolder(run_folder(config, runtime), runtime.keep)
        training = Training(config, runtime, run, processes, stop)  # refuses what does not fit before a file is written
        stack.enter_context(_room_in(run.folder))
        result = processes.first_says(lambda: stack.enter_context(run.claimed(config)) and read_result(run.folder))
        return training.run_all() if result is None else result


class Training:
    """A run in this process."""

    def __init__(self, config: Config, runtime: Runtime, run: RunFolder, processes: Processes, stop: StopSignals):
        self.config, self.runtime, self.run, self.processes, self.stop = config, runtime, run, processes, stop
        self.began, self.memory = time.perf_counter(), PeakMemory(processes.device)
        self.options, self.task = config.training, config.create_task()
        self.metric: Metric = self.task.spec.metric

        torch.manual_seed(self.options.seed)
        self.model = Model(self.task.spec, config.create_mixer(), config.model).to(processes.device)
        self.parameters = count_parameters(self.model)
        if runtime.compile:
            self.model.compile()
        self.parallel = parallelize(self.model, processes, runtime.parallel)
        self.optimizer = make_optimizer(self.model, self.options)

        self.per_epoch = math.ceil(len(self.task.split("train")) / self.options.batch_size)
        self.total = self.options.steps or math.ceil((self.options.epochs or 0) * self.per_epoch)
        self.evaluate_every = self.options.evaluate_every or self.per_epoch
        self.schedule = Schedule(self.options, self.total, higher_is_better(self.metric))
        self.at = Standing()
        self.pending: list[Tensor] = []  # losses that nobody has looked at, so that a GPU need not be waited for
        self.tokens = 0  # of their steps, in this process

    def run_all(self) -> dict[str, Any]:
        """Go on from the last checkpoint, or begin; train to the end; test."""
        self.resume()
        folder = self.run.folder if self.processes.is_first else None
        with tell_events(folder, self.config, self.runtime, self.at.step, self.total, self.metric) as self.events:
            if self.evaluation_is_due():  # it was stopped in the midst of one
                self.evaluate()
            tick = time.perf_counter()
            for batch in ahead(self.batches()):
                self.seed_step()
                lr = self.schedule.share(self.at.step) * self.options.lr
                set_learning_rate(self.optimizer, self.schedule.share(self.at.step))
                start = time.perf_counter()
                loss = train_step(self.parallel, self.task.spec, self.optimizer, batch, self.options, self.processes)
                self.at.computing += time.perf_counter() - start
                self.at.step += 1
                self.pending.append(loss)
                self.tokens += batch.tokens

                is_logged = self.at.step % self.runtime.log_every == 0 or self.at.step == self.total
                is_saved = self.at.step % self.runtime.checkpoint_every == 0
                asked = False
                if is_logged or is_saved or self.evaluation_is_due() or self.processes.device.type == "cpu":
                    asked = self.settle()
                self.at.training += time.perf_counter() - tick
                tick = time.perf_counter()
                if is_logged:
                    self.log(lr)
                if self.evaluation_is_due() and not asked:
                    self.evaluate()
                    tick = time.perf_counter()
                elif is_saved or asked:
                    self.save()
                    tick = time.perf_counter()
                if asked:
                    raise Interrupted(f"stopped at step {self.at.step:,} of {self.total:,}, and saved")
            return self.finish()

    def resume(self) -> None:
        """From the newest checkpoint that is whole, if there is one."""
        found = self._in_all(self._newest() if self.processes.is_first else None)
        if found is not None:
            checkpoints.restore(found, self.model, self.optimizer)
            self.schedule.load(found.state["schedule"])
            self.at = Standing(**found.state["standing"])
        self.seconds_before = self.at.seconds
        self.mark = (self.at.training, self.at.tokens)
        if self.processes.is_first:
            now = environment(self.processes.device) | {
                "processes": self.processes.count,
                "parallel": self.runtime.parallel if self.processes.count > 1 else None,
                "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            }
            changed = self.run.note_environment(now)
            if changed and found is not None:
                _warn(f"this run goes on elsewhere ({'; '.join(changed)}): it will not end bitwise as without a stop")
            self.run.forget_after(self.at.step, self.at.evaluated)

    def _in_all(self, found: checkpoints.Checkpoint | None) -> checkpoints.Checkpoint | None:
        """What the first process has found: in the others its state, but no tensors."""
        state = self.processes.from_first(found.state if found is not None else None)
        return checkpoints.Checkpoint(state, {}, {}) if found is None and state is not None else found

    def _newest(self) -> checkpoints.Checkpoint | None:
        for folder in self.run.checkpoint_folders():
            try:
                return checkpoints.read(folder)
            except checkpoints.DamagedError as error:
                _warn(f"checkpoint {folder} is damaged ({error}): the one before it is used")
        if self.run.checkpoint_folders():
            _warn("no checkpoint is whole: the run begins anew")
        return None

    def batches(self) -> Iterator[Batch]:
        """One for each step that is left."""
        options, left = self.options, self.total - self.at.step
        epoch, start = divmod(self.at.step, self.per_epoch)
        while left > 0:
            batches = self.task.batches(
                "train", options.batch_size, epoch=epoch, start=start, seed=options.seed, shuffle=True,
                group_by_length=options.group_by_length, rank=self.processes.rank, world_size=self.processes.count,
            )  # fmt: skip
            yield from islice(batches, left)
            left -= len(batches)
            epoch, start = epoch + 1, 0

    def seed_step(self) -> None:
        """The generators of this device only: ``torch.manual_seed`` takes a millisecond to look for others."""
        key = f"{self.options.seed} {self.at.step} {self.processes.rank}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
        torch.default_generator.manual_seed(seed)
        if self.processes.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def settle(self) -> bool:
        """Look at the losses of the last steps; hear whether some process was asked to stop."""
        facts = torch.tensor([self.tokens, self.stop.asked], dtype=torch.float64, device=self.processes.device)
        *losses, tokens, asked = self.processes.sum(torch.cat([torch.stack(self.pending).double(), facts])).tolist()
        for step, loss in enumerate(losses, self.at.step - len(losses) + 1):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss is {loss}", step)
        self.at.losses += sum(losses)
        self.at.tokens += round(tokens)
        self.pending, self.tokens = [], 0
        return asked > 0

    def _diverged(self, what: str, step: int) -> RunError:
        lr, saved = self.schedule.share(step - 1) * self.options.lr, self.run.checkpoint_folders()
        return RunError(
            f"{what} at step {step:,}, at a learning rate of {lr:.3g}: try a smaller lr, a smaller clip, or a warm-up. "
            f"The last good checkpoint is {saved[0] if saved else 'that of no step'}"
        )

    def log(self, lr: float) -> None:
        """A line of metrics.jsonl: the mean loss since the last one."""
        steps, self.at.logged = self.at.step - self.at.logged, self.at.step
        seconds, tokens = self.mark
        self.mark = (self.at.training, self.at.tokens)
        rate = (self.at.tokens - tokens) / max(self.at.training - seconds, 1e-9)
        self.events.trained(self.at.step, loss=self.at.losses / steps, lr=lr, tokens_per_second=rate)
        self.at.losses = 0.0

    def _count_seconds(self) -> None:
        self.at.seconds = self.seconds_before + time.perf_counter() - self.began
        self.at.peak_memory = max(self.at.peak_memory, self.memory.value())

    def evaluation_is_due(self) -> bool:
        at_interval = self.at.step % self.evaluate_every == 0 or self.at.step == self.total
        return at_interval and self.at.evaluated < self.at.step

    def evaluate(self) -> None:
        """On the validation set; then save. An evaluation that is stopped is made when the run goes on."""
        try:
            metric, loss = evaluate(
                self.model, self.task, "valid", self.options, self.processes, samples=self.options.valid_samples,
                stop=self.stop,
            )  # fmt: skip
        except Interrupted:
            self.save()
            raise
        if not math.isfinite(loss):
            raise self._diverged(f"the loss on validation is {loss}", self.at.step)
        self.at.evaluated, self.at.last = self.at.step, metric
        better = higher_is_better(self.metric)
        if self.at.best is None or (metric > self.at.best if better else metric < self.at.best):
            self.at.best, self.at.best_step = metric, self.at.step
        self.schedule.evaluated(metric)
        self.events.evaluated(self.at.step, loss=loss, **{self.metric: metric})
        self.save()

    def save(self) -> None:
        """A checkpoint of the step."""
        self._count_seconds()
        epoch, batch = divmod(self.at.step, self.per_epoch)
        state = {
            "standing": asdict(self.at),
            "schedule": self.schedule.state(),
            "sampler": {"seed": self.options.seed, "epoch": epoch, "batch": batch},
            "random": "each step's numbers are seeded by the seed, the step and the process",
        }
        collected = checkpoints.collect(self.model, self.optimizer, state)
        if self.processes.any(not collected.is_finite()):  # a gradient was not, though the loss was
            raise self._diverged("a weight is not finite", self.at.step)
        if self.processes.is_first:
            self.events.to_disk()
            checkpoints.write(self.run.checkpoint(self.at.step), collected)
            self.run.prune(self.at.best_step)

    def finish(self) -> dict[str, Any]:
        """Test the last model and the best on validation, once; write the result."""
        test = {"last": self.test()}
        if self.at.best_step == self.at.step:
            test["best"] = test["last"]
        else:
            best = self._in_all(self._best() if self.processes.is_first else None)
            if best is not None:
                checkpoints.restore(best, self.model)
                test["best"] = self.test()
        self._count_seconds()
        on_cpu = self.processes.device.type == "cpu"
        result = {
            "task": self.task.title,
            "mixer": self.config.mixer,
            "seed": self.options.seed,
            "metric": self.metric,
            "test": test.get("best"),  # of the best model on the validation set
            "test_last": test["last"],
            "test_samples": min(self.options.test_samples or math.inf, len(self.task.split("test"))),
            "valid": self.at.best,
            "valid_last": self.at.last,
            "best_step": self.at.best_step,
            "steps": self.at.step,
            "parameters": self.parameters,
            "tokens": self.at.tokens,
            "tokens_per_second": self.at.tokens / max(self.at.training, 1e-9),
            "overhead": 1 - self.at.computing / max(self.at.training, 1e-9)
            if on_cpu
            else None,  # a GPU is not waited for
            "seconds": self.at.seconds,
            "peak_memory_bytes": self.at.peak_memory,
        }
        if self.processes.is_first:
            write_text(self.run.folder / "result.json", json.dumps(result, indent=1))
        return result

    def test(self) -> float:
        samples = self.options.test_samples
        return evaluate(self.model, self.task, "test", self.options, self.processes, samples=samples, stop=self.stop)[0]

    def _best(self) -> checkpoints.Checkpoint | None:
        assert self.at.best_step is not None
        folder = self.run.checkpoint(self.at.best_step)
        try:
            return checkpoints.read(folder)
        except checkpoints.DamagedError as error:
            _warn(f"the best checkpoint, {folder}, is damaged ({error}): only the last model is tested")
            return None


@contextmanager
def _reproducible() -> Iterator[None]:
    """Kernels that give the same bits each time, where torch has them."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warn_only)
        settings.fill_uninitialized_memory = before[1]


@contextmanager
def _room_in(folder: Path) -> Iterator[None]:
    """A full disk is an error of its own."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunError(
            f"there is no room left for {folder}: make some, and the same command goes on from the last checkpoint"
        ) from error


def _warn(message: str) -> None:
    print(f"longlens: {message}", file=sys.stderr, flush=True)
