"""JSON files with a checksum of their content: what was changed by hand or by a bad disk is not believed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from longlens.errors import BadInput
from longlens.files import read_json, write_json

SEAL = "sha256"


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    write_json(path, {**values, SEAL: _checksum(values)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The values of a file. FileNotFoundError if there is none, BadInput if it is not as it was written."""
    values = read_json(path)
    if not isinstance(values, dict) or values.pop(SEAL, None) != _checksum(values):
        raise BadInput(f"{path} is not as it was written")
    return values


def _checksum(values: dict[str, Any]) -> str | None:
    try:
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    except (RecursionError, ValueError):  # what no program of ours has written
        return None
