"""The learning rate over the steps of a run, as a factor of its peak."""

import math
from typing import Any

from longlens.errors import BadInput
from longlens.training.config import TrainingConfig

THRESHOLD = 1e-4  # relative: less does not count as an improvement (the default of torch's ReduceLROnPlateau)


class Schedule:
    """Constant; a warm-up and then a cosine down to 0; or steps down whenever validation stops improving.

    Args:
        config: Which of them, and its numbers.
        steps: Steps of the whole run.
        higher_is_better: Whether a higher metric is an improvement.
    """

    def __init__(self, config: TrainingConfig, steps: int, higher_is_better: bool):
        self.config = config
        self.steps = steps
        self.higher_is_better = higher_is_better
        self.warmup = math.ceil(config.warmup * steps) if config.schedule == "cosine" else 0
        self.level = 1.0  # of the plateau
        self.best: float | None = None
        self.waited = 0

    def factor(self, step: int) -> float:
        """The factor of the peak learning rate for the step after ``step`` steps."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.config.schedule == "cosine":
            done = (step - self.warmup) / max(1, self.steps - self.warmup)
            return 0.5 * (1 + math.cos(math.pi * min(done, 1)))
        return self.level

    def update(self, metric: float) -> None:
        """Update after an evaluation."""
        if self._improves(metric):
            self.best = metric
            self.waited = 0
        else:
            self.waited += 1
        if self.config.schedule == "plateau" and self.waited > self.config.patience:
            self.level *= self.config.factor
            self.waited = 0

    def _improves(self, metric: float) -> bool:
        if self.best is None:
            return True
        if self.higher_is_better:
            return metric > self.best * (1 + THRESHOLD)
        return metric < self.best * (1 - THRESHOLD)

    def state(self) -> dict[str, Any]:
        return {"level": self.level, "best": self.best, "waited": self.waited}

    def load(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state().keys():
            raise BadInput(f"the state of a schedule must have {', '.join(self.state())}")
        self.level = state["level"]
        self.best = state["best"]
        self.waited = state["waited"]
