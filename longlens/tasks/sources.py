"""Where real data comes from: downloads with checksums, and the folders and archives that a user has."""

import gzip
import hashlib
import http.client
import io
import os
import re
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from longlens import __version__
from longlens.progress import progress
from longlens.tasks.store import CacheError, explained, home, locked

ARENA = "lra_release.gz (8 GB) of github.com/google-research/long-range-arena"
CHUNK = 1 << 20
TRIES = 3  # of one address, each going on where the one before stopped
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, gzip.BadGzipFile, NotImplementedError)


@dataclass(frozen=True)
class Remote:
    """A file on the network."""

    name: str
    urls: tuple[str, ...]  # the makers' address, then copies
    checksum: str  # "md5:…" or "sha256:…"

    def fetch(self) -> Path:
        """The file in the cache: downloaded if it is not there, and kept only if its checksum is right."""
        target = home() / "downloads" / self.name
        if target.exists():
            return target
        with locked(target):
            if target.exists():
                return target
            part = target.with_name(f"{self.name}.part")
            failures = []
            for url in self.urls:
                try:
                    found = self._try(url, part)
                except CacheError:
                    raise
                except (OSError, http.client.HTTPException) as error:
                    failures.append(f"{url} ({getattr(error, 'reason', None) or error})")
                    continue
                if found == self.checksum:
                    with explained():
                        part.rename(target)
                    return target
                failures.append(
                    f"{url} (its checksum is {found}, not {self.checksum}: damaged, or not the official file)"
                )
        raise ValueError(
            f"could not download {self.name}: {'; '.join(failures)}. Get it elsewhere, and give its folder "
            "with --from (in Python: task.prepare(folder))"
        )

    def _try(self, url: str, part: Path) -> str:
        """Download to ``part``; the checksum of it. What was there before is not trusted twice."""
        resumed = part.exists()
        _download(url, part)
        found = _checksum(part, self.checksum.partition(":")[0])
        if found != self.checksum:
            part.unlink()
            if resumed:
                return self._try(url, part)
        return found


def _download(url: str, part: Path) -> None:
    """Get a file, or the rest of it, into ``part``."""
    for attempt in range(TRIES):
        have = part.stat().st_size if part.exists() else 0
        headers = {"User-Agent": f"longlens/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
                going_on = answer.status == 206
                total = int(answer.headers.get("Content-Length") or 0) + (have if going_on else 0)
                with progress(f"downloading {part.stem}", total, "bytes") as done, _opened(part, going_on) as file:
                    count = have if going_on else 0
                    while chunk := answer.read(CHUNK):
                        with explained():
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


def _opened(part: Path, going_on: bool):
    with explained():
        return open(part, "ab" if going_on else "wb")


def _checksum(path: Path, kind: str) -> str:
    with open(path, "rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


class Source:
    """Files in a folder, a tar or a zip archive. Nothing is ever extracted to disk."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not self.path.exists():
            raise ValueError(f"there is no folder or archive {self.path}")

    def read(self, *names: str, limit: int | None = None) -> bytes:
        """The first of these files that is there, anywhere below the folder; ``.gz`` files are unpacked.

        ``limit`` is the most bytes that the file may have.
        """
        for name in names:
            for _, data in self.files(rf"(.*/)?{re.escape(name)}(\.gz)?", limit):
                return data
        raise ValueError(f"there is no file {' or '.join(names)} in {self.path}")

    def open(self, name: str) -> BinaryIO:
        """The file as a stream: one that is too large to be read at once should not be in an archive."""
        if self.path.is_dir():
            for file in self._walk(re.compile(rf"(.*/)?{re.escape(name)}")):
                return open(file, "rb")
        return io.BytesIO(self.read(name))

    def files(self, pattern: str, limit: int | None = None) -> Iterator[tuple[str, bytes]]:
        """Names and contents of all files whose path within the source matches ``pattern`` as a whole."""
        compiled = re.compile(pattern)
        try:
            if self.path.is_dir():
                for file in self._walk(compiled):
                    yield file.relative_to(self.path).as_posix(), _unpacked(file, limit)
            elif self.path.suffix == ".zip":
                yield from self._from_zip(compiled, limit)
            elif self._is_tar():
                yield from self._from_tar(compiled, limit)
            elif compiled.fullmatch(self.path.name):
                yield self.path.name, _unpacked(self.path, limit)
        except _DAMAGED as error:
            raise ValueError(
                f"{self.path} is damaged or incomplete ({error or type(error).__name__}): download it again"
            ) from error

    def _walk(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.path, followlinks=True):
            folders.sort()
            relative = Path(folder).relative_to(self.path)
            for file in sorted(files):
                if pattern.fullmatch((relative / file).as_posix()):
                    yield Path(folder) / file

    def _is_tar(self) -> bool:
        names = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", "_release.gz")
        return self.path.name.endswith(names)

    def _from_tar(self, pattern: re.Pattern[str], limit: int | None) -> Iterator[tuple[str, bytes]]:
        with tarfile.open(self.path, "r|*") as archive:
            for member in archive:
                name = self._safe(member.name)
                file = archive.extractfile(member) if member.isfile() and pattern.fullmatch(name) else None
                if file is not None:
                    yield name, _read(file, f"{name} in {self.path}", limit)

    def _from_zip(self, pattern: re.Pattern[str], limit: int | None) -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if pattern.fullmatch(self._safe(name)) and not name.endswith("/"):
                    with archive.open(name) as file:
                        yield name, _read(file, f"{name} in {self.path}", limit)

    def _safe(self, name: str) -> str:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"{self.path} has a member {name!r} that points outside of the archive: this is not the official file"
            )
        return path.as_posix()


def _unpacked(file: Path, limit: int | None) -> bytes:
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
        return _read(stream, str(file), limit)


def _read(stream: IO[bytes] | gzip.GzipFile, name: str, limit: int | None) -> bytes:
    data = stream.read() if limit is None else stream.read(limit + 1)
    if limit is not None and len(data) > limit:
        raise ValueError(f"{name} has more than the {limit:,} bytes that it should have: it is not the official file")
    return data


def official(source: Path | None, remote: Remote) -> Source:
    """The user's folder, or the archive if that is in it, or the official download."""
    if source is None:
        return Source(remote.fetch())
    archives = [source / remote.name, *sorted(source.glob(f"*/{remote.name}"))] if source.is_dir() else []
    return Source(next((archive for archive in archives if archive.is_file()), source))
