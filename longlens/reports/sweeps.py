"""Results of runs by what was varied: lines over one field, heat maps over two."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from longlens.errors import BadInput
from longlens.options import nearest
from longlens.reports.chance import sign_of
from longlens.reports.collect import collect_runs
from longlens.reports.pictures import (
    MAP,
    check_picture,
    legend_beside,
    line_look,
    plain,
    save_picture,
    styled,
    without_frame,
)
from longlens.reports.tables import changing, seed_groups
from longlens.training.many import Outcome

PERCENT = "accuracy"  # the metric that is shown in percent
DECADE = 8  # a field whose values differ by more than this factor is shown on a logarithmic scale


class Point(NamedTuple):
    """The seeds of one setting, or the best of several settings."""

    mean: float
    deviation: float  # over seeds; 0 of one
    valid: float  # by which the best is chosen


Points = Mapping[tuple[Any, ...], Point]  # by the values of the axes


def draw_sweep(
    runs: tuple[Path, ...] = (Path("runs"),),
    *,
    by: tuple[str, ...] = (),
    score: Literal["valid", "test"] = "valid",
    out: Path = Path("figures/sweep.png"),
    theme: Literal["light", "dark"] = "light",
) -> list[str]:
    """Draw results of runs by what was varied: a line for each layer over one field, or a heat map over two.

    What was varied is found from the configs of the runs. Points and cells are means over seeds, bars their standard
    deviations.

    Args:
        runs: Folders of runs of one task, or folders that have such runs below them.
        by: One or two fields for the axes, as lr or mixer.window; by default those in which the runs differ. Of runs
            that differ in other fields, the best on validation are shown.
        score: Split whose results are shown.
        out: Picture to write (.png, .pdf or .svg).
        theme: Dark ink on white, for print, or light ink on a dark background, for talks.
    """
    check_picture(out)
    found, said = collect_runs(runs)
    tasks = list(dict.fromkeys(run.config.task.slug for run in found))
    if len(tasks) > 1:
        example = found[0].folder.parent.parent
        raise BadInput(f"runs must be of one task, got {', '.join(tasks)}: name a folder such as {example}")
    finished = [run for run in found if run.result is not None]
    if not finished:
        raise BadInput(f"none of the {len(found)} runs is finished yet: there is nothing to draw")
    if len(finished) < len(found):
        said.append(f"{len(found) - len(finished)} of {len(found)} runs are not finished: left out")
    fields = choose_fields(finished, by)
    others = [name for name in changing(finished) if name not in fields]
    metric = str((finished[0].result or {})["metric"])
    points = best_points(finished, fields, score, metric)
    if not points:
        names = " and ".join(map(_short, fields))
        raise BadInput(f"no run has results by {names}: name runs of one layer, or choose one field with --by")
    without = [name for name in dict.fromkeys(run.config.mixer.name for run in finished) if name not in points]
    if "mixer" not in fields and without:
        said.append(f"left out: {', '.join(without)}, without {' or '.join(_short(name) for name in fields)}")
    label = f"{'validation' if score == 'valid' else 'test'} {metric.replace('_', ' ')}"
    title = f"{tasks[0]}: {label}"
    if others:
        title += f", the best of {' and '.join(_short(name) for name in others)} on validation"
    with styled(theme):
        draw = draw_lines if len(fields) == 1 else draw_heat
        figure = draw(points, [_short(name) for name in fields], f"{label}, %" if metric == PERCENT else label)
        figure.suptitle(plain(title), wrap=True)
        return [*said, save_picture(figure, out)]


def choose_fields(runs: Sequence[Outcome], by: Sequence[str]) -> list[str]:
    """The fields of the axes: those that are named, or in which the runs differ; the layer if they differ in nothing
    else."""
    different = changing(runs)
    mixers = {run.config.mixer.name for run in runs}
    if by:
        known = {"mixer": "mixer"} | {_short(name): name for name in reversed(different)} | {n: n for n in different}
        for name in by:
            if name.replace("-", "_") not in known:
                raise BadInput(f"by must name fields in which the runs differ, got {name!r}; {nearest(name, known)}")
        different = list(dict.fromkeys(known[name.replace("-", "_")] for name in by))
    elif not different and len(mixers) > 1:
        different = ["mixer"]
    if not different:
        raise BadInput("the runs differ in nothing but the seed: a picture needs a field that was varied")
    if len(different) > 2:
        names = ", ".join(map(_short, different))
        raise BadInput(f"the runs differ in {len(different)} fields ({names}): choose one or two of them with --by")
    return different


def _short(field: str) -> str:
    return field.rpartition(".")[2]


def best_points(runs: Sequence[Outcome], fields: Sequence[str], score: str, metric: str) -> dict[str, Points]:
    """The points of each layer by the values of the fields: means over seeds, of the setting that is best on
    validation."""
    sign = sign_of(metric)
    factor = 100 if metric == PERCENT else 1
    found: dict[str, dict[tuple[Any, ...], Point]] = {}
    for group in seed_groups(list(runs)):
        config = group[0].values()
        results = [run.result for run in group if run.result is not None and run.result[score] is not None]
        if not results or not all(name in config for name in fields):
            continue  # an option that this layer has not
        scores = [factor * result[score] for result in results]
        valid = mean(_or_worst(result["valid"], sign * -np.inf) for result in results)
        point = Point(mean(scores), stdev(scores) if len(scores) > 1 else 0.0, valid)
        key = tuple(_hashable(config[name]) for name in fields)
        mine = found.setdefault("" if "mixer" in fields else config["mixer"], {})
        if key not in mine or sign * point.valid > sign * mine[key].valid:
            mine[key] = point
    return dict(found)


def _or_worst(value: float | None, worst: float) -> float:
    return worst if value is None or np.isnan(value) else value


def _hashable(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value


def draw_lines(found: Mapping[str, Points], fields: Sequence[str], label: str) -> Figure:
    """The field on the horizontal axis, a line for each layer."""
    figure = Figure(figsize=(6.5, 4.4), layout="constrained")
    axes = figure.subplots()
    values = _ordered(key[0] for points in found.values() for key in points)
    places = _place(axes, values)
    for number, (mixer, points) in enumerate(found.items()):
        keys = [value for value in values if (value,) in points]
        shown = [points[value,] for value in keys]
        where, means = [places[value] for value in keys], [point.mean for point in shown]
        look: dict[str, Any] = line_look(number) | ({"linestyle": "none"} if fields[0] == "mixer" else {})
        axes.errorbar(where, means, [p.deviation for p in shown], **look, marker="o", capsize=3, label=plain(mixer))
    axes.set_xlabel(fields[0])
    axes.set_ylabel(label)
    if len(found) > 1:
        legend_beside(figure, axes.get_legend_handles_labels()[0])
    return figure


def _place(axes: Axes, values: Sequence[Any]) -> dict[Any, float]:
    """Where each value is: numbers as they are, on a logarithmic scale if they are far apart, others side by side."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        axes.set_xticks(range(len(values)), [_tick(value) for value in values], rotation=20 if len(values) > 5 else 0)
        axes.margins(x=0.1)
        return {value: float(place) for place, value in enumerate(values)}
    if values[0] > 0 and values[-1] > DECADE * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(values, [_tick(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    return {value: float(value) for value in values}


def draw_heat(found: Mapping[str, Points], fields: Sequence[str], label: str) -> Figure:
    """The first field from left to right, the second from bottom to top; a panel for each layer."""
    columns, rows = (_ordered(key[k] for points in found.values() for key in points) for k in (0, 1))
    width, height = 1.6 + 0.9 * len(columns), 1.0 + 0.55 * len(rows)
    figure = Figure(figsize=(max(5.5, 1.2 + width * len(found)), max(3.2, 0.8 + height)), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    means = [point.mean for points in found.values() for point in points.values()]
    image: Any = None
    for axes, (mixer, points) in zip(panels, found.items(), strict=True):
        cells = np.full((len(rows), len(columns)), np.nan)
        for (column, row), point in points.items():
            cells[rows.index(row), columns.index(column)] = point.mean
        low, high = min(means), max(means)
        image = axes.imshow(
            cells, cmap=MAP, origin="lower", aspect="auto", vmin=low, vmax=high if high > low else low + 1
        )
        for (y, x), value in np.ndenumerate(cells):
            shade = image.cmap(image.norm(value))[:3] if np.isfinite(value) else None
            color = "C6" if shade is None else "white" if np.dot(shade, (0.299, 0.587, 0.114)) < 0.55 else "black"
            axes.text(x, y, "–" if shade is None else f"{value:.3g}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(columns)), [_tick(value) for value in columns])
        axes.set_yticks(range(len(rows)), [_tick(value) for value in rows])
        axes.set_xlabel(fields[0])
        axes.set_title(plain(mixer))
        without_frame(axes)
    panels[0].set_ylabel(fields[1])
    figure.colorbar(image, ax=list(panels), label=label)
    return figure


def _ordered(values: Any) -> list[Any]:
    """Numbers by size, and then others as they come."""
    return sorted(
        dict.fromkeys(values), key=lambda v: (not isinstance(v, int | float), v if isinstance(v, int | float) else 0)
    )


def _tick(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, int | float) else plain(str(value))
