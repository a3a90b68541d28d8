"""A generated task that fails in its fourth shard, in a module that other processes import fast."""

import os
import signal
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from longlens.data.generate import Shard
from longlens.data.store import CacheError
from longlens.errors import BadInput
from longlens.tasks.base import GeneratedTask


@dataclass(frozen=True, kw_only=True)
class Failing(GeneratedTask):
    sizes: tuple[int, int, int] = (50, 10, 10)
    kind: str = "value"

    name: ClassVar[str] = "failing"
    shard_size: ClassVar[int] = 10
    summary: ClassVar[str] = "fails"

    def shard(self, index):
        if index == 3:
            if self.kind.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, self.kind))
                time.sleep(60)
            errors = {"input": BadInput, "cache": CacheError, "memory": MemoryError, "bug": KeyError}
            raise errors[self.kind]("of shard 3,\nand more")
        return Shard(
            np.arange(10 * index, 10 * index + 10, dtype=np.uint8), np.ones(10, np.int64), np.zeros(10, np.uint8)
        )

    spec = load = None  # pyright: ignore
