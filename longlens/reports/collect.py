"""The runs that a picture is made of, finished or not."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longlens.errors import BadInput, LongLensError
from longlens.training.many import Outcome
from longlens.training.run import read_config, read_identity, read_result

DEEPEST = 3  # folders from one with runs to a run: TASK/MIXER/HASH


def collect_runs(places: Sequence[Path]) -> tuple[list[Outcome], list[str]]:
    """The runs in folders, each of which is a run or has runs below it; and sentences about those that cannot
    be read. A run without a result has stopped, failed or still trains."""
    folders: dict[Path, Path] = {}
    for place in places:
        found = [
            path.parent for depth in range(DEEPEST + 1) for path in sorted(place.glob("*/" * depth + "config.json"))
        ]
        if not found:
            raise BadInput(f"there is no run in {place}: 'longlens train' makes one, 'longlens list runs' shows them")
        folders |= {folder.resolve(): folder for folder in found}
    runs, problems = [], []
    for folder in folders.values():
        try:
            runs.append(read_run(folder))
        except LongLensError as error:
            problems.append(f"left out: {error}")
    if not runs:
        raise BadInput(f"none of the runs can be read: {problems[0].removeprefix('left out: ')}")
    return runs, problems


def read_run(folder: Path) -> Outcome:
    """A run as it is in its folder."""
    config, result, identity = read_config(folder), read_result(folder), read_identity(folder)
    return Outcome(config, folder, result, data=identity.data, source=identity.layer)


def evaluated_metric(metrics: Iterable[Mapping[str, Any]]) -> str | None:
    """The name of the metric in the lines of a run; None before its first evaluation."""
    names = (key for line in metrics if line["split"] == "valid" for key in line)
    return next((name for name in names if name not in ("split", "step", "loss")), None)
