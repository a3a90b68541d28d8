"""Generated sets: blocks of samples, made by several processes, resumable, the same bytes however many there are.

Block i of a set depends on nothing but the task's options and i. Finished blocks wait as files beside the set's place;
when all are there, they are joined in order, without repeated samples, and cut into the three splits.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from longlens.options import typed_options
from longlens.progress import progress
from longlens.tasks.base import SPLITS, Head, Metric, StoredTask, task_options
from longlens.tasks.datasets import offsets_of
from longlens.tasks.store import CacheError, Details, Writer, explained, parts_folder


class Block(NamedTuple):
    """Samples one after another: sample i is the next ``lengths[i]`` of ``values``."""

    values: np.ndarray  # (total,) uint8
    lengths: np.ndarray  # (N,) int64
    labels: np.ndarray  # (N,) uint8

    def samples(self) -> Iterator[np.ndarray]:
        """The values of one sample after another."""
        for start, end in pairwise(offsets_of(self.lengths)):
            yield self.values[start:end]


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(StoredTask):
    """A task whose samples are generated once, from a seed.

    Args:
        sizes: samples for training, validation and test.
        seed: another seed gives other samples.
    """

    sizes: tuple[int, int, int]
    seed: int = 0

    origin: ClassVar[str] = "generated"
    head: ClassVar[Head] = "classify"
    metric: ClassVar[Metric] = "accuracy"
    block_size: ClassVar[int]
    together: ClassVar[int] = 1  # samples that stay or go together when one of them is repeated

    @abstractmethod
    def block(self, index: int) -> Block:
        """``block_size`` samples, the same whenever and wherever they are made."""

    def __post_init__(self) -> None:
        if len(self.sizes) != 3 or min(self.sizes) < 1:
            raise ValueError(f"sizes are {self.sizes}; they must be three numbers of samples, each at least 1")

    def refuse_with_release(self, *names: str) -> None:
        """Options that files of a release do not follow must not look as if they did."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} shapes generated samples only: leave it out, or leave out release")

    def recipe(self) -> dict[str, Any]:
        return {"task": self.name, "version": self.version, **task_options(self)}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if source is not None:
            raise ValueError(f"{self.name} is generated, so there is nothing to import from {source}: leave out --from")
        parts = parts_folder(self.folder())
        with explained():
            parts.mkdir(exist_ok=True)
        try:
            return _join(self, writer, parts, workers or cores())
        except ValueError:  # these options make no set
            shutil.rmtree(parts, ignore_errors=True)
            raise


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _join(task: GeneratedTask, writer: Writer, parts: Path, workers: int) -> Details:
    needed, kept, repeated = sum(task.sizes), 0, 0
    seen: set[bytes] = set()
    bounds = np.cumsum([0, *task.sizes])
    index, ready = 0, 0
    while kept < needed:
        if index == ready:
            if repeated > max(3 * kept, 10_000):
                raise ValueError(
                    f"{task.name} with these options has only about {kept:,} different samples, and sizes ask for "
                    f"{needed:,}: ask for fewer, or for longer samples"
                )
            ready += -(-(needed - kept) // task.block_size)
            _make_parts(task, parts, range(index, ready), workers)
        block = _read_part(task, parts, index)
        index += 1
        new = _new_rows(block, seen, task.together)
        repeated += len(block.labels) - len(new)
        new = new[: needed - kept]
        _write(writer, _rows(block, new), kept, bounds)
        kept += len(new)
    return {"sizes": dict(zip(SPLITS, task.sizes, strict=True))}


def _new_rows(block: Block, seen: set[bytes], together: int) -> list[int]:
    """The samples that were not seen before, and whose companions were not either."""
    digests = [blake2b(values.tobytes(), digest_size=16).digest() for values in block.samples()]
    new = []
    for first in range(0, len(digests), together):
        group = digests[first : first + together]
        if len(set(group) - seen) == together:
            new += range(first, first + together)
        seen.update(group)
    return new


def _rows(block: Block, rows: list[int]) -> Block:
    if len(rows) == len(block.labels):
        return block
    keep = np.zeros(len(block.labels), dtype=bool)
    keep[rows] = True
    return Block(block.values[np.repeat(keep, block.lengths)], block.lengths[keep], block.labels[keep])


def _write(writer: Writer, block: Block, first: int, bounds: np.ndarray) -> None:
    """Append samples ``first`` … to the splits in which they fall."""
    starts = offsets_of(block.lengths)
    for split, low, high in zip(SPLITS, bounds[:-1] - first, bounds[1:] - first, strict=True):
        rows = slice(max(low, 0), min(max(high, 0), len(block.labels)))
        if rows.start < rows.stop:
            writer.append(split, "values", block.values[starts[rows.start] : starts[rows.stop]])
            writer.append(split, "lengths", block.lengths[rows])
            writer.append(split, "labels", block.labels[rows])


def _make_parts(task: GeneratedTask, parts: Path, blocks: range, workers: int) -> None:
    """Have the files of these blocks: those that an earlier, interrupted try has left are not made again."""
    missing = [index for index in blocks if not _part(parts, index).exists()]
    workers = min(workers, len(missing))
    with progress(f"generating {task.name}", len(blocks) * task.block_size, "samples") as done:
        if workers <= 1 or not _importable(type(task)):
            for count, index in enumerate(missing, start=len(blocks) - len(missing)):
                done(count * task.block_size)
                _make_part(task, parts, index)
            return
        with tempfile.TemporaryFile("w+") as errors:
            processes = [_start_worker(task, parts, missing[worker::workers], errors) for worker in range(workers)]
            try:
                while None in (codes := [process.poll() for process in processes]) and not any(codes):
                    done(sum(_part(parts, index).exists() for index in blocks) * task.block_size)
                    time.sleep(0.1)
            finally:
                for process in processes:
                    process.terminate()
                    process.communicate()
            if any(codes):
                errors.seek(0)
                _raise_again(errors.read())


def _importable(task_class: type) -> bool:
    """Whether another process can find this class: not if it is of the main file, or of a function."""
    try:
        return task_class.__module__ != "__main__" and hasattr(
            importlib.import_module(task_class.__module__), task_class.__qualname__
        )
    except ImportError:
        return False


def _start_worker(task: GeneratedTask, parts: Path, blocks: list[int], errors: IO[str]) -> subprocess.Popen[str]:
    """A command of its own, since the workers of multiprocessing run the user's main file once more."""
    order = {"path": sys.path, "module": type(task).__module__, "class": type(task).__qualname__}
    order |= {"options": task_options(task), "parts": str(parts.resolve()), "blocks": blocks}
    process = subprocess.Popen(
        [sys.executable, "-m", "longlens.tasks.generate"],
        stdin=subprocess.PIPE, stderr=errors, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()  # and left open: its end tells the worker that this process is gone
    return process


def _raise_again(error: str) -> NoReturn:
    """Raise in this process what stopped a worker."""
    last = error.strip().splitlines()[-1] if error.strip() else "it was killed"
    name, _, message = last.partition(": ")
    for kind in (CacheError, ValueError):
        if name.endswith(kind.__name__):
            raise kind(message)
    raise ChildProcessError(f"a process that generates samples stopped: {last}; run the same command again to go on")


def _part(parts: Path, index: int) -> Path:
    return parts / f"{index:06}.npz"


def _make_part(task: GeneratedTask, parts: Path, index: int) -> Block:
    block = task.block(index)
    temporary = parts / f"{index:06}.{os.getpid()}"
    with explained():
        try:
            with open(temporary, "wb") as file:
                np.savez(file, **block._asdict())
            temporary.replace(_part(parts, index))
        finally:
            temporary.unlink(missing_ok=True)
    return block


def _read_part(task: GeneratedTask, parts: Path, index: int) -> Block:
    try:
        with np.load(_part(parts, index), allow_pickle=False) as arrays:
            return Block(arrays["values"], arrays["lengths"], arrays["labels"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return _make_part(task, parts, index)


def _work() -> None:
    """A worker: make the blocks that the first line of the input asks for, and stop when the input ends."""
    order = json.loads(sys.stdin.readline())
    # Not sys.stdin.read(): Python cannot close a file at its end that a thread is still reading.
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(0), daemon=True).start()
    sys.path[:] = order["path"]
    task_class = getattr(importlib.import_module(order["module"]), order["class"])
    task = task_class(**typed_options(task_class, order["options"]))
    for index in order["blocks"]:
        _make_part(task, Path(order["parts"]), index)


if __name__ == "__main__":
    _work()
