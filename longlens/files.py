"""Files that are there whole or not at all, their checksums, and JSON that may be damaged."""

import errno
import hashlib
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from longlens.errors import BadInput


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, bring it to the disk, and rename it. Symbolic links are replaced, not followed."""
    with open_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """The same for a file that is written piece by piece: it is there when all went well, and nothing is otherwise."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            os.fchmod(file.fileno(), default_mode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1))


def open_file(path: Path) -> io.BufferedReader:
    """Open a file to read it. A pipe or a device, which may never end, is an error of the system, as a folder is."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.open("rb")


def read_json(path: Path) -> Any:
    """The value of a JSON file. FileNotFoundError if there is none, BadInput if it cannot be read."""
    try:
        with open_file(path) as file:
            return json.loads(file.read())
    except FileNotFoundError:
        raise
    except RecursionError:
        raise BadInput(f"{path} cannot be read: it is nested too deeply") from None
    except ValueError as error:  # of JSON, or of its encoding
        raise BadInput(f"{path} cannot be read as JSON: {error}") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None


def sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def default_mode() -> int:
    """The permissions of a new file, which temporary files do not have."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def check_out(out: Path | None) -> Path | None:
    """A file that is to be written after long work: refused now if it cannot be. Its folder is made."""
    if out is None:
        return None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():  # a device, as /dev/null, would be replaced
            raise BadInput(f"out must be a file, and {out} is a {'folder' if out.is_dir() else 'device or a pipe'}")
    except OSError as error:
        raise BadInput(f"cannot write {out}: {error.strerror or error}") from None
    # A file is made anew beside its place: its folder must be open, too.
    if not all(os.access(place, os.W_OK) for place in (out.parent, out) if place.exists()):
        raise BadInput(f"cannot write {out}: permission denied")
    return out


SEAL = "sha256"


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    write_json(path, {**values, SEAL: _checksum(values)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The values of a file. FileNotFoundError if there is none, BadInput if it is not as it was written."""
    values = read_json(path)
    seal = values.pop(SEAL, None) if isinstance(values, dict) else None
    if not seal or seal != _checksum(values):
        raise BadInput(f"{path} is not as it was written")
    return values


def _checksum(values: dict[str, Any]) -> str:
    try:
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    except (RecursionError, ValueError):  # what no program of ours has written
        return ""
