"""Tasks whose samples are generated once and stored."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from longlens.data.datasets import Metric
from longlens.data.generate import Shard, cores, generate
from longlens.data.store import Details, Writer, parts_folder
from longlens.errors import BadInput
from longlens.options import Seed
from longlens.tasks.base import Head, Sizes, StoredTask


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(StoredTask):
    """A task whose samples are generated once, from a seed.

    Args:
        sizes: Samples for training, validation and test.
        seed: Seed of the generated samples.
    """

    sizes: Sizes
    seed: Seed = 0

    origin: ClassVar[str] = "generated"
    head: ClassVar[Head] = "classify"
    metric: ClassVar[Metric] = "accuracy"
    shard_size: ClassVar[int]
    together: ClassVar[int] = 1  # samples that stay or go together when one of them is repeated

    @abstractmethod
    def shard(self, index: int) -> Shard:
        """``shard_size`` samples, the same whenever and wherever they are made."""

    def identity(self) -> dict[str, Any]:
        return {"task": self.name, "version": self.version, **self.values()}

    def check_source(self, source: Path) -> None:
        raise BadInput(f"{self.name} is generated, so there is nothing to import from {source}: leave out --from")

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        return generate(self, writer, parts_folder(self.folder()), workers or cores())


@dataclass(frozen=True, kw_only=True)
class ReleasedTask(GeneratedTask):
    """A task whose samples are generated, or imported from the files that the arena released.

    Args:
        release: Import the files of the arena's release with --from, instead of generating samples.
    """

    release: bool = False

    generator_options: ClassVar[tuple[str, ...]]  # which the files of a release do not follow

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self._changed():
            if self.release and name in self.generator_options:
                raise BadInput(f"{name} shapes generated samples only: leave it out, or leave out release")

    @abstractmethod
    def import_release(self, writer: Writer, source: Path | None) -> Details:
        """Write the arrays of the released files; without a source, say where they are."""

    def check_source(self, source: Path) -> None:
        if self.release:
            StoredTask.check_source(self, source)
        else:
            super().check_source(source)

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        return self.import_release(writer, source) if self.release else super().build(writer, source, workers)
