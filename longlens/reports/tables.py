"""Tables for the terminal."""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table

from longlens.mixers.base import list_mixers, mixer_class, sides
from longlens.tasks.metrics import higher_is_better
from longlens.training.run import read_config, read_result

if TYPE_CHECKING:
    from longlens.training.many import Outcome


def mixers_table() -> Table:
    """A line for each mixer, with the options' defaults."""
    table = Table("mixer", "what", "sides", "options")
    for name in list_mixers():
        chosen = mixer_class(name)
        options = ", ".join(f"{option.name}={option.default}" for option in fields(chosen))
        causal, both = sides(chosen)
        table.add_row(name, chosen.summary, "either" if causal and both else "causal" if causal else "both", options)
    return table


def runs_table(runs: Path) -> Table:
    """A line for each run below a folder."""
    table = Table("run", "recipe", "seed", "steps", "valid", "test", "state")
    for path in sorted(runs.glob("*/*/*/config.json")):
        folder = path.parent
        config, result = read_config(folder), read_result(folder)
        name = str(folder.relative_to(runs))
        if result is None:
            steps = [int(p.name) for p in (folder / "checkpoints").glob("[0-9]*") if p.name.isdigit()]
            state = f"saved at step {max(steps):,}" if steps else "no checkpoint yet"
            table.add_row(name, config.recipe, str(config.training.seed), "", "", "", state)
        else:
            numbers = (_number(result["metric"], result[key]) for key in ("valid", "test"))
            table.add_row(name, config.recipe, str(config.training.seed), f"{result['steps']:,}", *numbers, "finished")
    if not table.rows:
        raise ValueError(f"there is no run in {runs}")
    return table


def results_table(outcomes: "list[Outcome]") -> Table:
    """A line for each run, or for all seeds of one: parameters, metrics, speed, memory. It fits into 80 columns."""
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    changing = _changing(outcomes)
    steps = {result["steps"] for result in results}
    title = outcomes[0].config.create_task().title
    if results:
        title += f": {results[0]['metric'].replace('_', ' ')}"
    if len(steps) == 1:
        title += f" after {min(steps):,} steps"
    names = ["mixer", *changing, "params", *(["steps"] if len(steps) > 1 else [])]
    table = Table(title=title, title_justify="left")
    for column in [*names, "valid", "test", "last", "tokens/s", "memory", "time"]:
        table.add_column(column, justify="left" if column in ("mixer", *changing) else "right", no_wrap=True)
    for group in _groups(outcomes):
        values = group[0].config.values()
        cells = [_with_seeds(group), *(str(values.get(name, "")) for name in changing)]
        done = [outcome.result for outcome in group if outcome.result is not None]
        if not done:
            table.add_row(*cells, *[""] * (len(names) - len(cells)), "failed")
            continue
        first = done[0]
        table.add_row(
            *cells,
            f"{first['parameters']:,}",
            *([f"{first['steps']:,}"] if len(steps) > 1 else []),
            *(_spread(first["metric"], [result[key] for result in done]) for key in ("valid", "test", "test_last")),
            f"{mean(result['tokens_per_second'] for result in done):,.0f}",
            f"{max(result['peak_memory_bytes'] for result in done) / 2**20:,.0f} MiB",
            f"{mean(result['seconds'] for result in done):,.0f} s",
        )
    return table


def verdict(outcomes: "list[Outcome]") -> Iterable[str]:
    """Who is ahead on the test set, and whether the difference could be chance."""
    ranked = _ranked(outcomes, "test")
    if len(ranked) < 2:
        return
    ahead, behind = ranked[:2]
    metric, changing = _metric(ahead), _changing(outcomes)
    first, second = mean(_scores(ahead, "test")), mean(_scores(behind, "test"))
    names = [_named(group[0], changing) for group in (ahead, behind)]
    if first == second:
        yield f"{names[0]} and {names[1]} are equal, {_number(metric, first)}"
        return
    line = f"{names[0]} is ahead of {names[1]}, {_number(metric, first)} to {_number(metric, second)}"
    error, of = _standard_error(ahead, behind)
    if error is not None:
        line += f"; two standard errors of the difference, {of}, are {_number(metric, 2 * error)}"
        line += "" if abs(first - second) > 2 * error else ": it may be chance"
    yield line
    if min(len(ahead), len(behind)) == 1:
        yield "one seed each: another seed may order them otherwise (--seeds 0 1 2)"


def choice(outcomes: "list[Outcome]") -> Iterable[str]:
    """The best on the validation set, as the test set is not there to choose by."""
    ranked = _ranked(outcomes, "valid")
    if len(ranked) < 2:
        return
    best, metric = ranked[0], _metric(ranked[0])
    valid, test = (_spread(metric, _scores(best, key)) for key in ("valid", "test"))
    yield f"best on validation: {_named(best[0], _changing(outcomes))}, {valid}; on the test set it has {test}"


def _ranked(outcomes: "list[Outcome]", key: str) -> "list[list[Outcome]]":
    """The runs that ended, those of one config together, the best first."""
    groups = [[outcome for outcome in group if outcome.result is not None] for group in _groups(outcomes)]
    groups = [group for group in groups if group and None not in _scores(group, key)]
    better = bool(groups) and higher_is_better(_metric(groups[0]))
    return sorted(groups, key=lambda group: mean(_scores(group, key)), reverse=better)


def _standard_error(*groups: "list[Outcome]") -> tuple[float | None, str]:
    """Of the difference of two means: by the spread over seeds, or of one seed by the number of test samples."""
    scores = [_scores(group, "test") for group in groups]
    if min(map(len, scores)) > 1:
        return math.sqrt(sum(stdev(group) ** 2 / len(group) for group in scores)), "by the spread over seeds"
    samples = (groups[0][0].result or {})["test_samples"]
    if _metric(groups[0]) != "accuracy":
        return None, ""
    error = math.sqrt(sum(mean(group) * (1 - mean(group)) / samples for group in scores))
    return error, f"with {samples:,} test samples"


def _scores(group: "list[Outcome]", key: str) -> list[Any]:
    return [(outcome.result or {}).get(key) for outcome in group]


def _metric(group: "list[Outcome]") -> Any:
    return (group[0].result or {})["metric"]


def _groups(outcomes: "list[Outcome]") -> "list[list[Outcome]]":
    """Runs that differ in nothing but the seed belong together."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        values = outcome.config.values() | {"training.seed": None}
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(outcome)
    return list(groups.values())


def _changing(outcomes: "list[Outcome]") -> list[str]:
    """The fields other than the mixer and the seed in which runs differ. Of the options of mixers, those in which runs
    of one mixer differ: the options of another are its own."""
    values = [outcome.config.values() for outcome in outcomes]
    names = dict.fromkeys(name for entry in values for name in entry)
    changing = []
    for name in names:
        seen: dict[str, set[str]] = {}
        for entry in values:
            if name in entry:
                seen.setdefault(entry["mixer"] if name.startswith("mixer.") else "", set()).add(str(entry[name]))
        if name not in ("mixer", "training.seed") and max(map(len, seen.values())) > 1:
            changing.append(name)
    return changing


def _named(outcome: "Outcome", changing: list[str]) -> str:
    values = outcome.config.values()
    return " ".join([outcome.config.mixer, *(f"{name}={values[name]}" for name in changing if name in values)])


def _with_seeds(group: "list[Outcome]") -> str:
    done = sum(outcome.result is not None for outcome in group)
    if len(group) == 1:
        return group[0].config.mixer
    return f"{group[0].config.mixer} ({done if done == len(group) else f'{done} of {len(group)}'} seeds)"


def _spread(metric: str, values: list[float | None]) -> str:
    """The mean, and the standard deviation if there are several."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return _number(metric, known[0]) if known else "–"
    return f"{_number(metric, mean(known))} ± {_number(metric, stdev(known))}"


def _number(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.3f}"
