"""Records of finished runs: small files that are kept with the project, from which its results are made. No torch here.

A record has the config of a run, what it ran on, its metrics at up to 100 steps, its result, and the score of each test
sample. The same config is the same file, in ``results/SCALE/TASK/``.
"""

import base64
import hashlib
import json
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from longlens.errors import BadInput
from longlens.files import read_json, write_json
from longlens.training.config import Config, completed
from longlens.training.many import Outcome
from longlens.training.run import read_environment, read_identity, read_metrics, read_scores

KEPT = ("longlens", "commit", "torch", "processor", "device", "threads", "date")  # of the environment
POINTS = 100  # of the metrics


@dataclass(frozen=True)
class Record:
    """A run that ended, with a result or an error."""

    path: Path
    config: Config
    data: str | None  # fingerprint of what it was trained on
    environment: dict[str, Any]
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    scores: np.ndarray | None  # (N,) of the test samples
    error: str | None


class Records:
    """The records below ``results/SCALE``, by their configs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found: dict[str, Record] = {}
        self.problems: list[str] = []  # files that cannot be used
        self.read()

    def read(self) -> None:
        """Read all again: another process may have added some. Those of a task are of the same data."""
        self.found, self.problems = {}, []
        first: dict[str, Record] = {}
        for path in sorted(self.folder.glob("*/*.json")):
            try:
                record = _read(path)
            except BadInput as problem:
                self.problems.append(str(problem))
                continue
            same = first.setdefault(record.config.task.title, record) if record.data else record
            if same.data != record.data:
                where = "keep the records of other data in a folder of their own (--results)"
                self.problems.append(f"{path} was made of other data than {same.path.name}: {where}")
                continue
            self.found[_key(record.config)] = record

    def without_failures(self, but: Collection[str]) -> "Records":
        """The same without runs that failed, but for those with these names."""
        others = copy(self)
        others.found = {
            key: run for key, run in self.found.items() if run.result is not None or record_name(run.config) in but
        }
        return others

    def find(self, config: Config) -> Record | None:
        return self.found.get(_key(config))

    def add(self, outcome: Outcome) -> None:
        """Keep how a run ended; a result replaces an error, and not the other way round. What failed as another process
        is at it has not ended."""
        before = self.find(outcome.config)
        if outcome.result is None and (_is_held(outcome.folder) or (before is not None and before.result is not None)):
            return
        environment = (read_environment(outcome.folder) or [{}])[-1]
        scores = read_scores(outcome.folder)
        values = {
            "config": outcome.config.to_json(),
            "data": read_identity(outcome.folder).data if outcome.result else None,
            "environment": {key: environment.get(key) for key in KEPT},
            "result": outcome.result,
            "error": outcome.error,
            "metrics": thin(read_metrics(outcome.folder)) if outcome.result else [],
            "scores": None if scores is None or outcome.result is None else pack(scores),
        }
        path = self.folder / outcome.config.task.slug / f"{record_name(outcome.config)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, values)
        self.found[_key(outcome.config)] = _read(path)


def _is_held(folder: Path) -> bool:
    """Whether a process is at work in the folder of a run."""
    try:
        if folder.is_dir():
            FileLock(folder / ".lock", timeout=0).acquire().lock.release()
    except Timeout:
        return True
    except OSError:  # nobody can write there
        pass
    return False


def record_name(config: Config) -> str:
    """The name of the file of a run, without its ending."""
    return f"{config.mixer.name}-{hashlib.sha256(_key(config).encode()).hexdigest()[:12]}"


def _key(config: Config) -> str:
    return json.dumps(config.values(), sort_keys=True)


def _read(path: Path) -> Record:
    values = read_json(path)
    try:
        config = Config.from_json(completed(values["config"]), str(path))
        scores = None if values["scores"] is None else unpack(values["scores"])
        result, error = values["result"], values["error"]
        if not (isinstance(result, dict) and isinstance(result["test"], float)) and not isinstance(error, str):
            raise ValueError("it has neither a result nor an error")
        if result and result["metric"] == "accuracy" and scores is not None:
            _check_mean(scores, result["test"])
        if not isinstance(values["environment"], dict):
            raise ValueError("it does not say what it was made on")
        return Record(path, config, values["data"], values["environment"], result, values["metrics"], scores, error)
    except (LookupError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not the record of a run: {error}") from None


def _check_mean(scores: np.ndarray, test: float) -> None:
    if abs(scores.mean() - test) > 1e-6:
        raise ValueError(f"its samples have the mean {scores.mean():g}, and it says {test:g}")


def thin(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All evaluations, and as many steps of training between them as there is room for, with four digits."""
    valid = [line for line in metrics if line["split"] == "valid"]
    train = [line for line in metrics if line["split"] == "train"]
    room = max(2, POINTS - len(valid))
    chosen = {round(place) for place in np.linspace(0, len(train) - 1, min(room, len(train)))}
    kept = [*valid[:POINTS], *(line for place, line in enumerate(train) if place in chosen)]
    rounded = [{key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in line.items()} for line in kept]
    return sorted(rounded, key=lambda line: (line["step"], line["split"]))


def pack(scores: np.ndarray) -> dict[str, Any]:
    """Scores as a text: bits if they are right or wrong, and half-precision numbers otherwise."""
    are_bits = bool(np.isin(scores, (0, 1)).all())
    data = np.packbits(scores.astype(bool)) if are_bits else scores.astype("<f2")
    kind = "bits" if are_bits else "float16"
    return {"kind": kind, "count": len(scores), "data": base64.b64encode(data.tobytes()).decode()}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(packed["data"], validate=True)
    if packed["kind"] == "bits":
        return np.unpackbits(np.frombuffer(data, np.uint8), count=packed["count"]).astype(np.float64)
    scores = np.frombuffer(data, "<f2").astype(np.float64)
    if len(scores) != packed["count"]:
        raise ValueError(f"it has {len(scores)} scores, and says {packed['count']}")
    return scores
