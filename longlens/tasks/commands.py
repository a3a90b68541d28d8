"""What ``longlens data`` does."""

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from longlens.console import say
from longlens.options import required_options
from longlens.tasks import store
from longlens.tasks.base import (
    SPLITS,
    SplitName,
    StoredTask,
    Task,
    create_task,
    list_tasks,
    task_class,
)
from longlens.tasks.datasets import Samples


def print_tasks(console: Console) -> None:
    """A line for each task, and then the prepared sets."""
    table = Table("task", "what", "head", "metric", "data", "prepared")
    for name in list_tasks():
        chosen = task_class(name)
        task = None if required_options(chosen) else create_task(name)
        ready = ("yes" if task.is_prepared() else "no") if isinstance(task, StoredTask) else "–"
        table.add_row(name, chosen.summary, chosen.head, chosen.metric, chosen.origin, ready)
    console.print(table)
    table = Table("prepared set", "samples or tokens (train / valid / test)", "MB", "note")
    for folder in store.prepared_sets():
        table.add_row(folder.name, *_describe(folder))
    for folder in store.unfinished_sets():
        size = sum(file.stat().st_size for file in folder.iterdir())
        table.add_row(folder.name, "", f"{size / 1e6:,.0f}", "unfinished: the same command goes on")
    if table.rows:
        console.print(table)
    say(console, f"cache folder: {store.home()} (LONGLENS_HOME)")


def _describe(folder: Path) -> tuple[str, str, str]:
    """Sizes, megabytes and a note about a set."""
    try:
        prepared = store.Prepared(folder)
        sizes = prepared.details["sizes"]
        shown = " / ".join(f"{sizes[split]:,}" if split in sizes else "–" for split in SPLITS)
        note = prepared.details.get("stand_in") or prepared.details.get("warning") or ""
        return shown, f"{prepared.size() / 1e6:,.0f}", note
    except (OSError, KeyError):
        return "", "", "damaged: make it again with --force"


def prepare_task(task: Task, source: Path | None, workers: int | None, force: bool, console: Console) -> None:
    """Prepare, and say what there is now."""
    there, start = task.is_prepared(), time.perf_counter()
    task.prepare(source, workers=workers, force=force)
    seconds = time.perf_counter() - start
    spec = task.spec
    sizes = " / ".join(f"{len(task.split(split)):,}" for split in SPLITS)
    what = f"{spec.size} symbols" if spec.inputs == "tokens" else f"{spec.size} channels"
    say(console, f"{task.title}: {sizes} samples (train / valid / test), up to {spec.max_length:,} × {what}")
    if isinstance(task, StoredTask):
        details = task.prepared.details
        for kind in ("stand_in", "warning"):
            if kind in details:
                say(console, f"note: {details[kind]}")
        origin = f" from {details['source']}" if "source" in details else ""
        made = (
            f"was there already{origin}; --force makes it again" if there and not force else f"made in {seconds:.1f} s"
        )
        say(console, f"{task.folder()}: {task.prepared.size() / 1e6:,.1f} MB, {made}")
    else:
        say(console, "its samples are made when they are used: nothing is stored")


def verify_sets(names: tuple[str, ...], console: Console) -> bool:
    """Whether all files of the sets are as they were written."""
    folders = [folder for folder in store.prepared_sets() if not names or any(_belongs(folder, n) for n in names)]
    if not folders:
        wanted = f" of {' or '.join(names)}" if names else ""
        raise ValueError(f"there is no prepared set{wanted} in {store.home() / 'sets'}")
    whole = True
    for folder in folders:
        try:
            problems = store.Prepared(folder).verify()
        except store.CacheError as error:
            problems = [str(error)]
        whole &= not problems
        say(console, f"{folder.name}: {'; '.join(problems) or 'whole'}")
    if not whole:
        say(console, "make damaged sets again with 'longlens data prepare' and --force")
    return whole


def _belongs(folder: Path, name: str) -> bool:
    """Whether a set is of this name, or stored by the task of this name."""
    stored = name
    if name in list_tasks() and not required_options(task_class(name)):
        task = create_task(name)
        stored = task.store_name() if isinstance(task, StoredTask) else name
    return folder.name == name or folder.name.startswith((f"{name}-", f"{stored}-"))


def show_task(
    task: Task, split: SplitName, first: int, count: int | None, out: Path | None, console: Console
) -> None:  # fmt: skip
    """Samples in a readable form: texts to the console, pictures to a file."""
    samples_of = task.split(split)
    if not 0 <= first < len(samples_of):
        raise ValueError(f"first is {first}; the {split} set of {task.title} has samples 0 to {len(samples_of) - 1:,}")
    if count is not None and count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")

    def take(default: int) -> Samples:
        return samples_of.take(np.arange(first, min(first + (count or default), len(samples_of))))

    if task.picture(take(1), 0) is not None:
        path = out or Path("results") / f"{task.name}.png"
        samples = take(24)
        _draw_sheet(task, samples, f"{task.title}, {split}, from sample {first}", path)
        say(console, f"{len(samples.targets)} samples of {task.title}, {split}: written to {path}")
        return
    if out is not None:
        raise ValueError(
            f"samples of {task.name} are not pictures, so there is nothing to write to {out}: leave out --out"
        )
    samples = take(2)
    for row in range(len(samples.targets)):
        length = " and ".join(map(str, np.atleast_1d(samples.lengths[row]).tolist()))
        console.rule(f"{task.title}, {split}, sample {first + row}, length {length}")
        say(console, task.render(samples, row))


def _draw_sheet(task: Task, samples: Samples, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    rows = -(-len(samples.targets) // 8)
    figure = Figure(figsize=(12, 0.5 + 1.75 * rows), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, 8, squeeze=False).ravel()
    for row, axis in enumerate(axes):
        axis.set_axis_off()
        if row < len(samples.targets):
            axis.imshow(task.picture(samples, row), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(task.render(samples, row), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
