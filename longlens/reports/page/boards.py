"""Runs of one task and recipe beside each other: seeds folded into mean and deviation, ranked, with curves to draw."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from longlens.reports.folds import OF_A_FOLD
from longlens.reports.page.entries import Entry
from longlens.reports.tables import changing, choice, describe, most_memory, seed_groups, spread, verdict
from longlens.training.run import higher_is_better

POINTS = 120  # of a curve
MARGIN = 0.06  # of a strip, on both sides


class Number(NamedTuple):
    """A cell that can be sorted: what is shown, and its value."""

    shown: str = ""
    value: float | None = None


class Strip(NamedTuple):
    """Where a row is on the scale of its board, from 0 to 1: its mean, and the deviation around it."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """All seeds of one config."""

    layer: str
    differs: str  # in what the config differs from others
    seeds: str
    test: Number
    deviation: float
    valid: Number
    parameters: Number
    seconds: Number
    memory: Number
    speed: Number
    curves: dict[str, Any]
    entries: list[Entry]  # by their seeds
    rank: int | None = None
    strip: Strip | None = None
    again: bool = False  # there is a better row of the same layer

    @property
    def failed(self) -> bool:
        return any(entry.state == "failed" for entry in self.entries)


@dataclass(frozen=True)
class Board:
    """A task at a scale."""

    title: str
    task: str
    scale: str
    metric: str
    is_higher_better: bool
    rows: list[Row]
    verdict: list[str]
    made: str  # with what

    @property
    def name(self) -> str:
        """The title without the options of the task."""
        return self.title.partition(" (")[0]

    @property
    def options(self) -> str:
        return self.title.removeprefix(self.name)[2:-1]

    @property
    def measure(self) -> str:
        """The metric, in words."""
        return "R²" if self.metric == "r2" else self.metric.replace("_", " ")

    @property
    def key(self) -> str:
        return f"{self.title} · {self.scale}"

    def chart(self) -> dict[str, Any]:
        """What is drawn of it."""
        lines = [
            {
                "layer": row.layer,
                "again": row.again,
                "label": " ".join(filter(None, [row.layer, row.differs])),
                "curves": row.curves,
                "test": row.test.value,
                "deviation": row.deviation,
                "seconds": row.seconds.value,
                "memory": row.memory.value,
                "shown": [row.test.shown, row.seconds.shown, row.memory.shown],
            }
            for row in self.rows
        ]
        return {"key": self.key, "metric": self.measure, "lines": lines}


def make_boards(entries: Iterable[Entry]) -> list[Board]:
    """A board for each task and recipe, and for other data of the same title."""
    groups: dict[tuple[str, str], dict[str, list[Entry]]] = {}
    for entry in entries:
        if entry.config is not None:
            same = groups.setdefault((entry.config.task.title, entry.config.recipe), {})
            same.setdefault(_data(entry), []).append(entry)
    boards = [_make_board(title, entries) for key in sorted(groups) for title, entries in _titled(groups[key])]
    return sorted(boards, key=lambda board: -len({row.layer for row in board.rows}))  # most to compare comes first


def _data(entry: Entry) -> str:
    """What results must share to be compared: the data, or of folds, which have data of their own, all but the fold."""
    values = entry.outcome.values()
    if values.get("task.folds") is None:
        return entry.data
    return str([value for name, value in values.items() if name.startswith("task.") and name not in OF_A_FOLD])


def _titled(groups: Mapping[str, list[Entry]]) -> Iterator[tuple[str, list[Entry]]]:
    """The runs of each board, and its title: that of the task, and what tells it from others of that title."""
    firsts = [entries[0].outcome for entries in groups.values()]
    different = [name for name in changing(firsts) if name.startswith("task.")] or ["data"]
    for first, entries in zip(firsts, groups.values(), strict=True):
        title = first.config.task.title
        if len(groups) > 1:
            begin = f"{title[:-1]}, " if title.endswith(")") else f"{title} ("
            title = f"{begin}{describe(first, different, with_mixer=False)})"
        yield title, entries


def _make_board(title: str, entries: list[Entry]) -> Board:
    config = entries[0].config
    assert config is not None
    task = config.task
    metric = next((entry.metric for entry in entries if entry.metric), task.metric)
    by_place = {entry.place: entry for entry in entries}
    outcomes = [entry.outcome for entry in entries]
    different = changing(outcomes)
    folded = [[by_place[str(outcome.folder)] for outcome in group] for group in seed_groups(outcomes)]
    better = higher_is_better(metric)
    rows = _ranked([_make_row(group, metric, different) for group in folded], better)
    one_of_each = len({row.layer for row in rows}) == len(rows)  # or the best of many settings is chosen
    said = list((verdict if one_of_each else choice)([outcome for outcome in outcomes if outcome.result]))
    return Board(title, task.slug, config.recipe, metric, better, rows, said, _made(entries))


def _make_row(group: list[Entry], metric: str, different: list[str]) -> Row:
    first = group[0].outcome
    done = [entry.result for entry in group if entry.result]
    tests = _known(group, "test")
    memory = most_memory(done)
    return Row(
        layer=first.config.mixer.name,
        differs=describe(first, different, with_mixer=False),
        seeds=str(len(group)) if len(done) == len(group) else f"{len(done)} of {len(group)}",
        test=_number(group, "test", lambda _: spread(metric, tests)),
        deviation=stdev(tests) if len(tests) > 1 else 0.0,
        valid=_number(group, "valid", lambda _: spread(metric, [result["valid"] for result in done])),
        parameters=_number(group, "parameters", "{:,.0f}".format),
        seconds=_number(group, "seconds", show_time),
        memory=Number() if memory is None else Number(f"{memory:,.0f} MiB", memory),
        speed=_number(group, "tokens_per_second", "{:,.0f}".format),
        curves={"valid": fold_curves(group, "valid", metric), "train": fold_curves(group, "train", "loss")},
        entries=sorted(group, key=lambda entry: entry.config.training.seed if entry.config else 0),
    )


def _ranked(rows: list[Row], is_higher_better: bool) -> list[Row]:
    """The best first, those without a result last; each with its rank, its strip, and whether its layer was before."""
    known = [row for row in rows if row.test.value is not None]
    known.sort(key=lambda row: row.test.value or 0.0, reverse=is_higher_better)
    values = [row.test.value for row in known]
    place, found = _scale(known), []
    for row in [*known, *(row for row in rows if row.test.value is None)]:
        rank = strip = None
        if (value := row.test.value) is not None:
            rank = 1 + values.index(value)
            strip = Strip(*(place(value + side * row.deviation) for side in (0, -1, 1))) if len(known) > 1 else None
        found.append(replace(row, again=row.layer in {before.layer for before in found}, rank=rank, strip=strip))
    return found


def _scale(rows: list[Row]) -> Callable[[float], float]:
    """From a metric to a place on a strip: all rows with their deviations fit."""
    ends = [(row.test.value or 0.0) + side * row.deviation for row in rows for side in (-1, 1)]
    least, size = min(ends, default=0.0), max(ends, default=0.0) - min(ends, default=0.0)
    return lambda value: MARGIN + (1 - 2 * MARGIN) * ((value - least) / size if size else 0.5)


def _known(group: list[Entry], key: str) -> list[float]:
    return [entry.result[key] for entry in group if entry.result and entry.result[key] is not None]


def _number(group: list[Entry], key: str, show: Callable[[float], str]) -> Number:
    """The mean, and how it is shown."""
    known = _known(group, key)
    return Number(show(mean(known)), mean(known)) if known else Number()


def show_time(seconds: float) -> str:
    """Two units at most."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def fold_curves(group: Sequence[Entry], split: str, name: str) -> dict[str, list[Any]]:
    """Mean, deviation and number of seeds at up to ``POINTS`` steps."""
    by_step: dict[int, list[float]] = {}
    for entry in group:
        for line in entry.metrics:
            if line["split"] == split and name in line:
                by_step.setdefault(line["step"], []).append(line[name])
    steps = sorted(by_step)
    if steps:
        steps = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(POINTS, len(steps)))]
    found = [np.array(by_step[step]) for step in steps]
    return {
        "step": steps,
        "mean": [_short(values.mean()) for values in found],
        "deviation": [_short(values.std(ddof=1)) if len(values) > 1 else 0 for values in found],
        "seeds": [len(values) for values in found],
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _made(entries: list[Entry]) -> str:
    """Versions, processors and commits, those of the most runs first."""
    parts = []
    for key, word in (("torch", "torch "), ("processor", ""), ("device", ""), ("commit", "commit ")):
        found = [str(entry.environment[-1].get(key)) for entry in entries if entry.environment]
        found = [value for value in found if value not in ("None", "")]
        usual = sorted(dict.fromkeys(found), key=found.count, reverse=True)
        several = f" and {len(usual) - 1} more" if len(usual) > 1 else ""
        parts += [f"{word}{usual[0]}{several}"] if usual else []
    return ", ".join(parts)
