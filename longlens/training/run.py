"""A run is a folder.

``config.json``, ``identity.json`` (a digest of the config and the fingerprint of the data), ``task.json`` (what its
inputs and outputs mean, so that the model can be used without its data), ``environment.json`` (an entry for each time
it was started), ``metrics.jsonl``, ``checkpoints/``, ``scores.npy`` (of each test sample) and, written last,
``result.json``. The same config is the same folder: what is finished is not run again, what is not resumes. No torch.
"""

import errno
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # typing's is not enough for pydantic before Python 3.12

from longlens.data.datasets import Metric
from longlens.errors import BadInput, RunError
from longlens.files import open_file, read_json, read_sealed, write_atomic, write_json, write_sealed
from longlens.registry import foreign_source
from longlens.tasks.base import Spec, Task
from longlens.training.config import PARTS, Config, Runtime, completed, differences
from longlens.training.logs import notify

CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS")
BEFORE_A_RUN = (".lock", "identity.json", "task.json", "log.txt")  # may be in a folder that has no run yet
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMPARED = ("longlens", "commit", "torch", "processor", "device", "threads", "processes")  # change the bits of a run


@with_config(ConfigDict(extra="forbid"))
class _Result(TypedDict):
    task: str
    mixer: str
    seed: int
    metric: Metric
    test: float | None  # of the best model on the validation set
    test_last: float
    test_samples: int
    valid: float | None
    valid_last: float | None
    best_step: int | None
    steps: int
    ended_by: NotRequired[Literal["steps", "validation", "minutes"]]  # not there in results of older versions
    parameters: int
    tokens: int
    tokens_per_second: float
    overhead: float | None  # a GPU is not waited for, so that nobody knows
    seconds: float
    peak_memory_bytes: int | None


class Identity(NamedTuple):
    """What a run belongs to."""

    fingerprint: str  # of all: the data, and the sources of a user's own task and layer
    digest: str  # of the config with the fingerprint
    data: str  # the fingerprint without that of the layer: the same for all layers
    layer: str  # digest of the source of a user's own layer; nothing for one of the package


def fingerprint(config: Config, data: str | None = None, *, with_layer: bool = True) -> str:
    """The checksum of what a result belongs to: the data, and the source of a user's own task or layer. Prepares the
    data, unless ``data``, the fingerprint of the task, is known already."""
    sources = foreign_source(type(config.task)), _layer_source(config) if with_layer else ""
    return hashlib.sha256("\n".join([data or config.task.fingerprint(), *sources]).encode()).hexdigest()


def layer_digest(config: Config) -> str:
    """The checksum of the source of a user's own layer; nothing for one of the package."""
    source = _layer_source(config)
    return hashlib.sha256(source.encode()).hexdigest() if source else ""


def _layer_source(config: Config) -> str:
    preset = config.mixer.preset
    return "" if preset.module.startswith("longlens.") else foreign_source(preset.layer)  # no import of torch


def run_folder(config: Config, runtime: Runtime, fingerprint: str) -> Path:
    """Where the run of this config on this data is or will be."""
    if runtime.folder is not None:
        return runtime.folder
    return runtime.runs / config.task.slug / config.mixer.name / config.digest(fingerprint)


def read_config(folder: Path) -> Config:
    """The config of a run that is there. One that is not what the run was started with is refused."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder} is not a run: it has no config.json")
    values = whole = read_json(path)
    with suppress(LookupError, TypeError, ValueError):  # what is wrong is said in the next line
        whole = completed(values)
    config = Config.from_json(whole, str(path))
    parts = {part.removesuffix("_options"): values[part] for part in PARTS}
    new = {name for name in config.values() if "." in name and name.split(".")[1] not in parts[name.split(".")[0]]}
    identity = read_identity(folder)
    if config.digest(identity.fingerprint, without=new) != identity.digest:
        raise BadInput(f"{path} is not the config that this run was started with: undo the change, or delete the run")
    return config


def read_identity(folder: Path) -> Identity:
    """What the folder of a run says that it belongs to; of a layer of the package, the data is all."""
    problem = "is not as it was written"
    try:
        values = read_json(folder / "identity.json")
        match values:
            case {"fingerprint": str(fingerprint), "digest": str(digest), **others} if not others:
                return Identity(fingerprint, digest, data=fingerprint, layer="")
            case {"fingerprint": str(), "digest": str(), "data": str(), "layer": str(), **others} if not others:
                return Identity(**values)
    except FileNotFoundError:
        problem = "is missing"
    raise BadInput(f"{folder / 'identity.json'} {problem}: restore it, or delete the folder and run it again")


def _identity(config: Config, found: str) -> dict[str, str]:
    """What ``read_identity`` reads."""
    values, layer = {"fingerprint": found, "digest": config.digest(found)}, layer_digest(config)
    return values | ({"data": fingerprint(config, with_layer=False), "layer": layer} if layer else {})


def write_task(folder: Path, task: Task) -> None:
    """Keep what a model has to know of its task, and what its inputs and outputs mean."""
    write_sealed(folder / "task.json", {"spec": asdict(task.spec), "codec": task.codec()})


def read_task(folder: Path, task: Task) -> tuple[Spec, dict[str, Any]]:
    """What ``write_task`` has kept; of a run that was made before there was such a file, from the data of the task."""
    path = folder / "task.json"
    try:
        values = read_sealed(path)
        return TypeAdapter(Spec).validate_python(values["spec"]), dict(values["codec"])
    except FileNotFoundError:
        return task.spec, task.codec()
    except BadInput as error:
        reason = str(error)
    except (ValidationError, LookupError, TypeError, ValueError):
        reason = f"{path} is not the task of a run"
    raise BadInput(f"{reason}: restore it, or delete it if the data of the run is still there")


def check_fingerprint(folder: Path, fingerprint: str, advice: str = "choose another folder, or delete it") -> None:
    """Refuse a run whose data, or whose layer of the user's own, is no longer what it was."""
    if read_identity(folder).fingerprint != fingerprint:
        source = "another source of a layer or task of your own"
        raise BadInput(f"{folder} belongs to other data, or to {source}: {advice}")


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a run, if it is finished. One that is not as it was written is refused."""
    path = folder / "result.json"
    try:
        return dict(TypeAdapter(_Result).validate_python(read_sealed(path)))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{path} is not the result of a run ({'.'.join(map(str, first['loc']))}: {first['msg'].lower()})"
    except BadInput as error:
        reason = str(error)
    raise BadInput(f"{reason}: delete it and run the same command again, which repeats the end of the run only")


def read_scores(folder: Path) -> np.ndarray | None:
    """The score of each test sample: 1 if it is right and 0 if not, or a loss. None of a run that has not kept them."""
    try:
        with open_file(folder / "scores.npy") as file:
            return np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None


def higher_is_better(metric: str) -> bool:
    return metric in ("accuracy", "r2")


def show_metric(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.3f}"


def read_environment(folder: Path) -> list[dict[str, Any]]:
    """What a run was started on, each time: versions, commit, device, threads. Nothing if it is damaged or missing."""
    try:
        return _parse_environment(folder)
    except (BadInput, FileNotFoundError):
        return []


def last_threads(folder: Path) -> int | None:
    """With how many threads a run was started last."""
    threads = (read_environment(folder) or [{}])[-1].get("threads")
    return threads if isinstance(threads, int) and threads >= 1 else None


def _parse_environment(folder: Path) -> list[dict[str, Any]]:
    path = folder / "environment.json"
    found = read_json(path)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise BadInput(f"{path} is not a list of environments")
    return found


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that can be read."""
    try:
        text = _read_lines(folder / "metrics.jsonl")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{folder / 'metrics.jsonl'} cannot be read: {error.strerror or error}") from None
    return [values for line in text.splitlines() if (values := _parse_line(line)) is not None]


def _read_lines(path: Path) -> str:
    with open_file(path) as file:
        return file.read().decode(errors="replace")


def _parse_line(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        values = json.loads(line)
        return values if values["split"] in ("train", "valid") and type(values["step"]) is int else None
    except (ValueError, RecursionError, TypeError, LookupError):
        return None


class RunFolder:
    """The folder of a run in the hands of the one process that writes it."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = keep
        self.checkpoints = folder / "checkpoints"
        self.metrics = folder / "metrics.jsonl"
        self.lock = FileLock(folder / ".lock", timeout=0)

    def finished(self, config: Config, fingerprint: str) -> dict[str, Any] | None:
        """The result, if there is one: nothing is written, so that a run can also be read where nobody may write."""
        with self._explained("cannot read"):
            if not (self.folder / "config.json").exists():
                return None
            changed = "; ".join(differences(read_config(self.folder), config))
            if changed:
                other = f"belongs to a run with another config ({changed})"
                raise BadInput(f"{self.folder} {other}: choose another folder, or the same values")
            check_fingerprint(self.folder, fingerprint)
            return read_result(self.folder)

    def claim(self, config: Config, fingerprint: str) -> dict[str, Any] | None:
        """Hold the folder: a second process refuses, and so does a config that is not the folder's. The result, if some
        other process has finished the run meanwhile."""
        with self._explained("cannot write to"):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock.acquire()
            except Timeout:
                raise RunError(f"another process is at work in {self.folder}: wait for it, or stop it") from None
            for path in self.folder.glob(".*.partial"):  # of a writer that was killed
                path.unlink(missing_ok=True)
            if (self.folder / "config.json").exists():
                result = self.finished(config, fingerprint)
                if result is None and not (self.folder / "task.json").exists():  # of an older version
                    write_task(self.folder, config.task)
                return result
            others = sorted(path.name for path in self.folder.iterdir() if path.name not in BEFORE_A_RUN)
            if others:
                other = f"is no run and has other files, such as {others[0]}"
                raise BadInput(f"{self.folder} {other}: choose another folder")
            write_json(self.folder / "identity.json", _identity(config, fingerprint))
            write_task(self.folder, config.task)
            write_json(self.folder / "config.json", config.to_json())
        return None

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            reason = error.strerror or error
            raise BadInput(f"{what} {self.folder} ({reason}): choose another place with --runs or --folder") from error

    def note_environment(self, environment: dict[str, Any]) -> list[str]:
        """Remember what the run was started on; return what changed since the last start."""
        path = self.folder / "environment.json"
        before: list[dict[str, Any]] = []
        try:
            before = _parse_environment(self.folder)
        except FileNotFoundError:
            pass
        except BadInput as error:
            notify(f"{error}: it is kept as {self.put_aside(path).name}, and a new one begins")
        write_json(path, [*before, environment])
        last = before[-1] if before else environment
        changed = (key for key in COMPARED if last.get(key) != environment[key])
        return [f"{key} {last.get(key)}, now {environment[key]}" for key in changed]

    def write_scores(self, scores: Any) -> None:
        """Keep the score of each test sample, a tensor (N,), by the best model."""
        written = io.BytesIO()
        np.save(written, scores.cpu().numpy())
        write_atomic(self.folder / "scores.npy", written.getvalue())

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{step:08d}"

    def checkpoint_folders(self) -> list[Path]:
        """The newest first. Folders of other people in the same place are none."""
        found = [path for path in _entries(self.checkpoints) if path.name.isdecimal() and _may_be_checkpoint(path)]
        return sorted(found, key=lambda path: int(path.name), reverse=True)

    def put_aside(self, path: Path) -> Path:
        """Rename what is damaged: someone may want to look at it."""
        for number in range(1, 10_000):
            aside = path.with_name(f"{path.name}.damaged{'' if number == 1 else f'-{number}'}")
            if not aside.exists() and not aside.is_symlink():
                return path.rename(aside)
        raise RunError(f"{path.parent} has too many damaged files: delete some")

    def prune(self, best: int | None) -> None:
        """Delete all checkpoints but the last few and the best."""
        for path in self.checkpoint_folders()[self.keep :]:
            if best is None or path != self.checkpoint(best):
                delete_checkpoint(path)

    def forget_after(self, step: int, evaluated: int) -> None:
        """Delete what is left of checkpoints that were never finished, and the lines of steps and evaluations that are
        made again."""
        for path in _entries(self.checkpoints):
            if path.suffix == ".partial" and path.stem.isdecimal():
                delete_checkpoint(path)
        try:
            text = _read_lines(self.metrics)
        except FileNotFoundError:
            return
        except OSError as error:
            aside = self.put_aside(self.metrics)
            notify(f"{self.metrics} cannot be read ({error.strerror or error}): it is kept as {aside.name}")
            return
        kept, damaged = [], 0
        for line in text.splitlines(keepends=True):
            values = _parse_line(line)
            if values is None:
                damaged += bool(line.strip()) and line.endswith("\n")  # a kill cuts the last line: nothing to speak of
            elif values["step"] <= (evaluated if values["split"] == "valid" else step):
                kept.append(line.rstrip("\n") + "\n")
        if damaged:
            notify(f"{damaged} damaged lines of {self.metrics} are left out")
        write_atomic(self.metrics, "".join(kept))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _may_be_checkpoint(path: Path) -> bool:
    names = {entry.name for entry in _entries(path)}
    return not names or bool(names & set(CHECKPOINT_FILES))


def delete_checkpoint(path: Path) -> None:
    """Delete a folder that has our files and nothing else. Symbolic links and other people's files stay."""
    if path.is_symlink() or not path.is_dir():
        return
    ours = (*CHECKPOINT_FILES, ".tmp", ".state.json.")  # the latter two begin the names of files that are being written
    if all(entry.name.startswith(ours) for entry in _entries(path)):
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


@contextmanager
def disk_full_as_run_error(folder: Path) -> Iterator[None]:
    """A full disk, or one that fails, is a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            resumes = "the same command resumes from the last checkpoint"
            raise RunError(f"there is no room left for {folder}: make some, and {resumes}") from error
        if error.filename is None or not Path(str(error.filename)).is_relative_to(folder):
            raise
        raise RunError(f"cannot use {error.filename}: {error.strerror or error}") from error
