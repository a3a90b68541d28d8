"""The cache of prepared data sets: folders of memory-mapped arrays below ``LONGLENS_HOME``.

A set is one folder, ``sets/<name>-<hash of its identity>/``: ``<split>.<array>.npy`` files and ``meta.json`` with the
identity, the counts and a checksum of each file. It is written beside its place and then renamed, under a lock, so that
it is there whole or not at all, whoever is killed and however many processes want it at once. Files are compared with
their checksums before they are used; ``.verified.json`` notes which were, so that this happens once.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import platformdirs
from filelock import FileLock, Timeout

from longlens.data.npy import NpyWriter, map_npy
from longlens.errors import BadInput, LongLensError
from longlens.files import read_json, sha256, write_json
from longlens.options import Option

FORMAT = 1  # of the folders; a new number makes all sets anew
VERIFIED = ".verified.json"
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
        file = f"{split}.{name}.npy"
        return self._retry_locked(file, lambda: self._open(file))

    def check(self) -> None:
        """Compare all files with their checksums, but for those that did not change since the last time."""
        for file in list(self.meta["files"]):
            self._retry_locked(file, lambda file=file: self._open(file))

    def verify(self) -> list[str]:
        """What is wrong with the files, in one line each; nothing if all are as they were written."""
        problems = []
        for file, facts in self.meta["files"].items():
            path = self.folder / file
            try:
                if not path.is_file():
                    problems.append(f"{file} is missing")
                elif sha256(path) != facts["sha256"]:
                    problems.append(f"{file} was changed after it was written")
            except OSError as error:
                problems.append(f"{file} cannot be read: {error.strerror or error}")
        return problems

    def size(self) -> int:
        """Bytes on disk."""
        paths = (self.folder / file for file in (*self.meta["files"], "meta.json"))
        return sum(path.stat().st_size for path in paths if path.is_file())

    def _retry_locked(self, file: str, read: Callable[[], _Read]) -> _Read:
        """Read, and once more under the lock if that fails: another process may be replacing the set."""
        try:
            return read()
        except (OSError, BadInput):
            pass
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
        _check_regular(path)
        meta = read_json(path)
        try:
            known = isinstance(meta["recipe"], dict) and all(type(n) is int for n in meta["details"]["sizes"].values())
            for file, facts in meta["files"].items():
                known &= Path(file).name == file and type(facts["sha256"]) is str
                known &= all(type(size) is int for size in facts["shape"])
            same = "sha256" not in meta or meta["sha256"] == _meta_checksum(meta)  # older sets have none
        except (TypeError, KeyError, AttributeError, RecursionError):
            known = same = False
        if not known:
            raise BadInput("it is not complete, or has values of other types")
        if not same:
            raise BadInput("it was changed after it was written")
        return meta

    def _open(self, file: str) -> np.ndarray:
        if file not in self.meta["files"]:
            raise BadInput("meta.json does not list it")
        path, facts = self.folder / file, self.meta["files"][file]
        _check_regular(path)
        with path.open("rb") as opened:
            self._compare(path, os.fstat(opened.fileno()), facts["sha256"])
            array = map_npy(opened)
        if list(array.shape) != facts["shape"]:
            raise BadInput(f"its shape is {array.shape}")
        return array

    def _compare(self, path: Path, status: os.stat_result, checksum: str) -> None:
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, checksum]
        if self._compared.get(path.name) == stamp:
            return
        record = self._read_record()
        if record.get(path.name) != stamp:
            if sha256(path) != checksum:
                raise BadInput("it was changed after it was written")
            if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > RACY:
                with suppress(OSError):  # in a cache that cannot be written, it is compared each time
                    write_json(self.folder / VERIFIED, record | {path.name: stamp})
        self._compared[path.name] = stamp

    def _read_record(self) -> dict[str, Any]:
        path = self.folder / VERIFIED
        try:
            record = read_json(path) if path.is_file() else {}
        except (OSError, BadInput):
            record = {}
        return record if isinstance(record, dict) else {}

    def _damaged(self, file: str, reason: object) -> CacheError:
        said = getattr(reason, "strerror", None) or reason  # of the system, without the number of the error
        return CacheError(
            f"the prepared set {self.folder} is damaged: {file}: {said}; make it again by 'longlens data prepare' "
            "for its task with --force, or delete the folder"
        )


class Writer:
    """Writes the arrays of a new set, each in as many pieces as there are."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._arrays: dict[str, NpyWriter] = {}

    def append(self, split: str, name: str, piece: np.ndarray) -> None:
        """Add ``piece`` along the first axis of an array."""
        file = f"{split}.{name}.npy"
        with cache_errors():
            if file not in self._arrays:
                self._arrays[file] = NpyWriter(self.folder / file, piece)
            self._arrays[file].append(piece)

    def finish(self, identity: Mapping[str, Any], details: Details) -> None:
        if "sizes" not in details:
            raise ValueError("a set must note the sizes of its splits in its details")
        with cache_errors():
            files = {}
            for name, array in self._arrays.items():
                files[name] = {"shape": array.close(), "sha256": sha256(self.folder / name)}
            meta = {"recipe": {"format": FORMAT, **identity}, "details": details, "files": files}
            write_json(self.folder / "meta.json", meta | {"sha256": _meta_checksum(meta)})

    def abandon(self) -> None:
        for array in self._arrays.values():
            with suppress(OSError):  # what is still in the buffer may not fit on the disk either
                array.file.close()


Build = Callable[[Writer], Details]


def prepare(name: str, identity: Mapping[str, Any], build: Build, *, force: bool = False) -> Prepared:
    """The set of this identity, from the cache, or made by ``build`` and put there."""
    folder = set_folder(name, identity)
    if is_prepared(folder) and not force:
        return Prepared(folder)
    with locked(folder):
        if is_prepared(folder) and not force:  # another process has made it meanwhile
            return Prepared(folder)
        new, old = _beside(folder, "new"), _beside(folder, "old")
        with cache_errors():
            if is_prepared(old) and not folder.exists():  # killed while one was replaced by the other
                old.rename(folder)
            _remove(new, old)
            new.mkdir(parents=True)
        writer = Writer(new)
        try:
            writer.finish(identity, build(writer))
            with cache_errors():
                _replace(folder, new, old)
            _remove(parts_folder(folder))
        finally:
            writer.abandon()
            _remove(new, old)
            with suppress(OSError):  # finished parts are kept for the next try
                parts_folder(folder).rmdir()
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
        raise CacheError(
            f"cannot write to the cache folder {home()}: {error.strerror or error}; make room there and close "
            "what uses it, or set LONGLENS_HOME to a folder on another disk"
        ) from error


def parts_folder(folder: Path) -> Path:
    """Where finished parts wait while a set is being generated; only who holds the lock of the set touches it."""
    return _beside(folder, "parts")


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


def _check_regular(path: Path) -> None:
    """A folder, a pipe or a device would be read forever, or not at all."""
    path.stat()
    if not path.is_file():
        raise BadInput("it is not a file")


def _meta_checksum(meta: Mapping[str, Any]) -> str:
    content = {key: meta[key] for key in ("recipe", "details", "files")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
