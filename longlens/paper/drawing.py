"""Pictures of studies: a line for each row of a table, and learning curves."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

from longlens.paper.records import Record, Records
from longlens.paper.run import runs_of
from longlens.paper.study import Cell, Scale, Study
from longlens.reports.pictures import save_picture


def draw_study(study: Study, scale: Scale, records: Records, runs: Path, out: Path) -> str | None:
    """The picture of a study, if it has one and there are runs for it: the line that says where it is."""
    found = {cell_key(cell): (cell, runs_of(cell, scale, records)) for cell in study.cells(scale)}
    found = {key: entry for key, entry in found.items() if entry[1]}
    if not found:
        return None
    if study.draw is not None:
        return study.draw(scale, records, runs, out)
    if study.axis is None and not study.curves:
        return None
    draw: Callable[..., Figure] = _draw_curves if study.curves else _draw_lines
    return save_picture(draw(study, list(found.values())), out)


def cell_key(cell: Cell) -> tuple[str, str]:
    return cell.row, cell.column or cell.task


def _draw_lines(study: Study, entries: list[tuple[Cell, list[Record]]]) -> Figure:
    """The mean and the standard deviation over seeds, by column."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    columns = list(dict.fromkeys(cell.column or cell.task for cell, _ in entries))
    for row in dict.fromkeys(cell.row for cell, _ in entries):
        points = [(cell.column or cell.task, _scores(runs, study.score)) for cell, runs in entries if cell.row == row]
        places = [columns.index(column) for column, _ in points]
        spread = [stdev(values) if len(values) > 1 else 0.0 for _, values in points]
        axes.errorbar(places, [mean(values) for _, values in points], spread, marker="o", capsize=3, label=row)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_xlabel(study.axis or "")
    _finish(axes, study, entries[0][1][0])
    return figure


def _draw_curves(study: Study, entries: list[tuple[Cell, list[Record]]]) -> Figure:
    """The metric on the validation set by step, for each task."""
    tasks = list(dict.fromkeys(cell.task for cell, _ in entries))
    figure = Figure(figsize=(5.2 * len(tasks), 4.0), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for cell, runs in entries:
            if cell.task != task:
                continue
            metric = _metric(runs[0])
            curves = [{line["step"]: line[metric] for line in run.metrics if line["split"] == "valid"} for run in runs]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            values = [[curve[step] for curve in curves] for step in steps]
            spread = [stdev(found) if len(found) > 1 else 0.0 for found in values]
            axes.errorbar(steps, [mean(found) for found in values], spread, marker="o", capsize=3, label=cell.row)
        axes.set_xlabel("steps")
        _finish(axes, study, next(runs[0] for cell, runs in entries if cell.task == task))
        axes.set_title(task, fontsize=10)
    return figure


def _finish(axes: Any, study: Study, run: Record) -> None:
    axes.set_ylabel(f"{_metric(run).replace('_', ' ')}{' on validation' if study.curves else ''}")
    axes.set_title(study.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _scores(runs: list[Record], score: str) -> list[float]:
    return [run.result[score] for run in runs if run.result]


def _metric(run: Record) -> str:
    assert run.result is not None
    return run.result["metric"]
