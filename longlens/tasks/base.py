"""What a task is, and how to get one by its name."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from longlens.options import from_options
from longlens.registry import Registry
from longlens.tasks import store
from longlens.tasks.datasets import Samples, Sequences, Split, Subset, offsets_of
from longlens.tasks.store import Details, Prepared, Writer
from longlens.tasks.stream import Stream

if TYPE_CHECKING:
    from longlens.tasks.batches import Batches

SplitName = Literal["train", "valid", "test"]
Head = Literal["classify", "match", "regress", "language"]
Metric = Literal["accuracy", "r2", "bits_per_byte", "perplexity"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


@dataclass(frozen=True)
class Spec:
    """What a model has to know of a task."""

    inputs: Literal["tokens", "real"]
    size: int  # of the vocabulary, or the number of channels
    max_length: int
    head: Head  # classify: one label a sequence; match: one label a pair; regress: numbers; language: the next token
    outputs: int  # classes, the vocabulary of a language, or 1
    metric: Metric
    positions: int | None = None  # regress: numbers at the last so many positions; None: one for the sequence


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task: data in three splits, a head and a metric. Its fields are its options.

    Tasks import no torch, so that options can be listed and data prepared without it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    origin: ClassVar[str]  # where the data comes from, in a word
    head: ClassVar[Head]
    metric: ClassVar[Metric]
    version: ClassVar[int] = 1  # a new number when the same options give other samples

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """What a model has to know. Where the vocabulary comes from the data, this prepares it."""

    @abstractmethod
    def load(self, name: SplitName, epoch: int) -> Split:
        """The samples of a split. Only tasks that make new samples for each epoch of training look at ``epoch``."""

    def split(self, name: SplitName, epoch: int = 0) -> Split:
        """The samples of a split, whose ``take(indices)`` gives padded arrays."""
        if name not in SPLITS:
            raise ValueError(f"split is {name!r}; it can be {', '.join(SPLITS)}")
        return self.load(name, epoch)

    @property
    def title(self) -> str:
        """The name for tables, with the options that were changed: ``text8 (stand-in, context=128)``."""
        changed = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(field.name.replace("_", "-") if value is True else f"{field.name}={value}")
        return f"{self.name} ({', '.join(changed)})" if changed else self.name

    @property
    def slug(self) -> str:
        """The name for folders: ``text8-stand-in``, ``listops-release``. Other options do not show in it."""
        flags = (f.name for f in fields(self) if getattr(self, f.name) is True and f.default is False)
        return "-".join([self.name, *flags]).replace("_", "-")

    def vocabulary(self) -> list[str] | None:
        """The symbols of the tokens, if its inputs are tokens."""
        return None

    def fingerprint(self) -> str:
        """Another one if the data is another: a result belongs to it."""
        return f"{self.name}-{self.version}"

    def batches(self, split: SplitName, batch_size: int, *, epoch: int = 0, **options: Any) -> "Batches":
        """The batches of one epoch: see ``longlens.tasks.batches.Batches`` for the options."""
        from longlens.tasks.batches import Batches

        return Batches(self.split(split, epoch), batch_size, epoch=epoch, **options)

    def prepare(self, source: Path | str | None = None, *, workers: int | None = None, force: bool = False) -> None:
        """Have the data ready: generated, downloaded, or imported from the folder or archive ``source``.

        Called by itself when a split is first used. ``workers`` is the number of processes that generate (default: the
        number of cores); ``force`` makes the set again.
        """
        if source is not None:
            raise ValueError(f"{self.name} makes its samples when they are used: there is nothing to import")

    def is_prepared(self) -> bool:
        """Whether nothing has to be generated, downloaded or imported first."""
        return True

    def render(self, samples: Samples, row: int) -> str:
        """A sample for people to read."""
        label = samples.targets[row]
        return f"target {np.array2string(np.asarray(label), threshold=8, precision=4)}"

    def picture(self, samples: Samples, row: int) -> np.ndarray | None:
        """A sample as a gray picture with values from 0 to 1, if it is one."""
        return None


@dataclass(frozen=True, kw_only=True)
class StoredTask(Task):
    """A task whose samples are in the cache."""

    def store_name(self) -> str:
        """The name of the stored set, which several tasks may share."""
        return self.name

    @abstractmethod
    def recipe(self) -> Mapping[str, Any]:
        """All that decides the bytes of the stored set."""

    @abstractmethod
    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        """Write the arrays; return what is worth noting about them."""

    def prepare(self, source: Path | str | None = None, *, workers: int | None = None, force: bool = False) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        path = None if source is None else Path(source).expanduser().absolute()
        if path is not None and not force and self.is_prepared() and "stand_in" in self.prepared.details:
            before = self.prepared.details["source"]
            if before != str(path):
                raise ValueError(f"the stand-in for {self.name} was made from {before}; force replaces it by {path}")
        store.prepare(
            self.store_name(), self.recipe(), lambda writer: self.build(writer, path, workers), force=force
        )  # fmt: skip
        vars(self).pop("prepared", None)

    def is_prepared(self) -> bool:
        return store.is_prepared(self.folder())

    def folder(self) -> Path:
        return store.set_folder(self.store_name(), self.recipe())

    @cached_property
    def prepared(self) -> Prepared:
        """The stored set; made now if it is not there."""
        if not self.is_prepared():
            self.prepare()
        return Prepared(self.folder())

    def fingerprint(self) -> str:
        """The checksums of all stored arrays in one; prepares the set if it is not there."""
        sums = sorted((file, facts["sha256"]) for file, facts in self.prepared.meta["files"].items())
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def sequences(self, name: str, **options: Any) -> Sequences:
        """The stored values, lengths and labels of a split."""
        values, lengths, labels = (self.prepared.array(name, key) for key in ("values", "lengths", "labels"))
        return Sequences(values, offsets_of(lengths), labels.astype(np.int64), **options)


@dataclass(frozen=True, kw_only=True)
class TrainTestTask(StoredTask):
    """A stored set that comes with a training and a test set only: some of the former is held out for validation.

    Args:
        valid_size: training samples held out for validation.
        seed: which ones.
    """

    valid_size: int
    seed: int = 0

    sizes: ClassVar[Mapping[str, int]]  # of the training and the test set

    def __post_init__(self) -> None:
        if not 0 < self.valid_size < self.sizes["train"]:
            raise ValueError(f"valid_size is {self.valid_size}; it must be between 1 and {self.sizes['train'] - 1:,}")

    @abstractmethod
    def stored(self, name: Literal["train", "test"]) -> Split:
        """All samples of the training or the test set."""

    def load(self, name: SplitName, epoch: int) -> Split:
        if name == "test":
            return self.stored("test")
        train = self.stored("train")
        order = Stream("held out", self.seed).permutation(len(train))
        chosen = order[: self.valid_size] if name == "valid" else order[self.valid_size :]
        return Subset(train, np.sort(chosen))


_REGISTRY: Registry[Task] = Registry(
    "task",
    {
        "listops": "longlens.tasks.listops",
        "text": "longlens.tasks.text",
        "retrieval": "longlens.tasks.retrieval",
        "image": "longlens.tasks.image",
        "pathfinder": "longlens.tasks.pathfinder",
        "path-x": "longlens.tasks.pathfinder",
        "smnist": "longlens.tasks.mnist",
        "pmnist": "longlens.tasks.mnist",
        "atomic-select": "longlens.tasks.atomic",
        "atomic-cummax": "longlens.tasks.atomic",
        "atomic-cumsum": "longlens.tasks.atomic",
        "text8": "longlens.tasks.language",
        "enwik8": "longlens.tasks.language",
        "wikitext-103": "longlens.tasks.language",
        "wikitext-2": "longlens.tasks.language",
        "files": "longlens.tasks.files",
    },
)
register = _REGISTRY.register  # @register("my-task") above a Task makes it one that create_task knows


def list_tasks() -> list[str]:
    """The names of all tasks."""
    return _REGISTRY.names()


def task_class(name: str) -> type[Task]:
    """The class of a task, by its name."""
    return _REGISTRY.find(name)


def create_task(name: str, **options: Any) -> Task:
    """A task by its name: ``create_task("listops")``, ``create_task("pathfinder", size=16, contour=6)``.

    Nothing is generated or downloaded before its data is used or ``prepare`` is called. ``list_tasks()`` has the names;
    the options are the fields of the task's class: ``help(create_task("listops"))`` describes them.
    """
    return from_options(task_class(name), f"task {name!r}", options)


def task_options(task: Task) -> dict[str, Any]:
    """The options that make this task again."""
    return asdict(task)
