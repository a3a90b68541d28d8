"""Generated sets: shards of samples, made by several processes, resumable, the same bytes however many there are.

Shard i of a set depends on nothing but the options of its generator and i. Finished shards wait as files beside the
set's place; when all are there, they are joined in order, without repeated samples, and cut into the three splits.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, NoReturn, Protocol

import numpy as np

from longlens.data.datasets import SPLITS, offsets_of
from longlens.data.store import CacheError, Details, Writer, cache_errors, home
from longlens.errors import BadInput, Interrupted, LongLensError
from longlens.progress import Done, progress
from longlens.registry import import_added

STOPPED = (-signal.SIGINT, -signal.SIGTERM)


class Shard(NamedTuple):
    """Samples one after another: sample i is the next ``lengths[i]`` of ``values``."""

    values: np.ndarray  # (total,) uint8
    lengths: np.ndarray  # (N,) int64
    labels: np.ndarray  # (N,) uint8

    def samples(self) -> Iterator[np.ndarray]:
        """The values of one sample after another."""
        for start, end in pairwise(offsets_of(self.lengths)):
            yield self.values[start:end]


class Generator(Protocol):
    """What makes samples. Another process makes the same ones from its class and its values."""

    name: ClassVar[str]
    shard_size: ClassVar[int]
    together: ClassVar[int]  # samples that stay or go together when one of them is repeated

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Samples for training, validation and test."""
        ...

    def shard(self, index: int) -> Shard:
        """``shard_size`` samples, the same whenever and wherever they are made."""
        ...

    def values(self) -> dict[str, Any]: ...


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def generate(generator: Generator, writer: Writer, parts: Path, workers: int) -> Details:
    """Write all samples of a set. Finished shards wait in ``parts``, which stays unless the options are bad."""
    with cache_errors():
        parts.mkdir(exist_ok=True)
    try:
        return _join(generator, writer, parts, workers)
    except BadInput:  # these options make no set
        shutil.rmtree(parts, ignore_errors=True)
        raise


def _join(generator: Generator, writer: Writer, parts: Path, workers: int) -> Details:
    needed, kept, repeated = sum(generator.sizes), 0, 0
    seen: set[bytes] = set()
    bounds = np.cumsum([0, *generator.sizes])
    index, ready = 0, 0
    while kept < needed:
        if index == ready:
            if repeated > max(3 * kept, 10_000):
                raise BadInput(
                    f"sizes must be smaller, got {needed:,} samples in all: {generator.name} with these options has "
                    f"only about {kept:,} different ones; ask for fewer, or for longer samples"
                )
            ready += -(-(needed - kept) // generator.shard_size)
            _make_parts(generator, parts, range(index, ready), workers)
        shard = _read_part(generator, parts, index)
        index += 1
        new = _new_rows(shard, seen, generator.together)
        repeated += len(shard.labels) - len(new)
        new = new[: needed - kept]
        _write(writer, _rows(shard, new), kept, bounds)
        kept += len(new)
    return {"sizes": dict(zip(SPLITS, generator.sizes, strict=True))}


def _new_rows(shard: Shard, seen: set[bytes], together: int) -> list[int]:
    """The samples that were not seen before, and whose companions were not either."""
    digests = [blake2b(values.tobytes(), digest_size=16).digest() for values in shard.samples()]
    new = []
    for first in range(0, len(digests), together):
        group = digests[first : first + together]
        if len(set(group) - seen) == together:
            new += range(first, first + together)
        seen.update(group)
    return new


def _rows(shard: Shard, rows: list[int]) -> Shard:
    if len(rows) == len(shard.labels):
        return shard
    keep = np.zeros(len(shard.labels), dtype=bool)
    keep[rows] = True
    return Shard(shard.values[np.repeat(keep, shard.lengths)], shard.lengths[keep], shard.labels[keep])


def _write(writer: Writer, shard: Shard, first: int, bounds: np.ndarray) -> None:
    """Append samples ``first`` … to the splits in which they fall."""
    starts = offsets_of(shard.lengths)
    for split, low, high in zip(SPLITS, bounds[:-1] - first, bounds[1:] - first, strict=True):
        rows = slice(max(low, 0), min(max(high, 0), len(shard.labels)))
        if rows.start < rows.stop:
            writer.append(split, "values", shard.values[starts[rows.start] : starts[rows.stop]])
            writer.append(split, "lengths", shard.lengths[rows])
            writer.append(split, "labels", shard.labels[rows])


def _make_parts(generator: Generator, parts: Path, shards: range, workers: int) -> None:
    """Have the files of these shards: those that an earlier, interrupted try has left are not made again."""
    with progress(f"generating {generator.name}", len(shards) * generator.shard_size, "samples") as done:
        if not any(parts.glob("*.npz")):  # the first tells how much room all will need
            _make_part(generator, parts, shards[0])
        _check_room(generator, parts, shards)
        missing = [index for index in shards if not _part(parts, index).exists()]
        workers = min(workers, len(missing))
        if workers > 1 and _is_importable(type(generator)):
            _run_workers(generator, parts, shards, missing, workers, done)
            return
        for count, index in enumerate(missing, start=len(shards) - len(missing)):
            done(count * generator.shard_size)
            _make_part(generator, parts, index)


def _check_room(generator: Generator, parts: Path, shards: range) -> None:
    """The missing shards, and then all of them once more in the set, must fit on the disk."""
    made = {int(file.stem): file.stat().st_size for file in parts.glob("*.npz") if file.stem.isdecimal()}
    missing = len(shards) - sum(index in shards for index in made)
    need = (len(shards) + missing) * sum(made.values()) / max(len(made), 1)
    free = shutil.disk_usage(parts).free
    if need > free:
        raise CacheError(
            f"{generator.name} needs about {need / 1e6:,.1f} MB in the cache folder {home()}, which has "
            f"{free / 1e6:,.1f} MB left; make room there, or set LONGLENS_HOME to a folder on another disk"
        )


def _run_workers(
    generator: Generator, parts: Path, shards: range, missing: list[int], workers: int, done: Done
) -> None:
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        try:
            for i, log in enumerate(logs):
                processes.append(_start_worker(generator, parts, missing[i::workers], log))
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                done(sum(_part(parts, index).exists() for index in shards) * generator.shard_size)
                time.sleep(0.1)
        finally:
            for process in processes:
                process.terminate()
                process.communicate()
        for code, log in zip(codes, logs, strict=True):
            if code:
                log.seek(0)
                _raise_again(code, log.read())


def _is_importable(generator_class: type) -> bool:
    """Whether another process can find this class: not if it is of the main file, or of a function."""
    try:
        return generator_class.__module__ != "__main__" and hasattr(
            importlib.import_module(generator_class.__module__), generator_class.__qualname__
        )
    except ImportError:
        return False


def _start_worker(generator: Generator, parts: Path, shards: list[int], log: IO[str]) -> subprocess.Popen[str]:
    """A command of its own, since the workers of multiprocessing run the user's main file once more."""
    order = {"path": sys.path, "module": type(generator).__module__, "class": type(generator).__qualname__}
    order |= {"options": generator.values(), "parts": str(parts.resolve()), "shards": shards}
    process = subprocess.Popen(
        [sys.executable, "-m", "longlens.data.generate"],
        stdin=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its log will say why it is gone
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()  # and left open: its end tells the worker that this process is gone
    return process


def _raise_again(code: int, log: str) -> NoReturn:
    """Raise in this process what stopped a worker."""
    if code in STOPPED:
        raise Interrupted("stopped while samples were generated; finished ones are kept")
    if code < 0:
        raise LongLensError(
            f"a process that generates samples was killed by signal {-code}, perhaps for want of memory; finished "
            "samples are kept, and the same command resumes"
        )
    kinds = {kind.__name__: kind for kind in (BadInput, CacheError, MemoryError)}
    try:
        said = json.loads(log.strip().splitlines()[-1])
        error = kinds[said["kind"]](said["message"])
    except (ValueError, LookupError, TypeError):  # a bug: its traceback is shown
        error = RuntimeError(f"a process that generates samples failed:\n{log.strip()}")
    raise error


def _part(parts: Path, index: int) -> Path:
    return parts / f"{index:06}.npz"


def _make_part(generator: Generator, parts: Path, index: int) -> Shard:
    shard = generator.shard(index)
    temporary = parts / f"{index:06}.{os.getpid()}"
    with cache_errors():
        try:
            with temporary.open("wb") as file:
                np.savez(file, **shard._asdict())
            temporary.replace(_part(parts, index))
        finally:
            temporary.unlink(missing_ok=True)
    return shard


def _read_part(generator: Generator, parts: Path, index: int) -> Shard:
    try:
        with np.load(_part(parts, index), allow_pickle=False) as arrays:
            return Shard(arrays["values"], arrays["lengths"], arrays["labels"])
    except Exception:  # libraries raise nearly everything for a damaged file: it is made again
        return _make_part(generator, parts, index)


def _work() -> None:
    """A worker: make the shards that the first line of the input asks for, and stop when the input ends."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exit code that the parent knows, and no traceback
    order = json.loads(sys.stdin.readline())
    # Not sys.stdin.read(): Python cannot close a file at its end that a thread is still reading.
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(0), daemon=True).start()
    sys.path[:] = order["path"]
    try:
        if order["module"].startswith("longlens_added_"):  # a file that LONGLENS_IMPORT names
            import_added()
        generator = getattr(importlib.import_module(order["module"]), order["class"])(**order["options"])
        for index in order["shards"]:
            _make_part(generator, Path(order["parts"]), index)
    except (BadInput, CacheError, MemoryError) as error:
        kind = next(kind for kind in (BadInput, CacheError, MemoryError) if isinstance(error, kind))
        print(json.dumps({"kind": kind.__name__, "message": str(error)}), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    _work()
