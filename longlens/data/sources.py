"""Where real data comes from: downloads with checksums, and the folders and archives that a user has."""

import gzip
import hashlib
import http.client
import os
import re
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import IO

from longlens import __version__
from longlens.data.store import cache_errors, home, locked
from longlens.errors import BadInput, LongLensError
from longlens.options import shorten
from longlens.progress import progress

ARENA = "lra_release.gz (8 GB) of github.com/google-research/long-range-arena"
CHUNK = 1 << 20
TRIES = 3  # of one address, each resuming where the one before stopped
LONGEST_LINE = 1 << 24  # bytes of a line in a text, far above those of any set
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", "_release.gz")

Entry = tuple[str, str, IO[bytes]]  # of a source: its name, its place for an error, and its content


@dataclass(frozen=True)
class Remote:
    """A file on the network."""

    name: str
    urls: tuple[str, ...]  # the makers' address, then copies
    checksum: str  # "md5:…" or "sha256:…"

    def fetch(self, command: str) -> Path:
        """The file in the cache: downloaded if it is not there or damaged, and kept only if its checksum is right.

        ``command`` imports the data from a folder, which is what an error advises.
        """
        target = home() / "downloads" / self.name
        with locked(target):
            part = target.with_name(f"{self.name}.part")
            if target.exists():
                if self._checksum(target) == self.checksum:
                    return target
                print(f"{target} is damaged: downloading it again", file=sys.stderr, flush=True)
                with cache_errors():
                    target.replace(part)  # if it is the beginning of the file, the rest is enough
            failures = []
            for url in self.urls:
                try:
                    found = self._try(url, part)
                except (OSError, http.client.HTTPException) as error:
                    failures.append(f"{url} ({shorten(str(getattr(error, 'reason', None) or error))})")
                    continue
                if found == self.checksum:
                    with cache_errors():
                        part.replace(target)
                    return target
                failures.append(f"{url} (its checksum is {found}, not {self.checksum}: not the official file)")
        advice = f"run '{command}', where DIR is a folder that has it, or try again"
        raise BadInput(f"{self.name} cannot be downloaded: {advice}; it is at {' or '.join(failures)}")

    def _try(self, url: str, part: Path) -> str:
        """Download to ``part``; the checksum of it. What was there before is not trusted twice."""
        resumed = part.exists()
        _download(url, part)
        found = self._checksum(part)
        if found != self.checksum:
            with cache_errors():
                part.unlink()
            if resumed:
                return self._try(url, part)
        return found

    def _checksum(self, path: Path) -> str:
        kind = self.checksum.partition(":")[0]
        with cache_errors(), path.open("rb") as file:
            return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _download(url: str, part: Path) -> None:
    """Get a file, or the rest of it, into ``part``."""
    for attempt in range(TRIES):
        have = part.stat().st_size if part.exists() else 0
        headers = {"User-Agent": f"longlens/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
                resumes = answer.status == 206
                said = answer.headers.get("Content-Length") or ""
                total = int(said) + (have if resumes else 0) if said.isdecimal() and len(said) < 19 else 0
                with progress(f"downloading {part.stem}", total, "bytes") as done, _opened(part, resumes) as file:
                    count = have if resumes else 0
                    while chunk := answer.read(CHUNK):
                        with cache_errors():
                            file.write(chunk)
                        count += len(chunk)
                        done(count)
                if total and count < total:
                    raise ConnectionError(f"the connection ended after {count:,} of {total:,} bytes")
            return
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing after what is there: the checksum will tell
                return
            raise
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            if attempt == TRIES - 1:
                raise
            time.sleep(0.1 * 4**attempt)


@contextmanager
def _opened(part: Path, resumes: bool) -> Iterator[IO[bytes]]:
    with cache_errors():
        file = part.open("ab" if resumes else "wb")
    try:
        yield file
    finally:
        with cache_errors():  # of what was still in the buffer
            file.close()


class Source:
    """Files in a folder, a tar or a zip archive, or a single one. ``where`` says in an error where a missing file is.

    Nothing is ever extracted to disk, and nothing is read into memory that is larger than it should be.
    """

    def __init__(self, path: Path | str, where: str = ""):
        self.path = Path(path)
        self.where = where
        if not (self.path.is_dir() or self.path.is_file()):
            raise BadInput(f"there is no folder or archive {self.path}")

    def read(self, *names: str, limit: int) -> bytes:
        """The first of these files that is there, of ``limit`` bytes at most."""
        return next(self._contents(self._first(names), limit))[1]

    def files(self, pattern: str, *, limit: int, total: int | None = None) -> Iterator[tuple[str, bytes]]:
        """Names and contents of all files whose path within the source matches ``pattern`` as a whole.

        ``limit`` is the most bytes of each, ``total`` of all together.
        """
        return self._contents(self._entries(pattern), limit, total)

    def lines(self, *names: str) -> Iterator[str]:
        """The lines of the first of these files that is there, a text in UTF-8, without their ends."""
        for _, place, file in self._first(names):
            for number in count(1):
                with _readable(place):
                    line = file.readline(LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > LONGEST_LINE:
                    raise BadInput(f"{place}, line {number} is too long: this is not the official file")
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    raise BadInput(f"{place}, line {number} is not UTF-8 text: {error}") from None
                yield text.removesuffix("\n")

    def _contents(self, entries: Iterator[Entry], limit: int, total: int | None = None) -> Iterator[tuple[str, bytes]]:
        read = 0
        for name, place, file in entries:
            with _readable(place):
                data = file.read(limit + 1)
            read += len(data)
            for size, most, what in ((len(data), limit, place), (read, total, self.path)):
                if most is not None and size > most:
                    raise BadInput(f"{what} has more than the {most:,} bytes that it should have: not the official one")
            yield name, data

    def _first(self, names: tuple[str, ...]) -> Iterator[Entry]:
        """The first of these files that is there, anywhere below the folder; ``.gz`` files are unpacked."""
        for name in names:
            for entry in self._entries(rf"(.*/)?{re.escape(name)}(\.gz)?"):
                yield entry
                return
        where = f": it is in {self.where}" if self.where else ""
        raise BadInput(f"there is no file {' or '.join(names)} in {self.path}{where}")

    def _entries(self, pattern: str) -> Iterator[Entry]:
        """All files that match."""
        archive = "" if self.path.is_dir() else self.path.name
        with _readable(str(self.path)):
            if archive.endswith(".zip"):
                yield from self._from_zip(re.compile(pattern))
            elif archive.endswith(TARS):
                yield from self._from_tar(re.compile(pattern))
            else:
                yield from self._from_folder(re.compile(pattern))

    def _from_folder(self, pattern: re.Pattern[str]) -> Iterator[Entry]:
        for name, file in self._walk():
            if pattern.fullmatch(name):
                if not file.is_file():  # a pipe would be waited for
                    raise BadInput(f"{file} is not a file that can be read")
                with _readable(str(file)), gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
                    yield name, str(file), opened  # pyright: ignore[reportReturnType]

    def _walk(self) -> Iterator[tuple[str, Path]]:
        """Names and paths of all files, in order. Links are followed, but no folder is entered twice."""
        if self.path.is_file():
            yield self.path.name, self.path
        entered = set()
        for folder, folders, files in os.walk(self.path, followlinks=True):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in entered:
                folders.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            folders.sort()
            for file in sorted(files):
                path = Path(folder, file)
                yield path.relative_to(self.path).as_posix(), path

    def _from_tar(self, pattern: re.Pattern[str]) -> Iterator[Entry]:
        with tarfile.open(self.path, "r|*", tarinfo=_SmallHeaders) as archive:
            for member in archive:
                name = self._safe(member.name)
                file = archive.extractfile(member) if member.isfile() and pattern.fullmatch(name) else None
                if file is not None:
                    yield name, f"{name} in {self.path}", file

    def _from_zip(self, pattern: re.Pattern[str]) -> Iterator[Entry]:
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if pattern.fullmatch(self._safe(name)) and not name.endswith("/"):
                    with archive.open(name) as file:
                        yield name, f"{name} in {self.path}", file

    def _safe(self, name: str) -> str:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise BadInput(f"{self.path} has a member {name!r} that points outside of the archive: not official")
        return path.as_posix()


class _SmallHeaders(tarfile.TarInfo):
    """Members whose long names and notes, which tarfile reads at once, are as short as they should be."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_SmallHeaders":
        member = super().frombuf(buf, encoding, errors)
        if not (member.isfile() or member.isdir()) and member.size > CHUNK:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member


@contextmanager
def _readable(place: str) -> Iterator[None]:
    """What is wrong with a file in one sentence; libraries raise nearly everything for damaged archives."""
    try:
        yield
    except (LongLensError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise BadInput(f"{place} cannot be read: {error.strerror or error}") from error
        reason = shorten(str(error) or type(error).__name__)
        raise BadInput(f"{place} is damaged or incomplete ({reason}): get it again") from error


def official(source: Path | None, remote: Remote, command: str) -> Source:
    """The user's folder, or the archive if that is in it, or the official download."""
    if source is None:
        return Source(remote.fetch(command), remote.urls[0])
    archives = [source / remote.name, *sorted(source.glob(f"*/{remote.name}"))] if source.is_dir() else []
    return Source(next((archive for archive in archives if archive.is_file()), source), " or ".join(remote.urls))
