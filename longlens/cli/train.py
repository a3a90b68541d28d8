"""``longlens train``, ``compare``, ``sweep`` and ``evaluate``."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longlens import api
from longlens.cli import sentence, show
from longlens.cli.flags import HELP, Parser, print_choices
from longlens.cli.output import BESIDE, Output, Told, table_options, take_output
from longlens.errors import BadInput
from longlens.files import check_out, write_json
from longlens.options import Device, Option, options_of
from longlens.reports.sheet import Column
from longlens.tasks.base import find_task, list_tasks
from longlens.training.config import Recipe, Runtime, load_recipe, section_options

if TYPE_CHECKING:
    from longlens.training.evaluate import Evaluation

RUN = ("runs", "folder")
HARDWARE = ("device", "threads", "parallel", "compile", "deterministic", "tf32")
LOGGING = ("checkpoint_every", "keep", "log_every", "tensorboard", "wandb")
NAMES = {"mixer": str, "mixers": tuple[str, ...], "recipe": str}  # on the command line, not objects
OUT = Option("out", Path | None, None, "JSON file to write the results to.")
GRID = Option(
    "grid",
    tuple[str, ...],
    (),
    "Fields and their values, all combinations of which are run: lr=1e-3,3e-4 mixer.window=3,5 mixer=las,s4d.",
)


def train(name: str, about: str, arguments: list[str]) -> list[Any]:
    """Train in this process, and say what came of it (in the first process only)."""
    task, values, changes = _read(name, about, arguments, api.train)
    result = api.train(task, **values, **changes)
    from longlens.training.run import show_metric  # not for a help screen

    if int(os.environ.get("RANK", "0")) > 0:
        return []
    test, valid, last = (show_metric(result.metric, value) for value in (result.test, result.valid, result.test_last))
    lines = [
        f"{result.mixer} on {result.task}",
        f"{result.metric.replace('_', ' ')}: test {test}, valid {valid} (model with the best validation); "
        f"test {last} (last model)",
        f"{result.parameters:,} parameters, {result.steps:,} steps in {result.seconds:,.0f} s, "
        f"{result.tokens_per_second:,.0f} tokens/s",
    ]
    if result.peak_memory_bytes is not None:
        lines[-1] += f", {result.peak_memory_bytes / 2**20:,.0f} MiB"
    match result.values.get("ended_by"):
        case "validation":
            lines.append(f"stopped at step {result.steps:,}, as validation was not better than at {result.best_step:,}")
        case "minutes":
            minutes = result.config.training.minutes
            lines.append(f"{result.steps:,} steps fit into {minutes:g} minutes of training here; elsewhere, others do")
    note = " (finished before, not run again)" if result.was_there else ""
    return [*map(sentence, lines), f"run folder: {result.folder}{note}"]


def compare(name: str, about: str, arguments: list[str]) -> list[Any]:
    """Train several mixers in processes of their own."""
    task, values, changes = _read(name, about, arguments, api.compare, *_output())
    output, out = take_output(values, BESIDE), check_out(values.pop("out", None))
    _refuse_empty(values, "mixers", "seeds")
    return _report(api.compare(task, **values, **changes), out, output)


def sweep(name: str, about: str, arguments: list[str]) -> list[Any]:
    """Train a grid in processes of their own."""
    task, values, changes = _read(name, about, arguments, api.sweep, *_output(), GRID)
    output, out = take_output(values, BESIDE), check_out(values.pop("out", None))
    _refuse_empty(values, "seeds")
    values["grid"] = read_grid(values.get("grid", ()))
    return _report(api.sweep(task, **values, **changes), out, output)


def _output() -> Iterable[Option]:
    return table_options({OUT.name: OUT}, BESIDE).values()


def _read(
    name: str, about: str, arguments: list[str], function: Callable[..., Any], *more: Option
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The task, the arguments of the function, and what is changed of the recipe, by dotted names."""
    task, arguments = choose_task(name, about, arguments)
    parser = Parser(f"{name} {task}", f"{about} Defaults are those of the recipe.")
    own = {key: option for key, option in options_of(function).items() if key not in ("task", "grid")}
    own |= {key: replace(own[key], hint=hint, positional=False) for key, hint in NAMES.items() if key in own}
    own |= {option.name: option for option in more}
    runtime = options_of(Runtime)
    parser.add_options("run", own | {key: runtime[key] for key in RUN if key != "folder" or "mixers" not in own})
    several = "mixers" in own
    mixers = list(parser.peek(arguments, "mixers", ())) if several else [parser.peek(arguments, "mixer", "las")]
    mixers = mixers or list(own["mixers"].default)
    if GRID in more:
        mixers = read_grid(parser.peek(arguments, "grid", ())).get("mixer") or mixers
    recipe = load_recipe(parser.peek(arguments, "recipe", own["recipe"].default), task, mixers)
    _add_sections(parser, recipe, task, mixers)
    parser.add_options("hardware", {key: runtime[key] for key in HARDWARE})
    parser.add_options("logging", {key: runtime[key] for key in LOGGING})
    given = parser.read(arguments)
    values = {key: value for key, value in given.items() if key in own} | {"recipe": recipe}
    return task, values, {key: value for key, value in given.items() if key not in own}


def _add_sections(parser: Parser, recipe: Recipe, task: str, mixers: list[str]) -> None:
    """Flags of the sections of a config, with the values of the recipe as defaults. ``--path`` is ``--task.path`` where
    nothing else has that name."""
    title = f"mixer {mixers[0]}" if len(mixers) == 1 else "mixers (for those that have the option)"
    options = section_options("mixer", task, mixers)
    defaults = recipe.defaults("mixer", mixers[0]) if len(mixers) == 1 else dict.fromkeys(options)
    add_task_options(parser, task, prefix="task.", other_prefix="", defaults=recipe.common("task", mixers))
    parser.add_options(title, options, prefix="mixer.", defaults=defaults)
    one = f"mixer {mixers[0]!r} has no option"
    parser.refusals["--mixer."] = one if len(mixers) == 1 else f"none of {', '.join(mixers)} has the option"
    for section in ("model", "training"):
        parser.add_options(section, section_options(section, task, ()), defaults=recipe.common(section, mixers))


def add_task_options(parser: Parser, task: str, **how: Any) -> None:
    """Flags of the options of a task, also by their old names."""
    parser.add_options(f"task {task}", section_options("task", task, ()), old_names=find_task(task).aliases, **how)
    parser.refusals["--task."] = f"task {task!r} has no option"


def choose_task(name: str, about: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The task that comes first, and the other arguments. Help without a task lists the tasks."""
    first = next(iter(arguments), None)
    if first is None or first.startswith("-"):
        if first not in HELP:
            raise BadInput(f"'{name}' must be followed by a task: {', '.join(list_tasks())}")
        print_choices(name, about, "TASK", {task: find_task(task).summary for task in list_tasks()})
    find_task(first)
    return first, arguments[1:]


def read_grid(entries: tuple[str, ...]) -> Mapping[str, list[Any]]:
    """``lr=1e-3,3e-4 betas=[0.9,0.99],[0.9,0.999]`` as fields and their values."""
    grid: dict[str, list[Any]] = {}
    for entry in entries:
        field, equals, text = entry.partition("=")
        values = [value.strip() for value in re.split(r",(?![^\[]*\])", text)]
        if not equals or not field or not all(values):
            raise BadInput(f"grid must have fields and their values, as in lr=1e-3,3e-4, got {entry!r}")
        field = field.replace("-", "_")
        if field in grid:
            raise BadInput(f"grid names a field twice: {' '.join(entries)}")
        grid[field] = [value[1:-1].split(",") if value.startswith("[") else value for value in values]
    return grid


def _refuse_empty(values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if values.get(name) == ():
            raise BadInput(f"--{name} must be followed by at least one value")


def _report(comparison: api.Comparison, out: Path | None, output: Output) -> list[Any]:
    """Print the table and what it says; a run that failed makes the exit code 1."""
    outcomes = comparison.outcomes
    lines: list[Any] = [comparison.table]
    for outcome in comparison.failed:
        run = f"{outcome.config.mixer.name}, seed {outcome.config.training.seed}"
        values = outcome.config.values()
        run += f", fold {values['task.fold']}" if values.get("task.folds") else ""
        lines.append(sentence(f"{run} failed: {outcome.error}"))
    if said := comparison.verdict:
        lines.append(sentence(said))
    before = sum(outcome.was_there for outcome in outcomes)
    if before:
        lines.append(sentence(f"{before} of {len(outcomes)} were finished before; delete a folder to run it again"))
    folders = outcomes[0].folder.parent.parent
    lines.append(f"run folders: {folders}")
    here = folders.relative_to(Path.cwd()) if folders.is_relative_to(Path.cwd()) else folders
    lines.append(f"a page of them: longlens report {shlex.quote(str(here))}")
    if out is not None:
        rows = [
            {"config": o.config.values(), "folder": str(o.folder), "result": o.result, "error": o.error}
            for o in outcomes
        ]
        write_json(out, rows)
        lines.append(f"written to {out}")
    show(lines, output)
    if comparison.failed:
        raise SystemExit(1)
    return []


def evaluate(
    run: Path,
    *,
    split: Literal["train", "valid", "test"] = "test",
    data: Path | None = None,
    checkpoint: str = "best",
    classes: bool = False,
    confusion: Path | None = None,
    device: Device = "auto",
) -> list[Any]:
    """Evaluate a checkpoint of a run on a whole split, or on another file.

    Args:
        run: Folder of the run.
        split: Split to evaluate on.
        data: File of labeled sequences to evaluate on instead, in one of the formats of training; it is scaled and
            encoded as the training set was.
        checkpoint: Checkpoint to evaluate: best, last, or a step.
        classes: Show precision, recall and F1 of each class of the split.
        confusion: Picture of the confusion matrix of the split to write (.png, .pdf or .svg).
        device: Device to run on; auto is a GPU if there is one.
    """
    if data is not None and (classes or confusion):
        raise BadInput("--classes and --confusion are of a split: leave out --data")
    loaded = api.load_run(run)
    if data is None:
        found = loaded.evaluate(split, checkpoint, device=device)
    else:
        found = loaded.evaluate_file(data, checkpoint, device=device)
    if int(os.environ.get("RANK", "0")) > 0:
        return []
    lines = [
        f"{found.config.mixer.name} on {found.config.task.title}, {found.split} ({found.samples:,} samples), "
        f"step {found.step:,}: {found.metric} {found.value:.4f}, loss {found.loss:.4f}"
    ]
    if found.change_by_later_tokens is not None:
        lines.append(f"when later tokens change, the logits before them change by {found.change_by_later_tokens:.3g}")
    if found.bigram is not None:
        lines.append(f"a bigram model of the training set: {found.metric} {found.bigram:.4f}")
    printed: list[Any] = [sentence(line) for line in lines] if classes else [_told(found, lines)]
    if classes or confusion:
        from longlens.reports.metrics import class_table, draw_confusion

        printed += [class_table(loaded, split, checkpoint)] if classes else []
        printed += [draw_confusion(loaded, split, checkpoint, confusion)] if confusion else []
    return printed


def _told(found: "Evaluation", lines: list[str]) -> Told:
    """The figures as a table of one row, which a terminal shows as lines."""
    cells = {
        "mixer": found.config.mixer.name,
        "task": found.config.task.title,
        "split": found.split,
        "samples": f"{found.samples:,}",
        "step": f"{found.step:,}",
        "metric": found.metric,
        "value": f"{found.value:.6f}",
        "loss": f"{found.loss:.6f}",
    }
    columns = [Column(name, number=name in ("samples", "step", "value", "loss")) for name in cells]
    return Told("", columns, [list(cells.values())], lines)
