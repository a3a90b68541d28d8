"""What a task is, and how to get one by its name."""

import hashlib
import inspect
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

import numpy as np
from annotated_types import Ge, Le

from longlens.data import store
from longlens.data.datasets import SPLITS as SPLITS
from longlens.data.datasets import Batches, Metric, Samples, Sequences, Split, SplitName, Stream, Subset, offsets_of
from longlens.data.sources import ARENA, Source
from longlens.data.store import Details, Prepared, Writer
from longlens.errors import BadInput
from longlens.options import Is, Option, Options, Seed, Size
from longlens.registry import Registry

if TYPE_CHECKING:  # what generates is imported when it is needed
    from longlens.data.generate import Shard

Head = Literal["classify", "match", "regress", "language"]
Length = Annotated[int, Ge(1), Le(2**24), Is("a whole number from 1 to 16,777,216")]
EndedLength = Annotated[int, Ge(2), Le(2**24), Is("a whole number from 2 to 16,777,216")]  # with an end token
Sizes = tuple[Size, Size, Size]  # of training, validation and test

_Task = TypeVar("_Task", bound="type[Task]")


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
    shape: tuple[int, int] | None = None  # height and width of an image whose rows, one after another, are the sequence


@dataclass(frozen=True, kw_only=True)
class Task(Options, ABC):
    """A task: data in three splits, a head and a metric. Its fields are its options.

    Tasks import no torch, so that options can be listed and data prepared without it.
    """

    name: ClassVar[str]  # which ``register`` sets
    summary: ClassVar[str]
    origin: ClassVar[str]  # where the data comes from, in a word
    head: ClassVar[Head]
    metric: ClassVar[Metric]
    version: ClassVar[int] = 1  # a new number when the same options give other samples
    aliases: ClassVar[Mapping[str, str]] = {}  # old names of options, and their names

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """What a model has to know. Where the vocabulary comes from the data, this prepares it."""

    @abstractmethod
    def load(self, name: SplitName, epoch: int) -> Split:
        """The samples of a split. Only tasks that make new samples for each epoch of training look at ``epoch``."""

    @classmethod
    def make(cls, values: Mapping[str, Any], what: str) -> Self:
        for old, new in cls.aliases.items():
            if old in values and new in values:
                raise BadInput(f"{what} needs {new!r} once, got it and its old name {old!r}")
        return super().make({cls.aliases.get(name, name): value for name, value in values.items()}, what)

    def split(self, name: SplitName, epoch: int = 0) -> Split:
        """The samples of a split, whose ``take(indices)`` gives padded arrays."""
        return self.load(Option("split", SplitName).check(name), epoch)

    @property
    def title(self) -> str:
        """The name for tables, with the options that were changed: ``text8 (max_length=128, stand-in)``."""
        changed = self._changed().items()
        words = [name.replace("_", "-") if value is True else f"{name}={value}" for name, value in changed]
        words = [self.note, *words] if self.note else words
        return f"{self.name} ({', '.join(words)})" if words else self.name

    @property
    def note(self) -> str:
        """What else a title must say."""
        return ""

    @property
    def slug(self) -> str:
        """The name for folders: ``text8-stand-in``, ``listops-release``. Other options do not show in it."""
        flags = (name for name, value in self._changed().items() if value is True)
        return "-".join([self.name, *flags]).replace("_", "-")

    def _changed(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def vocabulary(self) -> list[str] | None:
        """The symbols of the tokens, if its inputs are tokens."""
        return None

    def codec(self) -> dict[str, Any]:
        """How raw sequences become inputs, and what outputs are called: a ``longlens.data.codec.Codec`` is made of it,
        perhaps where the data is no longer there."""
        return {"form": "real"} if self.spec.inputs == "real" else {"form": "tokens", "symbols": self.vocabulary()}

    def fingerprint(self) -> str:
        """Identifies the data: a result belongs to it."""
        return f"{self.name}-{self.version}"

    def batches(self, split: SplitName, batch_size: int, *, epoch: int = 0, **options: Any) -> Batches:
        """The batches of one epoch: see ``longlens.data.datasets.Batches`` for the options."""
        return Batches(self.split(split, epoch), batch_size, epoch=epoch, **options)

    def prepare(self, source: Path | str | None = None, *, workers: int | None = None, force: bool = False) -> None:
        """Have the data ready: generated, downloaded, or imported from the folder or archive ``source``.

        Called by itself when a split is first used. ``workers`` is the number of processes that generate (default: the
        number of cores); ``force`` makes the set again.
        """
        if source is not None:
            raise BadInput(f"{self.name} makes its samples when they are used: there is nothing to import")

    def is_prepared(self) -> bool:
        """Whether nothing has to be generated, downloaded or imported first."""
        return True

    def render(self, samples: Samples, row: int) -> str:
        """A sample for people to read: its sequence, or both of a pair, unless it is drawn; and its target."""
        sequences = samples.inputs[row] if samples.lengths.ndim == 2 else samples.inputs[row, None]
        cut = [values[:length] for values, length in zip(sequences, np.ravel(samples.lengths[row]), strict=True)]
        shown = cut if self.picture(samples, row) is None else []
        return "\n".join([*map(_on_a_line, shown), f"target {_on_a_line(samples.targets[row])}"])

    def picture(self, samples: Samples, row: int) -> np.ndarray | None:
        """A sample as a gray picture with values from 0 to 1, if it is one."""
        return None


@dataclass(frozen=True, kw_only=True)
class StoredTask(Task):
    """A task whose samples are in the cache."""

    def store_name(self) -> str:
        """The name of the stored set, which several tasks may share."""
        return f"{self.name}-stand-in" if getattr(self, "stand_in", False) else self.name

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """All that decides the bytes of the stored set."""

    @abstractmethod
    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        """Write the arrays; return what is worth noting about them."""

    def check_source(self, source: Path) -> None:
        """Refuse what cannot be imported."""
        Source(source)

    def import_command(self) -> str:
        """The command that imports the data of this task."""
        words = ["longlens", "data", "prepare", self.name]
        for name, value in self._changed().items():
            given = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, given)]
        return shlex.join([*words, "--from", "DIR"])

    def prepare(self, source: Path | str | None = None, *, workers: int | None = None, force: bool = False) -> None:
        workers = Option("workers", Size | None).check(workers)
        path = None if source is None else store.expand(source, "--from").absolute()
        if path is not None:
            self.check_source(path)
            details = self.prepared.details if self.is_prepared() and not force else {}
            before = details.get("source")
            if "stand_in" in details and before != str(path):
                raise BadInput(f"the stand-in for {self.name} was made from {before}; force replaces it by {path}")
        store.prepare(self.store_name(), self.identity(), lambda writer: self.build(writer, path, workers), force=force)
        vars(self).pop("prepared", None)

    def is_prepared(self) -> bool:
        return store.is_prepared(self.folder())

    def folder(self) -> Path:
        """Where the stored set is or will be."""
        return store.set_folder(self.store_name(), self.identity())

    @cached_property
    def prepared(self) -> Prepared:
        """The stored set, compared with its checksums; made now if it is not there."""
        if not self.is_prepared():
            self.prepare()
        prepared = Prepared(self.folder())
        prepared.check()
        return prepared

    def fingerprint(self) -> str:
        """The checksums of all stored arrays in one; prepares the set if it is not there."""
        sums = sorted((file, facts["sha256"]) for file, facts in self.prepared.meta["files"].items())
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def sequences(self, name: str, **options: Any) -> Sequences:
        """The stored values, lengths and labels of a split."""
        values, lengths, labels = (self.prepared.array(name, key) for key in ("values", "lengths", "labels"))
        targets = labels if labels.dtype.kind == "f" else labels.astype(np.int64)
        return Sequences(values, offsets_of(lengths), targets, **options)


@dataclass(frozen=True, kw_only=True)
class TrainTestTask(StoredTask):
    """A stored set that comes with a training and a test set only: some of the former is held out for validation.

    Args:
        valid_size: Training samples held out for validation.
        seed: Seed that decides which samples are held out.
    """

    valid_size: Size
    seed: Seed = 0

    head: ClassVar[Head] = "classify"
    metric: ClassVar[Metric] = "accuracy"
    sizes: ClassVar[Mapping[str, int]]  # of the training and the test set

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.valid_size >= self.sizes["train"]:
            raise BadInput(f"valid_size must be below {self.sizes['train']:,}, got {self.valid_size:,}")

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
    def shard(self, index: int) -> "Shard":
        """``shard_size`` samples, the same whenever and wherever they are made."""

    def identity(self) -> dict[str, Any]:
        return {"task": self.name, "version": self.version, **self.values()}

    def check_source(self, source: Path) -> None:
        raise BadInput(f"{self.name} is generated, so there is nothing to import from {source}: leave out --from")

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        from longlens.data.generate import cores, generate

        return generate(self, writer, store.parts_folder(self.folder()), workers or cores())


@dataclass(frozen=True, kw_only=True)
class ReleasedTask(GeneratedTask):
    """A task whose samples are generated, or imported from the files that the arena released.

    Args:
        release: Import the files of the arena's release with --from, instead of generating samples.
    """

    release: bool = False

    generator_options: ClassVar[tuple[str, ...]]  # which the files of a release do not follow

    @property
    def note(self) -> str:
        return "" if self.release else "generated"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self._changed():
            if self.release and name in self.generator_options:
                raise BadInput(f"{name} shapes generated samples only: leave it out, or leave out release")

    @abstractmethod
    def import_release(self, writer: Writer, source: Path) -> None:
        """Write the arrays of the released files."""

    def check_source(self, source: Path) -> None:
        if not self.release:
            super().check_source(source)
        Source(source)

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if not self.release:
            return super().build(writer, source, workers)
        if source is None:
            given = f"where DIR has the arena's files, which are in {ARENA}"
            raise BadInput(f"run '{self.import_command()}', {given}; or leave out --release to generate samples")
        self.import_release(writer, source)
        return {"sizes": dict(zip(SPLITS, self.sizes, strict=True)), "source": str(source)}


def _on_a_line(values: np.ndarray) -> str:
    """Tokens or numbers: of many, the first and the last."""
    values = np.squeeze(values)
    edge = 16 if values.ndim < 2 else 2
    return " ".join(np.array2string(values, threshold=32, edgeitems=edge, precision=4, suppress_small=True).split())


REGISTRY: Registry[type[Task]] = Registry("task", "longlens.tasks")


def register(name: str) -> Callable[[_Task], _Task]:
    """Above a Task: a name by which ``create_task`` and the commands know it."""

    def add(task: _Task) -> _Task:
        _check_class(name, task)
        before = REGISTRY.entries.get(name)
        if before is not None and before.__qualname__ != task.__qualname__:
            raise BadInput(f"there is a task {name!r} already: choose another name")
        REGISTRY.add(name, task, task.__module__)
        task.name = name
        return task

    return add


def _check_class(name: str, task: type) -> None:
    """A user's class that lacks something is refused here, and not by each command that lists all tasks."""
    if not issubclass(task, Task):
        raise BadInput(f"task {name!r} must be a class derived from longlens.tasks.base.Task, got {task.__name__}")
    known = {"summary": (), "origin": (), "head": get_args(Head), "metric": get_args(Metric)}
    for attribute, allowed in known.items():
        value = getattr(task, attribute, None)
        if value not in allowed if allowed else not (value and isinstance(value, str)):
            wanted = " or ".join(map(repr, allowed)) or '"…"'
            raise BadInput(f"task {name!r} must say its {attribute}: set {attribute} = {wanted} in {task.__name__}")
    if missing := ", ".join(sorted(getattr(task, "__abstractmethods__", ()))):
        raise BadInput(f"task {name!r} must define {missing} in {task.__name__}")
    known_fields = task.__dataclass_fields__
    for field, hint in inspect.get_annotations(task).items():
        if "ClassVar" not in str(hint) and not (field in known_fields and known_fields[field].kw_only):
            line = "@dataclass(frozen=True, kw_only=True)"
            raise BadInput(f"task {name!r} has an option {field!r} only with {line} above {task.__name__}")


def list_tasks() -> list[str]:
    """The names of all tasks."""
    return REGISTRY.names()


def find_task(name: str) -> type[Task]:
    """The class of a task, by its name."""
    return REGISTRY.find(name)


def create_task(name: str, **options: Any) -> Task:
    """A task by its name: ``create_task("listops")``, ``create_task("pathfinder", size=16, contour=6)``.

    Nothing is generated or downloaded before its data is used or ``prepare`` is called. ``list_tasks()`` has the names;
    the options are the fields of the task's class: ``help(create_task("listops"))`` describes them.
    """
    return find_task(name).make(options, f"task {name!r}")
