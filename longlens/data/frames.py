"""Tables and arrays in memory as files: in the cache folder, under the checksum of their content.

So a task that was made of them has a path like any other: its config can be stored, and a run that was stopped resumes.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longlens.data import store
from longlens.errors import BadInput
from longlens.files import sha256
from longlens.options import shorten

ALLOWED = "a pandas DataFrame, or a pair (inputs, labels) of arrays or lists"


def store_frame(frame: Any, options: Mapping[str, Any]) -> Path:
    """The folder with a frame as files; ``options`` are those of the task, which name the columns."""
    with store.cache_errors():
        folder = store.home().absolute() / "frames"
        folder.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        with store.cache_errors():
            if hasattr(frame, "to_csv") and hasattr(frame, "columns"):
                _write_frame(new, frame, options)
            elif isinstance(frame, tuple) and len(frame) == 2:
                _write_pair(new, *frame)
            else:
                raise BadInput(f"frame must be {ALLOWED}, got {type(frame).__name__}")
            sums = [(file.name, sha256(file)) for file in sorted(new.iterdir())]
            final = folder / f"frame-{hashlib.sha256(repr(sums).encode()).hexdigest()[:12]}"
            if not final.exists():
                try:
                    new.chmod(0o755)
                    new.rename(final)
                except OSError:  # another process has written the same meanwhile
                    if not final.exists():
                        raise
        return final
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write_frame(folder: Path, frame: Any, options: Mapping[str, Any]) -> None:
    """A DataFrame as CSV; one whose sequences are lists in a column as JSONL. Its index is left out."""
    frame = frame.rename(columns=str)
    label, one = options.get("label_column", "label"), options.get("input_column", "input")
    if one in frame.columns and len(frame) and not isinstance(frame[one].iloc[0], str | int | float | np.number):
        if label not in frame.columns:
            raise BadInput(f"frame must have a column {label!r}, got {shorten(', '.join(frame.columns))}")
        _write_lines(folder, frame[one], frame[label], (one, label))
        return
    for name in frame.select_dtypes(bool).columns:
        if name != label:
            frame = frame.assign(**{name: frame[name].astype(int)})
    frame.to_csv(folder / "train.csv", index=False, lineterminator="\r\n")  # a lone \r in a text is quoted then


def _write_pair(folder: Path, inputs: Any, labels: Any) -> None:
    """Arrays as .npy files, and what is none (texts, sequences of different lengths) as JSONL."""
    array = np.asarray(labels)
    if hasattr(inputs, "columns"):  # a DataFrame gives its columns one by one, and not its rows
        inputs = inputs.to_numpy()
    if array.ndim != 1 or len(array) != len(inputs):
        raise BadInput(f"frame must be {ALLOWED}, one label a sequence, got {len(inputs)} and {array.shape}")
    try:
        stacked = np.asarray(inputs)
    except ValueError:  # sequences of different lengths
        stacked = np.empty(0, dtype=object)
    if stacked.dtype.kind in "biuf" and array.dtype.kind in "biufU":
        np.save(folder / "train.inputs.npy", stacked)
        np.save(folder / "train.labels.npy", array)
    else:
        _write_lines(folder, inputs, array, ("input", "label"))


def _write_lines(folder: Path, inputs: Any, labels: Any, names: tuple[str, str]) -> None:
    with (folder / "train.jsonl").open("w", encoding="utf-8") as lines:
        for row, pair in enumerate(zip(inputs, labels, strict=True)):
            try:
                lines.write(json.dumps(dict(zip(names, map(_plain, pair), strict=True))) + "\n")
            except (TypeError, ValueError):
                raise BadInput(
                    f"row {row} of frame must be a text or numbers, and a label, got {shorten(pair)}"
                ) from None


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, str):
        return str(value)
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "biufU" or isinstance(value, np.ndarray) else value
