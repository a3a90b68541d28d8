"""A run is a folder.

``config.json``, ``fingerprint`` (of the data), ``environment.json`` (one entry for each time it was started),
``metrics.jsonl``, ``checkpoints/`` and, written last, ``result.json``. The same config is the same folder: a finished
run is not run again, an unfinished one goes on.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from longlens.mixers.base import mixer_class
from longlens.registry import foreign_source
from longlens.tasks.base import task_class
from longlens.training.config import Config, differences
from longlens.training.runtime import Runtime


class RunError(Exception):
    """A run cannot go on, and what to do about it. Its checkpoints are as they were."""


def run_folder(config: Config, runtime: Runtime) -> Path:
    """Where the run of this config is or will be. Prepares the data, as its identity belongs to the run."""
    if runtime.folder is not None:
        return runtime.folder
    return runtime.runs / config.create_task().slug / config.mixer / config.digest(fingerprint(config))


def fingerprint(config: Config) -> str:
    """Of the data, and of the source of a user's own task or mixer: a result belongs to them. Prepares the data."""
    parts = (
        config.create_task().fingerprint(),
        *map(foreign_source, (task_class(config.task), mixer_class(config.mixer))),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_fingerprint(folder: Path, config: Config) -> None:
    """Refuse a run whose data, or whose layer of the user's own, is no longer what it was."""
    path = folder / "fingerprint"
    if path.exists() and path.read_text() != fingerprint(config):
        raise ValueError(
            f"{folder} belongs to other data, or to another source of a layer or task of your own: choose another "
            "folder, or delete it"
        )


def read_config(folder: Path) -> Config:
    """The config of a run that is there."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run: it has no config.json")
    try:
        return Config.model_validate_json(path.read_text())
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ValueError(f"{path} cannot be read ({reason}): delete the folder to run it anew") from None


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a run, if it is finished."""
    try:
        return json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ValueError(f"{folder / 'result.json'} is damaged: delete it, and the run ends anew") from None


class RunFolder:
    """The folder of a run in the hands of the one process that writes it."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self.checkpoints = folder / "checkpoints"
        self.metrics = folder / "metrics.jsonl"

    @contextmanager
    def claimed(self, config: Config) -> Iterator["RunFolder"]:
        """Hold the folder: a second process refuses, and so does a config that is not the folder's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.folder / ".lock", timeout=0)
            lock.acquire()
        except Timeout:
            raise RunError(f"another process is at work in {self.folder}: wait for it, or stop it") from None
        try:
            if (self.folder / "config.json").exists():
                changed = differences(read_config(self.folder), config)
                if changed:
                    raise ValueError(
                        f"{self.folder} belongs to a run with another config ({'; '.join(changed)}): "
                        "choose another folder, or the same values"
                    )
                check_fingerprint(self.folder, config)
            else:
                write_text(self.folder / "fingerprint", fingerprint(config))
                write_text(self.folder / "config.json", config.model_dump_json(indent=1))
            yield self
        finally:
            lock.release()

    def note_environment(self, environment: dict[str, Any]) -> list[str]:
        """Remember what the run was started on; tell what is not as the last time."""
        path = self.folder / "environment.json"
        try:
            before = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            before = []
        write_text(path, json.dumps([*before, environment], indent=1))
        matters = ("longlens", "commit", "torch", "processor", "device", "threads", "processes")
        last = before[-1] if before else environment
        return [
            f"{key} {last.get(key)}, now {environment[key]}" for key in matters if last.get(key) != environment[key]
        ]

    def checkpoint_folders(self) -> list[Path]:
        """The newest first."""
        found = self.checkpoints.glob("[0-9]*") if self.checkpoints.is_dir() else []
        return sorted((path for path in found if path.name.isdigit()), key=lambda path: int(path.name), reverse=True)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{step:08d}"

    def prune(self, best: int | None) -> None:
        """Delete all checkpoints but the last few and the best."""
        for path in self.checkpoint_folders()[self.keep :]:
            if best is None or path != self.checkpoint(best):
                shutil.rmtree(path)

    def forget_after(self, step: int, evaluated: int) -> None:
        """The run goes on from a step, and from an evaluation: delete checkpoints after it, which are damaged, and what
        is left of those that were never finished; cut the lines after it, and a last one that is torn."""
        for path in [path for path in self.checkpoint_folders() if int(path.name) > step]:
            shutil.rmtree(path)
        for path in self.checkpoints.glob("*.partial"):
            shutil.rmtree(path)
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(errors="replace").splitlines():
            try:
                values = json.loads(line)
                if values["step"] > (evaluated if values["split"] == "valid" else step):
                    break
            except (ValueError, KeyError, TypeError):
                break
            kept.append(line)
        write_text(self.metrics, "".join(f"{line}\n" for line in kept))


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
