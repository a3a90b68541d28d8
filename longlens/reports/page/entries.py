"""What the page knows of a run: a folder that may be unfinished, damaged, or gone a moment later."""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longlens.errors import BadInput, LongLensError
from longlens.reports.collect import evaluated_metric, read_run
from longlens.training.config import Config
from longlens.training.many import Outcome
from longlens.training.run import read_environment, read_metrics

State = Literal["finished", "training", "stopped", "failed", "damaged"]

PATIENCE = 60.0  # seconds without a sign of life, at least, after which a run counts as stopped
GAPS = 5  # and as many times as long as a line of metrics usually takes
FILES_OF_A_RUN = {"identity.json", "environment.json", "metrics.jsonl"}  # one of them is beside its config.json
MOST_FILES = 40  # that are listed


@dataclass(frozen=True)
class Entry:
    """A run as it is now."""

    place: str  # its folder, or the file of its record
    state: State
    config: Config | None = None  # None if it cannot be read
    result: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    environment: list[dict[str, Any]] = field(default_factory=list)  # one for each start
    files: list[tuple[str, int]] = field(default_factory=list)  # names and bytes
    note: str = ""  # what is wrong
    data: str = ""  # fingerprints of the data, and of the source of a user's own layer
    source: str = ""
    started: float = 0.0  # when it was started the last time, and when it last wrote, in seconds
    written: float = 0.0

    @property
    def id(self) -> str:
        return f"run-{hashlib.sha256(self.place.encode()).hexdigest()[:10]}"

    @property
    def outcome(self) -> Outcome:
        assert self.config is not None
        note = self.note or None
        return Outcome(self.config, Path(self.place), self.result, note, data=self.data, source=self.source)

    @property
    def metric(self) -> str | None:
        """As it was measured: files have classes or numbers, and their options do not say which. None before that."""
        return self.result["metric"] if self.result else evaluated_metric(self.metrics)

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)

    def seconds_left(self, steps: int | None) -> float | None:
        """By the speed since its start; None if nobody can know, as of a run that was resumed at some step."""
        spent = self.written - self.started
        if self.state != "training" or not steps or len(self.environment) != 1 or self.step < 1 or spent <= 0:
            return None
        return max(0.0, (steps - self.step) * spent / self.step - (time.time() - self.written))


def find_runs(places: Iterable[Path]) -> Iterator[Path]:
    """The folders of runs at or below some places."""
    for place in places:
        for folder, inside, files in os.walk(place):
            inside.sort()
            if "config.json" in files and FILES_OF_A_RUN & set(files):
                inside.clear()  # a run has no runs in it
                yield Path(folder)


def check_places(places: Iterable[Path]) -> None:
    for place in places:
        if not place.is_dir():
            raise BadInput(f"{place} is not a folder: give folders of runs, or folders that have runs in them")


def read_entry(folder: Path) -> Entry | None:
    """The run in a folder; None if it is gone."""
    try:
        files = _files(folder)
        run, metrics = read_run(folder), [line for line in read_metrics(folder) if is_sound(line)]
    except LongLensError as error:  # one damaged run does not hide the others
        return Entry(str(folder), "damaged", note=str(error)) if folder.is_dir() else None
    except OSError:
        return None
    started = _time(folder / "environment.json") or _time(folder / "config.json")
    last_line = _time(folder / "metrics.jsonl") or started
    written = max(started, last_line, _time(folder / "checkpoints"), _time(folder / "log.txt"))
    gap = (last_line - started) / max(1, len(metrics))
    waits = max(PATIENCE, GAPS * gap)
    state: State = "finished" if run.result else "training" if time.time() - written < waits else "stopped"
    known = {"data": run.data, "source": run.source, "started": started, "written": written}
    return Entry(str(folder), state, run.config, run.result, metrics, read_environment(folder), files, **known)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _files(folder: Path) -> list[tuple[str, int]]:
    """Those that stay: a run deletes and renames checkpoints meanwhile."""
    found = []
    for path in itertools.islice(sorted(folder.rglob("*")), MOST_FILES):
        with suppress(OSError):
            found += [(str(path.relative_to(folder)), path.stat().st_size)] if path.is_file() else []
    return found


def is_sound(line: Any) -> bool:
    """Whether a line of metrics has numbers that can be drawn: it may be anything that is JSON."""
    if not isinstance(line, dict) or type(line.get("step")) is not int or "split" not in line:
        return False
    numbers = (value for name, value in line.items() if name not in ("split", "step"))
    return line["step"] >= 0 and all(isinstance(v, int | float) and math.isfinite(v) for v in numbers)


class Watch:
    """The runs below some places, each read again only when one of its files has changed."""

    def __init__(self, places: Iterable[Path]):
        self.places = [*places]
        self.known: dict[Path, tuple[Any, Entry]] = {}

    def look(self) -> list[Entry]:
        found: dict[Path, tuple[Any, Entry]] = {}
        for folder in find_runs(self.places):
            stamp = _stamp(folder)
            before = self.known.get(folder)
            if before is not None and before[0] == stamp and before[1].state != "training":
                found[folder] = before
            elif (entry := read_entry(folder)) is not None:
                found[folder] = stamp, entry
        self.known = found
        return [entry for _, entry in found.values()]


def _stamp(folder: Path) -> Any:
    """Changes when a file of the folder does."""
    try:
        stats = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
        return sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
    except OSError:
        return None


def without_repeats(entries: Iterable[Entry]) -> list[Entry]:
    """One run for each config on the same data: the first that is finished or at work, or else the first."""
    chosen: dict[str, Entry] = {}
    for entry in entries:
        key = entry.place if entry.config is None else json.dumps(entry.outcome.values(), sort_keys=True)
        before = chosen.get(key)
        if before is None or (before.state not in ("finished", "training") and entry.state == "finished"):
            chosen[key] = entry
    return list(chosen.values())


def total_steps(config: Config) -> int | None:
    """How many steps a run has; None if that takes data which is not there."""
    options = config.training
    if options.epochs is None:
        return options.steps
    try:
        if not config.task.is_prepared():
            return None
        samples = min(len(config.task.split("train")), options.train_samples or math.inf)
        samples += len(config.task.split("valid")) if options.train_on_valid else 0
    except (LongLensError, OSError):
        return None
    return options.total_steps(int(samples))
