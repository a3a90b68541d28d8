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
        raise BadInput(
            f"{self.name} cannot be downloaded: run '{command}', where DIR is a folder that has it, or try again; "
            f"it is at {' or '.join(failures)}"
        )

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
        """The first of these files that is there, anywhere below the folder; ``.gz`` files are unpacked.

        ``limit`` is the most bytes that the file may have.
        """
        for name in names:
            for _, data in self.files(rf"(.*/)?{re.escape(name)}(\.gz)?", limit=limit):
                return data
        raise self._missing(names)

    def files(self, pattern: str, *, limit: int, total: int | None = None) -> Iterator[tuple[str, bytes]]:
        """Names and contents of all files whose path within the source matches ``pattern`` as a whole.

        ``limit`` is the most bytes of each, ``total`` of all together.
        """
        read = 0
        for name, place, file in self._entries(pattern):
            with _readable(place):
                data = file.read(limit + 1)
            if len(data) > limit:
                raise BadInput(f"{place} has more than the {limit:,} bytes that it should have: not the official file")
            read += len(data)
            if total is not None and read > total:
                raise BadInput(
                    f"{self.path} has more than the {total:,} bytes that it should have: not the official one"
                )
            yield name, data

    def lines(self, *names: str) -> Iterator[str]:
        """The lines of the first of these files that is there, a text in UTF-8, without their ends."""
        for name in names:
            for _, place, file in self._entries(rf"(.*/)?{re.escape(name)}(\.gz)?"):
                yield from _lines(file, place)
                return
        raise self._missing(names)

    def _missing(self, names: tuple[str, ...]) -> BadInput:
        where = f": it is in {self.where}" if self.where else ""
        return BadInput(f"there is no file {' or '.join(names)} in {self.path}{where}")

    def _entries(self, pattern: str) -> Iterator[tuple[str, str, IO[bytes]]]:
        """Name, place for an error, and content of all files that match."""
        compiled = re.compile(pattern)
        if self.path.is_dir():
            for file in self._walk(compiled):
                with _readable(str(file)), _unpacked(file) as opened:
                    yield file.relative_to(self.path).as_posix(), str(file), opened
        elif self.path.suffix == ".zip":
            with _readable(str(self.path)):
                yield from self._from_zip(compiled)
        elif self.path.name.endswith(TARS):
            with _readable(str(self.path)):
                yield from self._from_tar(compiled)
        elif compiled.fullmatch(self.path.name):
            with _readable(str(self.path)), _unpacked(self.path) as opened:
                yield self.path.name, str(self.path), opened

    def _walk(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        """Matching files, in order. Links are followed, but no folder is entered twice."""
        entered = set()
        for folder, folders, files in os.walk(self.path, followlinks=True):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in entered:
                folders.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            folders.sort()
            relative = Path(folder).relative_to(self.path)
            for file in sorted(files):
                if pattern.fullmatch((relative / file).as_posix()):
                    yield Path(folder) / file

    def _from_tar(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, str, IO[bytes]]]:
        with tarfile.open(self.path, "r|*", tarinfo=_SmallHeaders) as archive:
            for member in archive:
                name = self._safe(member.name)
                file = archive.extractfile(member) if member.isfile() and pattern.fullmatch(name) else None
                if file is not None:
                    yield name, f"{name} in {self.path}", file

    def _from_zip(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, str, IO[bytes]]]:
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if pattern.fullmatch(self._safe(name)) and not name.endswith("/"):
                    with archive.open(name) as file:
                        yield name, f"{name} in {self.path}", file

    def _safe(self, name: str) -> str:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise BadInput(
                f"{self.path} has a member {name!r} that points outside of the archive: this is not the official file"
            )
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


@contextmanager
def _unpacked(file: Path) -> Iterator[IO[bytes]]:
    if not file.is_file():  # a pipe would be waited for
        raise BadInput(f"{file} is not a file that can be read")
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        yield stream  # pyright: ignore[reportReturnType]


def _lines(file: IO[bytes], place: str) -> Iterator[str]:
    number = 0
    while True:
        number += 1
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


def official(source: Path | None, remote: Remote, command: str) -> Source:
    """The user's folder, or the archive if that is in it, or the official download."""
    if source is None:
        return Source(remote.fetch(command), remote.urls[0])
    archives = [source / remote.name, *sorted(source.glob(f"*/{remote.name}"))] if source.is_dir() else []
    return Source(next((archive for archive in archives if archive.is_file()), source), " or ".join(remote.urls))
