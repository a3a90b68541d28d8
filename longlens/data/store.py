"""The cache of prepared data sets: folders of memory-mapped arrays below ``LONGLENS_HOME``.

A set is one folder, ``sets/<name>-<hash of its identity>/``: ``<split>.<array>.npy`` files and ``meta.json`` with the
identity, the counts and a checksum of each file. It is written beside its place and then renamed, under a lock, so that
it is there whole or not at all, whoever is killed and however many processes want it at once. Files are compared with
their checksums before they are used; ``.verified.json`` notes which were, so that this happens once.
"""

import hashlib
import json
import math
import os
import shutil
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import platformdirs
from filelock import FileLock, Timeout

from longlens.errors import BadInput, LongLensError, first_line
from longlens.files import SEAL, open_file, read_json, read_sealed, sha256, write_json, write_sealed
from longlens.options import Option, shorten

FORMAT = 1  # of the folders; a new number makes all sets anew
HEADER = 128  # bytes of a .npy file, with room for any length
VERIFIED = ".verified.json"
ANOTHER_DISK = "make room there, or set LONGLENS_HOME to a folder on another disk"
RACY = 1_000_000_000  # nanoseconds: a file that is younger may change again without a new time

Details = dict[str, Any]
_Read = TypeVar("_Read")


class CacheError(LongLensError):
    """The cache folder cannot be read or written, or a set in it is damaged."""

    exit_code = BadInput.exit_code


def home() -> Path:
    """The cache folder: ``LONGLENS_HOME``, or ``longlens`` in the user's cache folder."""
    given = os.environ.get("LONGLENS_HOME")
    if given:
        return expand(given, "LONGLENS_HOME")
    folder = platformdirs.user_cache_path("longlens")
    if not folder.is_absolute():
        raise BadInput(f"there is no home folder for {folder}: set LONGLENS_HOME to a folder for data")
    return folder


def expand(path: Path | str, what: str) -> Path:
    """The path with ``~`` replaced. ``what`` names it in an error."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(f"{what} must be a path, got {path}: there is no such user") from None


def set_folder(name: str, identity: Mapping[str, Any]) -> Path:
    """Where the set of this identity is or will be."""
    text = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
    return home() / "sets" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Prepared:
    """A set that is in the cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._compared: dict[str, list[Any]] = {}  # files that were compared with their checksums
        self.meta: Details = self._retry_locked("meta.json", self._read_meta)

    @property
    def details(self) -> Details:
        """What its task noted: counts, the vocabulary, where the data came from."""
        return self.meta["details"]

    def detail(self, name: str, hint: Any) -> Any:
        """One of the details, of a type. CacheError if it is missing or of another one."""
        if name not in self.details:
            raise self._damaged("meta.json", f"it has no {name}")
        try:
            return Option(name, hint).check(self.details[name])
        except BadInput as error:
            raise self._damaged("meta.json", error) from error

    def array(self, split: str, name: str) -> np.ndarray:
        """A memory-mapped array, read-only, as it was written."""
        return self._open(f"{split}.{name}.npy")

    def check(self) -> None:
        """Compare all files with their checksums, but for those that did not change since the last time."""
        for file in list(self.meta["files"]):
            self._open(file)

    def verify(self) -> list[str]:
        """What is wrong with the files, in one line each; nothing if all are as they were written."""
        problems = []
        for file, facts in self.meta["files"].items():
            try:
                if sha256(self.folder / file) != facts["sha256"]:
                    problems.append(f"{file} was changed after it was written")
            except FileNotFoundError:
                problems.append(f"{file} is missing")
            except OSError as error:
                problems.append(f"{file} cannot be read: {error.strerror or error}")
        return problems

    def size(self) -> int:
        """Bytes on disk."""
        paths = (self.folder / file for file in (*self.meta["files"], "meta.json"))
        return sum(path.stat().st_size for path in paths if path.is_file())

    def _retry_locked(self, file: str, read: Callable[[], _Read]) -> _Read:
        """Read, and once more under the lock if that fails: another process may be replacing the set."""
        with suppress(OSError, BadInput):
            return read()
        try:
            with ExitStack() as stack:
                with suppress(CacheError):  # in a cache that cannot be written, nobody replaces anything
                    stack.enter_context(locked(self.folder))
                self.meta = self._read_meta()
                return read()
        except (OSError, BadInput) as error:
            raise self._damaged(file, error) from error

    def _read_meta(self) -> Details:
        path = self.folder / "meta.json"
        meta = read_json(path)
        try:
            known = isinstance(meta["recipe"], dict) and all(type(n) is int for n in meta["details"]["sizes"].values())
            for file, facts in meta["files"].items():
                known &= Path(file).name == file and type(facts["sha256"]) is str
                known &= all(type(size) is int for size in facts["shape"])
        except (TypeError, KeyError, AttributeError):
            known = False
        if not known:
            raise BadInput("it is not complete, or has values of other types")
        if SEAL in meta:  # older sets have none
            read_sealed(path)
        return meta

    def _open(self, file: str) -> np.ndarray:
        def read() -> np.ndarray:
            if file not in self.meta["files"]:
                raise BadInput("meta.json does not list it")
            facts = self.meta["files"][file]
            with open_file(self.folder / file) as opened:
                self._compare(self.folder / file, os.fstat(opened.fileno()), facts["sha256"])
                array = map_npy(opened)
            if list(array.shape) != facts["shape"]:
                raise BadInput(f"its shape is {array.shape}")
            return array

        return self._retry_locked(file, read)

    def _compare(self, path: Path, status: os.stat_result, checksum: str) -> None:
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, checksum]
        if self._compared.get(path.name) == stamp:
            return
        record: Any = {}
        with suppress(OSError, BadInput):
            record = read_json(self.folder / VERIFIED)
        record = record if isinstance(record, dict) else {}
        if record.get(path.name) != stamp:
            if sha256(path) != checksum:
                raise BadInput("it was changed after it was written")
            if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > RACY:
                with suppress(OSError):  # in a cache that cannot be written, it is compared each time
                    write_json(self.folder / VERIFIED, record | {path.name: stamp})
        self._compared[path.name] = stamp

    def _damaged(self, file: str, reason: object) -> CacheError:
        said = getattr(reason, "strerror", None) or reason  # of the system, without the number of the error
        again = "make it again by 'longlens data prepare' for its task with --force, or delete the folder"
        return CacheError(f"the prepared set {self.folder} is damaged: {file}: {said}; {again}")


def map_npy(file: BinaryIO) -> np.ndarray:
    """The array of an opened .npy file, memory-mapped and read-only. BadInput if it is not one of plain values."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings(action="ignore"):  # of Python 2
            shape, is_fortran, dtype = read(file)
        if dtype.hasobject or dtype.itemsize == 0 or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"it has {dtype} {shape}")
    except Exception as error:  # numpy reads the header as Python, and what is written there may raise anything
        raise BadInput(f"it is not a .npy file of plain values ({shorten(first_line(error))})") from None
    start = file.tell()
    there = os.fstat(file.fileno()).st_size - start
    if math.prod(shape) * dtype.itemsize != there:
        raise BadInput(f"its header says {dtype} {shorten(shape)}, and {there:,} bytes follow, which is not that")
    return np.memmap(file, dtype, "r", start, shape, "F" if is_fortran else "C")


class NpyWriter:
    """A .npy file that grows along its first axis; its header is written last.

    The header is spelled out here, as the checksums of a set must not depend on the version of numpy.
    """

    def __init__(self, file: BinaryIO, first: np.ndarray):
        self.file = file
        self.file.write(bytes(HEADER))
        self.dtype = first.dtype
        self.tail = first.shape[1:]
        self.length = 0

    def append(self, piece: np.ndarray) -> None:
        if piece.dtype != self.dtype or piece.shape[1:] != self.tail:
            raise ValueError(f"a piece of {piece.dtype} {piece.shape[1:]} after pieces of {self.dtype} {self.tail}")
        self.file.write(np.ascontiguousarray(piece).data)
        self.length += len(piece)

    def finish(self) -> list[int]:
        """Write the header. Returns the shape."""
        shape = (self.length, *self.tail)
        facts = repr({"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape})
        text = facts.encode().ljust(HEADER - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
        return list(shape)


class Writer:
    """Writes the arrays of a new set, each in as many pieces as there are."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._arrays: dict[str, NpyWriter] = {}

    def append(self, split: str, **pieces: np.ndarray) -> None:
        """Add to the arrays of a split, along their first axis: ``append("train", values=…, labels=…)``."""
        with cache_errors():
            for name, piece in pieces.items():
                file = f"{split}.{name}.npy"
                if file not in self._arrays:
                    self._arrays[file] = NpyWriter((self.folder / file).open("wb"), piece)
                self._arrays[file].append(piece)

    def finish(self, identity: Mapping[str, Any], details: Details) -> None:
        if "sizes" not in details:
            raise ValueError("a set must note the sizes of its splits in its details")
        with cache_errors():
            files = {}
            for name, array in self._arrays.items():
                with array.file as file:
                    shape = array.finish()
                    file.flush()
                    os.fsync(file.fileno())
                files[name] = {"shape": shape, "sha256": sha256(self.folder / name)}
            meta = {"recipe": {"format": FORMAT, **identity}, "details": details, "files": files}
            write_sealed(self.folder / "meta.json", meta)

    def abandon(self) -> None:
        for array in self._arrays.values():
            with suppress(OSError):  # what is still in the buffer may not fit on the disk either
                array.file.close()


def prepare(
    name: str, identity: Mapping[str, Any], build: Callable[[Writer], Details], *, force: bool = False
) -> Prepared:
    """The set of this identity, from the cache, or made by ``build`` and put there."""
    folder = set_folder(name, identity)
    if is_prepared(folder) and not force:
        return Prepared(folder)
    with locked(folder):
        if is_prepared(folder) and not force:  # another process has made it meanwhile
            return Prepared(folder)
        new, old = _beside(folder, "new"), _beside(folder, "old")
        with cache_errors():
            for whole in (new, old):  # killed while one was replaced by the other
                if is_prepared(whole) and not folder.exists():
                    whole.rename(folder)
            _remove(new, old)
            if is_prepared(folder) and not force:
                return Prepared(folder)
            new.mkdir(parents=True)
        writer = Writer(new)
        try:
            writer.finish(identity, build(writer))
            with cache_errors():
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            _remove(parts_folder(folder))
        finally:
            writer.abandon()
            if old.exists() and not folder.exists():  # which could not be replaced
                old.rename(folder)
            _remove(new, old)
            with suppress(OSError):  # finished parts are kept for the next try
                parts_folder(folder).rmdir()
    return Prepared(folder)


def _remove(*folders: Path) -> None:
    """Remove folders, or the links that are in their place."""
    for folder in folders:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)


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
    with cache_errors():
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
def cache_errors() -> Iterator[None]:
    """Around what touches the cache folder: says what to do when it cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CacheError(f"cannot write to the cache folder {home()}: {reason}; {ANOTHER_DISK}") from error


def parts_folder(folder: Path) -> Path:
    """Where finished parts wait while a set is being generated; only who holds the lock of the set touches it."""
    return _beside(folder, "parts")


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")
