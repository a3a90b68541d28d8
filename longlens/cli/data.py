"""``longlens data``: prepare, verify and show the data of tasks."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.rule import Rule

from longlens.cli.flags import Parser
from longlens.cli.output import Failed
from longlens.cli.train import add_task_options, choose_task
from longlens.data import store
from longlens.data.datasets import Samples
from longlens.errors import BadInput
from longlens.files import check_out
from longlens.options import REQUIRED, Count, Option, Size, options_of
from longlens.tasks.base import SPLITS, SplitName, StoredTask, Task, create_task, find_task, list_tasks

SOURCE = Option("from", Path | None, None, "Folder or archive that you have already, instead of a download.")
WORKERS = Option("workers", Size | None, None, "Processes that generate; by default one for each core.")
FORCE = Option("force", bool, False, "Make the set again, though it is there.")
SPLIT = Option("split", SplitName, "train", "Split to show.")
FIRST = Option("first", Count, 0, "Index of the first sample.")
COUNT = Option(
    "count", Size | None, None, "Number of samples; by default 2 texts, 24 pictures or 8 curves of each class."
)
PICTURE = Option("out", Path | None, None, "Picture to write; by default figures/TASK.png.")


def _read(name: str, about: str, arguments: list[str], *options: Option) -> tuple[Task, dict[str, Any]]:
    """The task, whose options are flags with or without the prefix ``task.``, and the values of the command. A flag
    that both have is the command's, and the task's with its prefix."""
    task, arguments = choose_task(name, about, arguments)
    parser = Parser(f"{name} {task}", about)
    own = {option.name: option for option in options}
    parser.add_options("options", own)
    shown, other = ("task.", "") if own.keys() & options_of(find_task(task)).keys() else ("", "task.")
    add_task_options(parser, task, prefix=shown, other_prefix=other)
    values = parser.read(arguments)
    chosen = {key.removeprefix("task."): value for key, value in values.items() if key not in own}
    return create_task(task, **chosen), {key: value for key, value in values.items() if key in own}


def prepare(name: str, about: str, arguments: list[str]) -> list[str]:
    """Prepare, and say what there is now."""
    task, values = _read(name, about, arguments, SOURCE, WORKERS, FORCE)
    force = values.get("force", False)
    there, start = task.is_prepared(), time.perf_counter()
    task.prepare(values.get("from"), workers=values.get("workers"), force=force)
    seconds = time.perf_counter() - start
    spec = task.spec
    sizes = " / ".join(f"{len(task.split(split)):,}" for split in SPLITS)
    unit = "symbol" if spec.inputs == "tokens" else "channel"
    what = f"{spec.size:,} {unit}{'' if spec.size == 1 else 's'}"
    lines = [f"{task.title}: {sizes} samples (train / valid / test), up to {spec.max_length:,} × {what}"]
    if not isinstance(task, StoredTask):
        return [*lines, "its samples are made when they are used: nothing is stored"]
    details = task.prepared.details
    lines += [f"note: {details[kind]}" for kind in ("stand_in", "warning") if kind in details]
    if "warnings" in details:
        lines += [f"note: {warning}" for warning in task.prepared.detail("warnings", list[str])]
    origin = f" from {details['source']}" if "source" in details else ""
    made = f"was there already{origin}; --force makes it again" if there and not force else f"made in {seconds:.1f} s"
    return [*lines, f"{task.folder()}: {task.prepared.size() / 1e6:,.1f} MB, {made}"]


def verify(names: tuple[str, ...] = ()) -> list[str]:
    """Compare every file of the prepared sets with its checksum.

    Args:
        names: Tasks, or sets by their names; by default all.
    """
    folders = [folder for folder in store.prepared_sets() if not names or any(_belongs(folder, n) for n in names)]
    if not folders:
        wanted = f" of {' or '.join(names)}" if names else ""
        raise BadInput(f"there is no prepared set{wanted} in {store.home() / 'sets'}: 'longlens data prepare' makes it")
    found: dict[str, list[str]] = {}
    for folder in folders:
        try:
            found[folder.name] = store.Prepared(folder).verify()
        except store.CacheError as error:
            found[folder.name] = [str(error)]
    lines = [f"{name}: {'; '.join(problems) or 'whole'}" for name, problems in found.items()]
    if any(found.values()):
        raise Failed([*lines, "make damaged sets again with 'longlens data prepare' and --force"])
    return lines


def _belongs(folder: Path, name: str) -> bool:
    """Whether a set is of this name, or stored by the task of this name."""
    stored = name
    if name in list_tasks() and not any(o.default is REQUIRED for o in options_of(find_task(name)).values()):
        task = create_task(name)
        stored = task.store_name() if isinstance(task, StoredTask) else name
    return folder.name == name or folder.name.startswith((f"{name}-", f"{stored}-"))


def show(name: str, about: str, arguments: list[str]) -> list[Any]:
    """Samples in a readable form: texts are printed, pictures and curves written to a file."""
    task, values = _read(name, about, arguments, SPLIT, FIRST, COUNT, PICTURE)
    split, first, count, out = (values.get(o.name, o.default) for o in (SPLIT, FIRST, COUNT, PICTURE))
    samples_of = task.split(split)
    if first >= len(samples_of):
        last = len(samples_of) - 1
        raise BadInput(f"first must be at most {last:,}, the last {split} sample of {task.title}, got {first:,}")

    def take(default: int) -> Samples:
        return samples_of.take(np.arange(first, min(first + (count or default), len(samples_of))))

    if task.picture(take(1), 0) is not None:
        path = check_out(out or Path("figures") / f"{task.name}.png")
        assert path is not None
        samples = take(24)
        _draw_sheet(task, samples, f"{task.title}, {split}, from sample {first}", path)
        return [f"{len(samples.targets)} samples of {task.title}, {split}: written to {path}"]
    if task.name == "files" and task.spec.inputs == "real":
        return [_draw_curves(task, split, first, count or 8, out or Path("figures") / "files.png")]
    if out is not None:
        raise BadInput(f"samples of {task.name} are not pictures: leave out --out")
    samples, parts = take(2), []
    for row in range(len(samples.targets)):
        length = " and ".join(map(str, np.atleast_1d(samples.lengths[row]).tolist()))
        parts += [Rule(f"{task.title}, {split}, sample {first + row}, length {length}"), task.render(samples, row)]
    return parts


def _draw_curves(task: Task, split: SplitName, first: int, count: int, path: Path) -> str:
    from longlens.reports.curves import draw_curves
    from longlens.tasks.files import Files

    assert isinstance(task, Files)
    curves, channels = task.curves(split, first, count)
    drawn = f"{sum(map(len, curves.values()))} curves of {task.title}, {split}"
    return f"{drawn}: {draw_curves(curves, channels, f'{task.title}, {split}', path)}"


def _draw_sheet(task: Task, samples: Samples, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    from longlens.reports.pictures import check_picture, plain, save_picture, styled

    check_picture(path)
    rows = -(-len(samples.targets) // 8)
    with styled():
        figure = Figure(figsize=(12, 0.5 + 1.75 * rows), layout="constrained")
        figure.suptitle(plain(title))
        for row, axis in enumerate(figure.subplots(rows, 8, squeeze=False).ravel()):
            axis.set_axis_off()
            if row < len(samples.targets):
                axis.imshow(task.picture(samples, row), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axis.set_title(task.render(samples, row), fontsize=10)
        save_picture(figure, path)
