"""A language and mixers that only tests have; LONGLENS_IMPORT names this file."""

import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from longlens.mixers.base import Config
from longlens.mixers.base import register as register_mixer
from longlens.tasks.base import Head, Metric, Spec, SplitName, Task
from longlens.tasks.base import register as register_task
from longlens.tasks.datasets import Windows
from longlens.tasks.stream import Stream


@register_task("tiny-language")
@dataclass(frozen=True, kw_only=True)
class TinyLanguage(Task):
    """Random letters, each often twice. The last window of a split is short.

    Args:
        context: letters in a window.
    """

    context: int = 16

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


class Fragile(nn.Module):
    """Linear; after so many steps of training its output, or only its gradient, is not a number."""

    def __init__(self, width: int, after: int, where: str):
        super().__init__()
        self.linear, self.after, self.where, self.steps = nn.Linear(width, width), after, where, 0

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


@register_mixer("fragile")
@dataclass(frozen=True, kw_only=True)
class FragileConfig(Config):
    """A layer that breaks.

    Args:
        after: steps of training that go well, in a process.
        where: output or gradient.
    """

    after: int = 10
    where: str = "output"

    summary: ClassVar[str] = "breaks after some steps"

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> nn.Module:
        return Fragile(d_model, self.after, self.where)
