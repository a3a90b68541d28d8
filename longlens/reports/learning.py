"""Learning curves: the loss and the metric on the validation set, by step, of any runs."""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from longlens.reports.collect import collect_runs, evaluated_metric
from longlens.reports.pictures import check_picture, legend_beside, line_look, plain, save_picture, styled
from longlens.reports.tables import changing, describe, seed_groups
from longlens.training.many import Outcome
from longlens.training.run import read_metrics

Points = dict[int, float]  # a value by step


def draw_learning(
    runs: tuple[Path, ...] = (Path("runs"),),
    *,
    out: Path = Path("figures/curves.png"),
    theme: Literal["light", "dark"] = "light",
) -> list[str]:
    """Draw learning curves: the training loss and the metric on the validation set, by step.

    A row for each task, and a line for each layer or setting: the mean over seeds, in a band of one standard deviation.
    A run that is not finished is a thin line of its own, which ends with a circle.

    Args:
        runs: Folders of runs, or folders that have runs below them.
        out: Picture to write (.png, .pdf or .svg).
        theme: Dark ink on white, for print, or light ink on a dark background, for talks.
    """
    check_picture(out)
    found, problems = collect_runs(runs)
    tasks: dict[str, list[Outcome]] = {}
    for run in found:
        tasks.setdefault(run.config.task.slug, []).append(run)
    named = {task: _name_groups(members) for task, members in tasks.items()}
    looks = {name: line_look(k) for k, name in enumerate(dict.fromkeys(chain.from_iterable(named.values())))}
    with styled(theme):
        figure = Figure(figsize=(9.5, 0.6 + 3.4 * len(tasks)), layout="constrained")
        for panels, (task, groups) in zip(
            figure.subplots(len(tasks), 2, squeeze=False, sharex="row"), named.items(), strict=True
        ):
            draw_task(panels, task, groups, looks)
        counts = [len(group) for groups in named.values() for group in groups.values()]
        notes = ["band: one standard deviation over seeds"] if max(counts) > 1 else []
        notes += ["○: not finished"] if any(run.result is None for run in found) else []
        figure.supxlabel("; ".join(["step", *notes]), fontsize=11)
        legend_beside(figure, [Line2D([], [], **look, label=plain(name)) for name, look in looks.items()])
        return [*problems, save_picture(figure, out)]


def _name_groups(members: list[Outcome]) -> dict[str, list[Outcome]]:
    """The seeds of each layer or setting, by what tells it from the others."""
    different = changing(members)
    return {describe(group[0], different): group for group in seed_groups(members)}


def draw_task(
    panels: Sequence[Axes], title: str, groups: Mapping[str, list[Outcome]], looks: Mapping[str, dict[str, Any]]
) -> None:
    """The loss on the left, the metric on the right, a line for the seeds of each name."""
    metric = ""
    for name, group in groups.items():
        metrics = [read_metrics(run.folder) for run in group]
        metric = metric or next(filter(None, map(evaluated_metric, metrics)), "")
        finished = [run.result is not None for run in group]
        for axes, split, key in zip(panels, ("train", "valid"), ("loss", metric), strict=True):
            draw_seeds(axes, [points(lines, split, key) for lines in metrics], finished, looks[name])
    panels[0].set_ylabel("training loss")
    panels[1].set_ylabel(f"validation {metric.replace('_', ' ')}".rstrip())
    if metric == "accuracy":
        panels[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    for axes in panels:
        axes.set_title(plain(title))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if not axes.lines:
            axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", va="center")


def draw_seeds(axes: Axes, curves: Sequence[Points], finished: Sequence[bool], look: dict[str, Any]) -> None:
    """The mean of the finished ones with a band of one standard deviation, and each of the others by itself."""
    whole = [curve for curve, is_finished in zip(curves, finished, strict=True) if is_finished and curve]
    if whole:
        steps = sorted(set.intersection(*map(set, whole)))
        values = np.array([[curve[step] for step in steps] for curve in whole])  # (seeds, steps)
        mean, marker = values.mean(axis=0), "o" if len(steps) == 1 else None  # a line of one point does not show
        axes.plot(steps, mean, **look, marker=marker, markersize=4)
        if len(whole) > 1:
            spread = values.std(axis=0, ddof=1)
            axes.fill_between(steps, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)
    for curve, is_finished in zip(curves, finished, strict=True):
        if curve and not is_finished:
            axes.plot(list(curve), list(curve.values()), **look, linewidth=1.0)
            axes.plot(*list(curve.items())[-1], "o", markersize=6, color=look["color"], fillstyle="none")


def points(lines: Sequence[Mapping[str, Any]], split: str, key: str) -> Points:
    """What can be drawn: a loss that has become infinite cannot."""
    values: list[tuple[int, Any]] = [(line["step"], line.get(key)) for line in lines if line["split"] == split]
    return {
        step: value
        for step, value in sorted(values, key=lambda point: point[0])
        if isinstance(value, float) and isfinite(value)
    }
