"""What a run tells while it goes: lines of metrics.jsonl, a bar, TensorBoard, Weights & Biases."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from longlens.progress import progress
from longlens.training.config import Config
from longlens.training.runtime import Runtime


class Interrupted(Exception):  # noqa: N818 (nothing is wrong)
    """Someone asked the run to stop. It was saved, and the same command goes on."""


class Events:
    """The events of a run, told by its first process; in the others, nothing happens."""

    def __init__(self, path: Path | None, writers: list[Any], bar: Any, metric: str):
        self.file = path.open("a") if path is not None else None
        self.writers, self.bar, self.metric, self.latest = writers, bar, metric, ""

    def trained(self, step: int, **values: float) -> None:
        """A few steps of training."""
        self._write("train", step, values)
        note = f"loss {values['loss']:.4f}{self.latest} · {values['tokens_per_second']:,.0f} tokens/s"
        self.bar(step, note)

    def evaluated(self, step: int, **values: float) -> None:
        """An evaluation on the validation set."""
        self.latest = f" · valid {self.metric} {values[self.metric]:.4f}"
        self._write("valid", step, values)

    def _write(self, split: str, step: int, values: dict[str, float]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"split": split, "step": step, **values}) + "\n")
        self.file.flush()
        for write in self.writers:
            write({f"{split}/{name}": value for name, value in values.items()}, step)

    def to_disk(self) -> None:
        if self.file is not None:
            os.fsync(self.file.fileno())


@contextmanager
def tell_events(
    folder: Path | None, config: Config, runtime: Runtime, start: int, total: int, metric: str
) -> Iterator[Events]:
    """Events for the run in ``folder``; None in the processes that are silent."""
    with ExitStack() as stack:
        if folder is None:
            yield Events(None, [], lambda count, note="": None, metric)
            return
        writers = []
        if runtime.tensorboard:
            writers.append(stack.enter_context(_tensorboard(folder, start)))
        if runtime.wandb is not None:
            writers.append(stack.enter_context(_wandb(folder, config, runtime.wandb)))
        bar = stack.enter_context(progress(f"{config.mixer} on {config.task}", total, "steps", start=start))
        events = Events(folder / "metrics.jsonl", writers, bar, metric)
        stack.callback(lambda: events.file and events.file.close())
        yield events


@contextmanager
def _tensorboard(folder: Path, start: int) -> Iterator[Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard is not installed: pip install 'longlens[tensorboard]'") from None
    writer = SummaryWriter(folder / "tensorboard", purge_step=start + 1)  # what was told after it does not count

    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def _wandb(folder: Path, config: Config, project: str) -> Iterator[Any]:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("wandb is not installed: pip install 'longlens[wandb]'") from None
    run = wandb.init(project=project, dir=folder, id=folder.name, resume="allow", config=config.values())
    try:
        yield lambda values, step: run.log(values, step=step)
    finally:
        run.finish()


class StopSignals:
    """Within it, SIGTERM and SIGINT only set ``asked``; one more, some seconds later, stops at once.

    Not one that comes right after the first: a terminal or a scheduler sends a signal to all processes of a job, and
    those that have started others pass it on to them.
    """

    PATIENCE = 2.0  # seconds

    def __init__(self) -> None:
        self.asked, self.since = False, 0.0

    def __enter__(self) -> "StopSignals":
        self.before = {}
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self._hear)
        except ValueError:  # not in the main thread, where no signal arrives
            pass
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self.since > self.PATIENCE:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self.since = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
