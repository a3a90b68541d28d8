"""Tables for the terminal."""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table

from longlens.mixers.base import list_mixers, mixer_class
from longlens.training.run import read_config, read_result

if TYPE_CHECKING:
    from longlens.training.many import Outcome


def mixers_table() -> Table:
    """A line for each mixer, with the options' defaults."""
    table = Table("mixer", "what", "causal", "options")
    for name in list_mixers():
        chosen = mixer_class(name)
        options = ", ".join(f"{option.name}={option.default}" for option in fields(chosen))
        table.add_row(name, chosen.summary, "yes" if chosen().looks_ahead() is None else "no", options)
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
    """A line for each run, or for all seeds of one: parameters, metrics, speed and memory."""
    done = [outcome for outcome in outcomes if outcome.result is not None]
    metric = done[0].result["metric"].replace("_", " ") if done and done[0].result else ""
    title = outcomes[0].config.create_task().title
    table = Table(title=title, title_justify="left")
    changing = _changing(outcomes)
    columns = ["mixer", *changing, "parameters", "steps", f"valid {metric}", f"test {metric}", "last model"]
    for column in [*columns, "tokens/s", "peak memory", "time"]:
        table.add_column(column, justify="left" if column in ("mixer", *changing) else "right")
    for group in _groups(outcomes):
        values = group[0].config.values()
        cells = [_with_seeds(group), *(str(values.get(name, "")) for name in changing)]
        results = [outcome.result for outcome in group if outcome.result is not None]
        if not results:
            table.add_row(*cells, "", "", "", "failed")
            continue
        first = results[0]
        table.add_row(
            *cells,
            f"{first['parameters']:,}",
            f"{first['steps']:,}",
            *(_spread(first["metric"], [r[key] for r in results]) for key in ("valid", "test", "test_last")),
            f"{mean(r['tokens_per_second'] for r in results):,.0f}",
            f"{max(r['peak_memory_bytes'] for r in results) / 2**20:,.0f} MiB",
            f"{mean(r['seconds'] for r in results):,.0f} s",
        )
    return table


def verdict(outcomes: "list[Outcome]") -> Iterable[str]:
    """Who is ahead on the test set, and whether the difference could be chance."""
    groups = [[o for o in group if o.result is not None] for group in _groups(outcomes)]
    scores = [(mean(_tests(group)), group) for group in groups if group and None not in _tests(group)]
    if len(scores) < 2:
        return
    result: dict[str, Any] = scores[0][1][0].result or {}
    higher = result["metric"] in ("accuracy", "r2")
    (first, ahead), (second, behind) = sorted(scores, key=lambda score: score[0], reverse=higher)[:2]
    changing = _changing(outcomes)
    names = [_named(group[0], changing) for group in (ahead, behind)]
    line = (
        f"{names[0]} is ahead of {names[1]}, {_number(result['metric'], first)} to {_number(result['metric'], second)}"
    )
    if first == second:
        yield f"{names[0]} and {names[1]} are equal, {_number(result['metric'], first)}"
    elif result["metric"] == "accuracy" and len(ahead) == len(behind) == 1:
        noise = math.sqrt(sum(p * (1 - p) / result["test_samples"] for p in (first, second)))
        yield line + (
            f"; with {result['test_samples']:,} test samples, two standard errors of the difference are "
            f"{_number('accuracy', 2 * noise)}{'' if abs(first - second) > 2 * noise else ': it may be chance'}"
        )
    else:
        yield line
    if min(len(ahead), len(behind)) == 1:
        yield "one seed each: another seed may order them otherwise (--seeds 0 1 2)"


def _tests(group: "list[Outcome]") -> list[Any]:
    return [(outcome.result or {}).get("test") for outcome in group]


def _groups(outcomes: "list[Outcome]") -> "list[list[Outcome]]":
    """Runs that differ in nothing but the seed belong together."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        values = outcome.config.values() | {"training.seed": None}
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(outcome)
    return list(groups.values())


def _changing(outcomes: "list[Outcome]") -> list[str]:
    """The fields other than the mixer, its options' presence and the seed in which runs differ."""
    values = [outcome.config.values() for outcome in outcomes]
    shared = set.intersection(*(set(entry) for entry in values)) - {"mixer", "training.seed"}
    return [name for name in values[0] if name in shared and len({str(entry[name]) for entry in values}) > 1]


def _named(outcome: "Outcome", changing: list[str]) -> str:
    values = outcome.config.values()
    return " ".join([outcome.config.mixer, *(f"{name}={values[name]}" for name in changing)])


def _with_seeds(group: "list[Outcome]") -> str:
    return group[0].config.mixer if len(group) == 1 else f"{group[0].config.mixer} ({len(group)} seeds)"


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
