"""Pictures of studies: a line for each row of a table, and learning curves."""

from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from longlens.paper.records import Record, Records
from longlens.paper.run import runs_of
from longlens.paper.study import Cell, Scale, Study
from longlens.reports.learning import draw_seeds, points
from longlens.reports.pictures import legend_beside, line_look, save_picture, styled
from longlens.training.config import Runtime


@styled()
def draw_study(study: Study, scale: Scale, records: Records, runtime: Runtime, out: Path) -> str | None:
    """The picture of a study, if it has one and there are runs for it: the line that says where it is."""
    found = [(cell, runs) for cell in study.cells(scale) if (runs := runs_of(cell, scale, records))]
    if not found:
        return None
    if study.draw is not None:
        return study.draw(scale, records, runtime, out)
    if study.axis is None and not study.curves:
        return None
    columns = list(dict.fromkeys(cell.column or cell.task for cell in study.cells(scale)))
    return save_picture(_draw_curves(found) if study.curves else _draw_lines(study, columns, found), out)


def _draw_lines(study: Study, columns: list[str], entries: list[tuple[Cell, list[Record]]]) -> Figure:
    """The mean and the standard deviation over seeds, by column."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = list(dict.fromkeys(cell.row for cell, _ in entries))
    for number, row in enumerate(rows):
        aside = 0.05 * (number - (len(rows) - 1) / 2)  # so that bars do not hide each other
        points = [(cell.column or cell.task, _scores(runs, study.score)) for cell, runs in entries if cell.row == row]
        places = [columns.index(column) + aside for column, _ in points]
        spread = [stdev(values) if len(values) > 1 else 0.0 for _, values in points]
        means = [mean(values) for _, values in points]
        axes.errorbar(places, means, spread, **line_look(number), marker="o", capsize=3, label=row)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_xlabel(study.axis or "")
    axes.set_title(study.title)
    metric = _metric(entries[0][1][0])
    axes.set_ylabel("accuracy, %" if metric == "accuracy" else metric.replace("_", " "))
    legend_beside(figure, axes.get_legend_handles_labels()[0])
    return figure


def _draw_curves(entries: list[tuple[Cell, list[Record]]]) -> Figure:
    """The metric on the validation set by step, for each task."""
    tasks = list(dict.fromkeys(cell.task for cell, _ in entries))
    figure = Figure(figsize=(4.8 * len(tasks), 4.0), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    looks = {row: line_look(number) for number, row in enumerate(dict.fromkeys(cell.row for cell, _ in entries))}
    for axes, task in zip(panels, tasks, strict=True):
        for cell, runs in entries:
            if cell.task != task:
                continue
            curves = [points(run.metrics, "valid", _metric(run)) for run in runs]
            draw_seeds(axes, curves, [True] * len(runs), looks[cell.row])
            axes.set_ylabel(f"validation {_metric(runs[0]).replace('_', ' ')}")
        axes.set_xlabel("step")
        axes.set_title(task)
    legend_beside(figure, [Line2D([], [], **look, label=row) for row, look in looks.items()])
    return figure


def _scores(runs: list[Record], score: str) -> list[float]:
    """In percent, if they are accuracies."""
    times = 100 if _metric(runs[0]) == "accuracy" else 1
    return [times * run.result[score] for run in runs if run.result]


def _metric(run: Record) -> str:
    assert run.result is not None
    return run.result["metric"]
