"""Where a run stands, its clock, and its losses that nobody has looked at yet."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from longlens.errors import BadInput
from longlens.training.distributed import Processes


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
    best: float | None = None  # best metric on the validation set, and its step
    best_step: int | None = None
    last: float | None = None
    losses: float = 0.0  # sum since the last line of metrics.jsonl, and the step of that line
    logged: int = 0
    tokens: int = 0  # trained on
    seconds: float = 0.0  # in all
    training_seconds: float = 0.0  # of these, in steps of training
    computing_seconds: float = 0.0  # of these, in forward, backward and optimizer
    peak_memory: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "TrainState":
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise BadInput(f"the state must have {', '.join(sorted(names))}")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            place, problem = error.errors()[0]["loc"][0], error.errors()[0]["msg"]
            raise BadInput(f"{place} of the state cannot be read: {problem}") from None

    def score(self, metric: float, higher_is_better: bool) -> None:
        """Note an evaluation on the validation set."""
        self.evaluated = self.step
        self.last = metric
        if self.best is None or (metric > self.best if higher_is_better else metric < self.best):
            self.best = metric
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
        """Of training, since the last call."""
        seconds, tokens = self.rate_mark
        self.rate_mark = (self.state.training_seconds, self.state.tokens)
        return (self.state.tokens - tokens) / max(self.state.training_seconds - seconds, 1e-9)


class PendingLosses:
    """Losses of the last steps that stay on their device, so that a GPU need not be waited for."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.tokens = 0  # of their steps, in this process

    def add(self, loss: Tensor, tokens: int) -> None:
        self.losses.append(loss)
        self.tokens += tokens

    def synchronize(self, state: TrainState, processes: Processes, asked: bool) -> bool:
        """Look at them and add them to the state; whether some process was asked to stop."""
        facts = torch.tensor([self.tokens, asked], dtype=torch.float64, device=processes.device)
        *losses, tokens, stops = processes.sum(torch.cat([torch.stack(self.losses).double(), facts])).tolist()
        for step, loss in enumerate(losses, state.step - len(losses) + 1):
            if not math.isfinite(loss):
                raise NotFinite(f"the loss is {loss}", step)
        state.losses += sum(losses)
        state.tokens += round(tokens)
        self.losses = []
        self.tokens = 0
        return stops > 0
