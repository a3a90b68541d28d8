"""The cache of prepared data sets: folders of memory-mapped arrays below ``LONGLENS_HOME``.

A set is one folder, ``sets/<name>-<hash of its recipe>/``: ``<split>.<array>.npy`` files and ``meta.json`` with the
recipe, the counts and a checksum of each file. It is written beside its place and then renamed, under a lock, so that
it is there whole or not at all, whoever is killed and however many processes want it at once.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

FORMAT = 1  # of the folders; a new number makes all sets anew

Details = dict[str, Any]


class CacheError(OSError):
    """The cache folder cannot be read or written."""


def home() -> Path:
    """The cache folder: ``LONGLENS_HOME``, or ``longlens`` in the user's cache folder."""
    given = os.environ.get("LONGLENS_HOME")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longlens"


def set_folder(name: str, recipe: Mapping[str, Any]) -> Path:
    """Where the set of this recipe is or will be."""
    text = json.dumps({"format": FORMAT, **recipe}, sort_keys=True)
    return home() / "sets" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Prepared:
    """A set that is in the cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.meta: Details = self._steadily(self._read_meta)
        except (OSError, ValueError) as error:
            raise self._damaged("meta.json", error) from error

    def _read_meta(self) -> Details:
        meta = json.loads((self.folder / "meta.json").read_text())
        if not isinstance(meta, dict) or not {"files", "recipe", "details"} <= meta.keys():
            raise ValueError("it is not complete")
        return meta

    def _steadily(self, read: Callable[[], Any]) -> Any:
        """Read, and once more under the lock if a file is gone: another process may be replacing the set."""
        try:
            return read()
        except FileNotFoundError:
            with locked(self.folder):
                return read()

    @property
    def details(self) -> Details:
        """What its task noted: counts, the vocabulary, where the data came from."""
        return self.meta["details"]

    def array(self, split: str, name: str) -> np.ndarray:
        """A memory-mapped array, read-only."""
        file = f"{split}.{name}.npy"
        try:
            array = self._steadily(lambda: np.load(self.folder / file, mmap_mode="r", allow_pickle=False))
            if list(array.shape) != self._shape(file):
                self.meta = self._steadily(self._read_meta)  # of a set that was replaced since
        except (ValueError, OSError) as error:
            raise self._damaged(file, error) from error
        if list(array.shape) != self._shape(file):
            raise self._damaged(file, f"its shape is {array.shape}")
        return array

    def _shape(self, file: str) -> list[int] | None:
        return self.meta["files"].get(file, {}).get("shape")

    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def verify(self) -> list[str]:
        """What is wrong with the files, in one line each; nothing if all are as they were written."""
        problems = []
        for file, facts in self.meta["files"].items():
            path = self.folder / file
            if not path.exists():
                problems.append(f"{file} is missing")
            elif _sha256(path) != facts["sha256"]:
                problems.append(f"{file} was changed after it was written")
        return problems

    def _damaged(self, file: str, reason: object) -> CacheError:
        return CacheError(
            f"the prepared set {self.folder} is damaged: {file}: {reason}; delete the folder, or run "
            "'longlens data prepare' for its task with --force"
        )


class Writer:
    """Writes the arrays of a new set, each in as many pieces as there are."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._arrays: dict[str, _Array] = {}

    def append(self, split: str, name: str, piece: np.ndarray) -> None:
        """Add ``piece`` along the first axis of an array."""
        file = f"{split}.{name}.npy"
        with explained():
            if file not in self._arrays:
                self._arrays[file] = _Array(self._folder / file, piece)
            self._arrays[file].append(piece)

    def finish(self, recipe: Mapping[str, Any], details: Details) -> None:
        if "sizes" not in details:
            raise ValueError("a set must note the sizes of its splits in its details")
        with explained():
            files = {}
            for name, array in self._arrays.items():
                files[name] = {"shape": array.close(), "sha256": _sha256(self._folder / name)}
            meta = {"recipe": {"format": FORMAT, **recipe}, "details": details, "files": files}
            with open(self._folder / "meta.json", "w") as file:
                json.dump(meta, file, indent=1)
                file.flush()
                os.fsync(file.fileno())

    def abandon(self) -> None:
        for array in self._arrays.values():
            with suppress(OSError):  # what is still in the buffer may not fit on the disk either
                array.file.close()


class _Array:
    """A .npy file that grows. Its header has room for any length, and is written last."""

    HEADER = 128

    def __init__(self, path: Path, first: np.ndarray):
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115
        self.file.write(bytes(self.HEADER))
        self.dtype, self.tail, self.length = first.dtype, first.shape[1:], 0

    def append(self, piece: np.ndarray) -> None:
        if piece.dtype != self.dtype or piece.shape[1:] != self.tail:
            raise ValueError(f"a piece of {piece.dtype} {piece.shape[1:]} after pieces of {self.dtype} {self.tail}")
        self.file.write(np.ascontiguousarray(piece).data)
        self.length += len(piece)

    def close(self) -> list[int]:
        shape = (self.length, *self.tail)
        facts = repr({"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape})
        text = facts.encode().ljust(self.HEADER - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return list(shape)


Build = Callable[[Writer], Details]


def prepare(name: str, recipe: Mapping[str, Any], build: Build, *, force: bool = False) -> Prepared:
    """The set of this recipe, from the cache, or made by ``build`` and put there."""
    folder = set_folder(name, recipe)
    if is_prepared(folder) and not force:
        return Prepared(folder)
    with locked(folder):
        if is_prepared(folder) and not force:  # another process has made it meanwhile
            return Prepared(folder)
        new, old = _beside(folder, "new"), _beside(folder, "old")
        with explained():
            if is_prepared(old) and not folder.exists():  # killed while one was replaced by the other
                old.rename(folder)
            for leftover in (new, old):
                shutil.rmtree(leftover, ignore_errors=True)
            new.mkdir(parents=True)
        writer = Writer(new)
        try:
            details = build(writer)
            writer.finish(recipe, details)
            with explained():
                _replace(folder, new, old)
            shutil.rmtree(parts_folder(folder), ignore_errors=True)
        except CacheError:  # a full disk needs the room
            shutil.rmtree(parts_folder(folder), ignore_errors=True)
            raise
        finally:
            writer.abandon()
            for leftover in (new, old):
                shutil.rmtree(leftover, ignore_errors=True)
    return Prepared(folder)


def _replace(folder: Path, new: Path, old: Path) -> None:
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise


def is_prepared(folder: Path) -> bool:
    return (folder / "meta.json").exists()


def prepared_sets() -> list[Path]:
    """The folders of all sets in the cache."""
    found = sorted(file.parent for file in (home() / "sets").glob("*/meta.json"))
    return [folder for folder in found if not folder.name.endswith((".new", ".old"))]


def unfinished_sets() -> list[Path]:
    """The folders of parts of sets that are being generated, or were until they were interrupted."""
    return sorted((home() / "sets").glob("*.parts"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; say so when another process holds it."""
    with explained():
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_beside(folder, "lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that prepares {folder.name}", file=sys.stderr, flush=True)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def explained() -> Iterator[None]:
    """Around what touches the cache folder: says what to do when it cannot be written."""
    try:
        yield
    except CacheError:
        raise
    except OSError as error:
        raise CacheError(
            f"cannot write to the cache folder {home()}: {error.strerror or error}; make room there and close "
            "what uses it, or set LONGLENS_HOME to a folder on another disk"
        ) from error


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


def parts_folder(folder: Path) -> Path:
    """Where finished parts wait while a set is being generated; only who holds the lock of the set touches it."""
    return _beside(folder, "parts")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
