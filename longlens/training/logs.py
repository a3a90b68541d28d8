"""What a run tells while it trains (metrics.jsonl, a progress bar, TensorBoard, Weights & Biases), and what it is told:
signals to stop. No torch here."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from longlens.errors import BadInput, Interrupted
from longlens.progress import Done, progress
from longlens.training.config import Config, Runtime

Writer = Callable[[dict[str, float], int], object]


def notify(message: str) -> None:
    """A line for people, beside the progress bar."""
    print(f"longlens: {message}", file=sys.stderr, flush=True)


def open_to_append(path: Path) -> IO[str]:
    """A text file to add to. Not one that a symbolic link names, which may be anywhere, and not a pipe."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would be waited for
    try:
        return os.fdopen(os.open(path, flags, 0o666), "a")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"{path} is a symbolic link, which is not written through: delete it") from None
        raise


@dataclass
class Logs:
    """The logs of a run, written by its first process; in the others, nothing happens."""

    metric: str
    file: IO[str] | None = None
    bar: Done = lambda count, note="": None
    writers: list[Writer] = field(default_factory=list)
    latest: str = ""  # evaluation, for the progress bar

    def trained(self, step: int, **values: float) -> None:
        self._write("train", step, values)
        self.bar(step, f"loss {values['loss']:.4f}{self.latest} · {values['tokens_per_second']:,.0f} tokens/s")

    def evaluated(self, step: int, **values: float) -> None:
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
    logs = Logs(config.task.spec.metric)
    if folder is None:
        yield logs
        return
    with ExitStack() as stack:
        if runtime.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(folder / "tensorboard", purge_step=start + 1)  # what was written after it is void
            stack.callback(board.close)

            def write_scalars(values: dict[str, float], step: int) -> None:
                for name, value in values.items():
                    board.add_scalar(name, value, step)

            logs.writers.append(write_scalars)
        if runtime.wandb is not None:
            import wandb  # pyright: ignore[reportMissingImports]

            from longlens.training.run import read_identity

            values, digest = config.values(), read_identity(folder).digest
            run: Any = wandb.init(project=runtime.wandb, dir=folder, id=digest, resume="allow", config=values)
            stack.callback(run.finish)
            logs.writers.append(lambda values, step: run.log(values, step=step))
        logs.file = stack.enter_context(open_to_append(folder / "metrics.jsonl"))
        title = f"{config.mixer.name} on {config.task.name}"
        logs.bar = stack.enter_context(progress(title, total, "steps", start=start))
        yield logs


@dataclass
class StopSignals:
    """Within it, SIGTERM and SIGINT stop at once, as Ctrl-C does; after ``defer`` they only set ``asked``, and one
    more, some seconds later, stops at once. What was stopped at once ends as ``Interrupted``.

    Not one that comes right after the first: a terminal or a scheduler sends a signal to all processes of a job, and
    those that have started others pass it on. Outside of the main thread no signal arrives, and nothing happens.
    """

    PATIENCE = 2.0  # seconds

    asked: bool = False
    deferred: bool = False
    since: float = 0.0
    done: str = "stopped before the first step"  # what a stop at once says
    before: dict[int, Any] = field(default_factory=dict)

    def defer(self, done: str) -> "StopSignals":
        """From now on, whoever works looks at ``asked``; ``done`` says what a stop at once leaves behind."""
        self.deferred = True
        self.done = done
        return self

    def __enter__(self) -> "StopSignals":
        self.listen()
        return self

    def listen(self) -> None:
        """Set the handlers; once more after a library has set its own."""
        with suppress(ValueError):  # not in the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before.setdefault(number, signal.signal(number, self._handle))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = not self.asked
        if first:
            self.asked = True
            self.since = time.monotonic()
        if not self.deferred or (not first and time.monotonic() - self.since > self.PATIENCE):
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
        # A terminal also stops the processes that this one waits for, whose end may be noticed first.
        failed_by_it = self.asked and not self.deferred and isinstance(error, Exception)
        if isinstance(error, KeyboardInterrupt) or (failed_by_it and not isinstance(error, Interrupted)):
            raise Interrupted(self.done) from error
