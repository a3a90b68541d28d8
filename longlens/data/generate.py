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
from contextlib import ExitStack, suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, NoReturn, Protocol

import numpy as np

from longlens.data.datasets import SPLITS, offsets_of
from longlens.data.store import ANOTHER_DISK, CacheError, Details, Writer, cache_errors, home
from longlens.errors import BadInput, Interrupted, LongLensError
from longlens.files import open_atomic
from longlens.progress import Done, progress
from longlens.registry import import_added

STOPPED = (-signal.SIGINT, -signal.SIGTERM)
ERRORS = {kind.__name__: kind for kind in (BadInput, CacheError, MemoryError)}  # of a worker, raised again here


class Shard(NamedTuple):
    """Samples one after another: sample i is the next ``lengths[i]`` of ``values``."""

    values: np.ndarray  # (total,) uint8
    lengths: np.ndarray  # (N,) int64
    labels: np.ndarray  # (N,) uint8


class Generator(Protocol):
    """What makes samples. Another process makes the same ones from its class and its values."""

    name: ClassVar[str]
    shard_size: ClassVar[int]
    together: ClassVar[int]  # samples that stay or go together when one of them is repeated

    @property
    def sizes(self) -> tuple[int, int, int]: ...

    def shard(self, index: int) -> Shard: ...

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
    index, ready = 0, 0
    while kept < needed:
        if index == ready:
            if repeated > max(3 * kept, 10_000):
                few = f"{generator.name} with these options has only about {kept:,} different ones"
                raise BadInput(f"sizes must be smaller, got {needed:,} samples in all: {few}; or ask for longer ones")
            ready += -(-(needed - kept) // generator.shard_size)
            _make_parts(generator, parts, range(index, ready), workers)
        shard = _read_part(generator, parts, index)
        index += 1
        starts = offsets_of(shard.lengths)
        samples = [shard.values[start:end] for start, end in pairwise(starts)]
        new = _new_rows(samples, seen, generator.together)
        repeated += len(samples) - len(new)
        new = new[: needed - kept]
        ends = np.clip(np.cumsum(generator.sizes) - kept, 0, len(new))  # of the splits, among these
        for split, rows in zip(SPLITS, np.split(np.array(new, dtype=int), ends[:-1]), strict=True):
            if len(rows):
                values = np.concatenate([samples[row] for row in rows])
                writer.append(split, values=values, lengths=shard.lengths[rows], labels=shard.labels[rows])
        kept += len(new)
    return {"sizes": dict(zip(SPLITS, generator.sizes, strict=True))}


def _new_rows(samples: list[np.ndarray], seen: set[bytes], together: int) -> list[int]:
    """The samples that were not seen before, and whose companions were not either."""
    digests = [blake2b(values.tobytes(), digest_size=16).digest() for values in samples]
    new = []
    for first in range(0, len(digests), together):
        group = digests[first : first + together]
        if len(set(group) - seen) == together:
            new += range(first, first + together)
        seen.update(group)
    return new


def _make_parts(generator: Generator, parts: Path, shards: range, workers: int) -> None:
    """Have the files of these shards: those that an earlier, interrupted try has left are not made again."""
    with progress(f"generating {generator.name}", len(shards) * generator.shard_size, "samples") as done:
        if not any(parts.glob("*.npz")):  # the first tells how much room all will need
            _make_part(generator, parts, shards[0])
        _check_room(generator, parts, shards)
        missing = [index for index in shards if not _part(parts, index).exists()]
        workers = min(workers, len(missing))
        module, name = type(generator).__module__, type(generator).__qualname__
        # Other processes cannot find a class of the main file, or of a function.
        if workers > 1 and module != "__main__" and hasattr(sys.modules.get(module), name):
            _run_workers(generator, parts, shards, missing, workers, done)
        else:
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
        needs = f"{generator.name} needs about {need / 1e6:,.1f} MB in the cache folder {home()}"
        raise CacheError(f"{needs}, which has {free / 1e6:,.1f} MB left; {ANOTHER_DISK}")


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


def _start_worker(generator: Generator, parts: Path, shards: list[int], log: IO[str]) -> subprocess.Popen[str]:
    """A command of its own, since the workers of multiprocessing run the user's main file once more."""
    order = {"path": sys.path, "module": type(generator).__module__, "class": type(generator).__qualname__}
    order |= {"options": generator.values(), "parts": str(parts.resolve()), "shards": shards}
    command = [sys.executable, "-m", "longlens.data.generate"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log, text=True, env=variables)
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
        killed = f"a process that generates samples was killed by signal {-code}, perhaps for want of memory"
        raise LongLensError(f"{killed}; finished samples are kept, and the same command resumes")
    try:
        kind, message = json.loads(log.strip().splitlines()[-1])
        error = ERRORS[kind](message)
    except (ValueError, LookupError, TypeError):  # a bug: its traceback is shown
        error = RuntimeError(f"a process that generates samples failed:\n{log.strip()}")
    raise error


def _part(parts: Path, index: int) -> Path:
    return parts / f"{index:06}.npz"


def _make_part(generator: Generator, parts: Path, index: int) -> Shard:
    shard = generator.shard(index)
    with cache_errors(), open_atomic(_part(parts, index)) as file:
        np.savez(file, **shard._asdict())
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
    except tuple(ERRORS.values()) as error:
        kind = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
        print(json.dumps([kind, str(error)]), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    _work()
