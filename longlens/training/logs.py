"""What a run tells while it trains: lines of metrics.jsonl, a progress bar, TensorBoard, Weights & Biases."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from longlens.errors import BadInput
from longlens.progress import progress
from longlens.training.config import Config
from longlens.training.runtime import Runtime

Writer = Callable[[dict[str, float], int], object]


def notify(message: str) -> None:
    """A line for people, beside the progress bar."""
    print(f"longlens: {message}", file=sys.stderr, flush=True)


def open_to_append(path: Path) -> IO[str]:
    """A text file to add to. Not one that a symbolic link names, which may be anywhere."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"{path} is a symbolic link, which is not written through: delete it") from None
        raise


class Logs:
    """The logs of a run, written by its first process; in the others, nothing happens."""

    def __init__(self, file: IO[str] | None, writers: list[Writer], bar: Callable[..., None], metric: str):
        self.file = file
        self.writers = writers
        self.bar = bar
        self.metric = metric
        self.latest = ""

    def trained(self, step: int, **values: float) -> None:
        """Some steps of training."""
        self._write("train", step, values)
        self.bar(step, f"loss {values['loss']:.4f}{self.latest} · {values['tokens_per_second']:,.0f} tokens/s")

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

    def sync(self) -> None:
        """Bring the lines to the disk."""
        if self.file is not None:
            os.fsync(self.file.fileno())


@contextmanager
def open_logs(folder: Path | None, config: Config, runtime: Runtime, start: int, total: int) -> Iterator[Logs]:
    """The logs of the run in ``folder``, which is None in the processes that are silent."""
    metric = config.task.spec.metric
    with ExitStack() as stack:
        if folder is None:
            yield Logs(None, [], lambda count, note="": None, metric)
            return
        writers = []
        if runtime.tensorboard:
            writers.append(stack.enter_context(_tensorboard(folder, start)))
        if runtime.wandb is not None:
            writers.append(stack.enter_context(_wandb(folder, config, runtime.wandb)))
        file = stack.enter_context(open_to_append(folder / "metrics.jsonl"))
        title = f"{config.mixer.name} on {config.task.name}"
        bar = stack.enter_context(progress(title, total, "steps", start=start))
        yield Logs(file, writers, bar, metric)


@contextmanager
def _tensorboard(folder: Path, start: int) -> Iterator[Writer]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BadInput("tensorboard is not installed: pip install 'longlens[tensorboard]'") from None
    writer = SummaryWriter(folder / "tensorboard", purge_step=start + 1)  # what was written after it does not count

    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def _wandb(folder: Path, config: Config, project: str) -> Iterator[Writer]:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BadInput("wandb is not installed: pip install 'longlens[wandb]'") from None
    run: Any = wandb.init(project=project, dir=folder, id=folder.name, resume="allow", config=config.values())
    try:
        yield lambda values, step: run.log(values, step=step)
    finally:
        run.finish()
