"""A language and mixers that only tests have; LONGLENS_IMPORT names this file."""

import os
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from longlens.data.datasets import Metric, SplitName, Stream, Windows
from longlens.mixers.registry import register as register_mixer
from longlens.options import Count, Size
from longlens.tasks.base import Head, Spec, Task
from longlens.tasks.base import register as register_task


@register_task("tiny-language")
@dataclass(frozen=True, kw_only=True)
class TinyLanguage(Task):
    """Random letters, each often twice. The last window of a split is short.

    Args:
        context: Letters in a window.
    """

    context: Size = 16

    summary: ClassVar[str] = "letters, each often twice"
    origin: ClassVar[str] = "generated"
    head: ClassVar[Head] = "language"
    metric: ClassVar[Metric] = "bits_per_byte"

    @property
    def spec(self) -> Spec:
        return Spec("tokens", 11, self.context, self.head, 11, self.metric)

    def load(self, name: SplitName, epoch: int) -> Windows:
        letters = Stream("tiny", name).raw(300).astype(np.int64) % 11
        return Windows(np.where(letters > 5, np.roll(letters, 1), letters), self.context)


@register_mixer("fragile", summary="breaks after some steps")
class Fragile(nn.Module):
    """Linear; after so many steps of training its output, or only its gradient, is not a number.

    Args:
        after: Steps of training that go well, in a process.
        where: What breaks: output or gradient.
    """

    def __init__(self, d_model: Size, *, after: Count = 10, where: str = "output"):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)
        self.after = after
        self.where = where
        self.steps = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x)
        if not self.training:
            return y
        self.steps += 1
        if self.steps <= self.after or "LONGLENS_TEST_HEALED" in os.environ:
            return y
        if self.where == "output":
            return y * torch.nan
        y.register_hook(lambda gradient: gradient * torch.nan)
        return y


@register_mixer("half-used", summary="has a parameter that never has a gradient")
class HalfUsed(nn.Module):
    def __init__(self, d_model: Size):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)
        self.unused = nn.Parameter(torch.ones(d_model, d_model))

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return self.linear(x)


@register_mixer("patient", summary="waits at each step, if a test says so")
class Patient(nn.Module):
    def __init__(self, d_model: Size):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        time.sleep(float(os.environ.get("LONGLENS_TEST_PATIENCE", "0")) if self.training else 0)
        return self.linear(x)


@register_mixer("buggy", summary="has a bug of which it says a lot, and prints a lot before")
class Buggy(nn.Module):
    def __init__(self, d_model: Size):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        print("x" * 200_000)  # more than a pipe holds
        raise ValueError("my bug" + "!" * 200_000)
