"""How fast data is made, imported and loaded: ``longlens bench data``."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from longlens.bench.measure import check_given, make_table, write_result
from longlens.errors import BadInput
from longlens.files import check_out
from longlens.models.heads import loss_sum
from longlens.models.model import create_model
from longlens.options import REQUIRED, Size, options_of
from longlens.progress import progress
from longlens.reports.sheet import Sheet
from longlens.tasks.base import StoredTask, Task, create_task, find_task, list_tasks
from longlens.tasks.generated import GeneratedTask

GENERATED = (400, 100, 100)  # samples of a generated set, unless a batch needs more
TOKENS = 65_536  # in a batch, at most
LOGITS = 2**27  # of a batch of language, at most
STEPS = 4  # of training, for each task


def bench_data(
    *,
    tasks: tuple[str, ...] | None = None,
    source: Path | None = None,
    batch_size: Size = 32,
    rounds: Size = 5,
    out: Path | None = None,
) -> list[Sheet | str]:
    """Samples a second of each generator, time to import each real set, and what loading costs beside training.

    Everything is made in a temporary folder; nothing of the cache is touched.

    Args:
        tasks: Tasks to measure; by default all.
        source: Folder with the files of real sets (MNIST, CIFAR-10, IMDB, …), in folders of their own, to import.
        batch_size: Samples of a batch.
        rounds: Number of repetitions; the best of a generator counts, and the median of loading.
        out: JSON file to write the figures and the environment to.
    """
    check_given(tasks=tasks)
    names = list_tasks() if tasks is None else tasks
    for name in names:
        find_task(name)
    if source is not None and not source.is_dir():
        raise BadInput(f"source must be a folder, got {source}")
    check_out(out)
    rows: list[dict[str, Any]] = []
    missing: dict[str, list[str]] = {}  # tasks by the reason why they are not measured
    with _temporary_home(), progress("data", len(names), "tasks") as done:
        for count, name in enumerate(names):
            done(count, name)
            try:
                task, row = _prepare(name, source, batch_size, rounds)
                rows.append(row | _measure_loader(task, batch_size, rounds))
            except BadInput as error:
                missing.setdefault(str(error), []).append(name)
    notes = [f"{', '.join(tasks)}: not measured: {reason}" for reason, tasks in missing.items()]
    said = write_result(out, torch.device("cpu"), {"rows": rows})
    return [*([_table(rows)] if rows else []), *notes, *said]


def _prepare(name: str, source: Path | None, batch_size: int, rounds: int) -> tuple[Task, dict[str, Any]]:
    """A task whose data is there, and how long that takes. BadInput says why it is not."""
    options = options_of(find_task(name))
    if needed := [option.name for option in options.values() if option.default is REQUIRED]:
        raise BadInput(f"it needs {' and '.join(needed)}")
    task = create_task(name)
    if isinstance(task, GeneratedTask):
        train, valid, test = GENERATED
        task = create_task(name, sizes=(max(train, (STEPS + 1) * batch_size), valid, test))
    if isinstance(task, GeneratedTask) or not isinstance(task, StoredTask):
        return task, _measure_generator(task, rounds)
    if source is None:
        raise BadInput("its data is not there: give a folder with --source")
    try:
        return task, _measure_import(task, source)
    except BadInput:
        if "stand_in" not in options:
            raise
        other = create_task(name, stand_in=True)
        assert isinstance(other, StoredTask)
        return other, _measure_import(other, source) | {"stand_in": True}


def _measure_import(task: StoredTask, source: Path) -> dict[str, Any]:
    """Seconds to import a set from the folder below ``source`` that has its name."""
    data = str(task.identity().get("data", ""))
    names = {name.replace("-", "").lower() for name in (task.name, data)}
    folders = [path for path in sorted(source.iterdir()) if path.is_dir()]
    folder = next((path for path in folders if path.name.replace("-", "").lower() in names), None)
    if folder is None:
        raise BadInput(f"there is no folder {data or task.name} in {source}")
    start = time.perf_counter()
    task.prepare(folder, force=True)
    return {"import_seconds": time.perf_counter() - start}


def _measure_generator(task: Task, rounds: int) -> dict[str, Any]:
    """Samples a second of one process."""
    rates = []
    for index in range(rounds):
        start = time.perf_counter()
        if isinstance(task, GeneratedTask):
            count = len(task.shard(index).labels)
        else:
            count = len(task.split("train", epoch=index).take(np.arange(256)).targets)
        rates.append(count / (time.perf_counter() - start))
    return {"generated_per_second": max(rates)}


def _measure_loader(task: Task, batch_size: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to load a batch and to train on it, turn by turn."""
    spec = task.spec
    room = LOGITS // spec.outputs if spec.head == "language" else TOKENS
    size = max(1, min(batch_size, min(room, TOKENS) // spec.max_length))
    # Fast, so that loading shows beside it.
    model = create_model(spec, "las-chunk", depth=2, width=64, heads=4)
    optimizer = torch.optim.AdamW(model.parameters())
    loading, training = [], []
    for epoch in range(rounds):
        batches = iter(task.batches("train", size, epoch=epoch, shuffle=True))
        next(batches, None)  # the order of the epoch is made with the first
        for _ in range(STEPS):
            start = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            loaded = time.perf_counter()
            optimizer.zero_grad()
            outputs = model(batch.inputs, batch.mask if batch.is_padded else None)
            (loss_sum(spec, outputs, batch.targets) / batch.total).backward()
            optimizer.step()
            loading.append(loaded - start)
            training.append(time.perf_counter() - loaded)
    if not loading:
        raise BadInput(f"it has no two batches of {size}: choose a smaller batch size")
    row = {"name": task.name, "task": task.title, "batch": size, "length": spec.max_length}
    return row | {"load_ms": 1e3 * median(loading), "train_ms": 1e3 * median(training)}


def _table(rows: list[dict[str, Any]]) -> Sheet:
    columns = {
        "task": lambda row: row["name"] + ("*" if "stand_in" in row else ""),
        "made": lambda row: (
            f"{row['generated_per_second']:,.0f} / s"
            if "generated_per_second" in row
            else f"{row['import_seconds']:.1f} s"
        ),
        "batch × L": lambda row: f"{row['batch']} × {row['length']:,}",
        "load": lambda row: f"{row['load_ms']:.2f} ms",
        "train": lambda row: f"{row['train_ms']:,.0f} ms",
        "ratio": lambda row: f"{100 * row['load_ms'] / row['train_ms']:.1f} %",
    }
    table = make_table("making a set, loading a batch of it, training on the batch", rows, columns)
    note = "made: samples a second that one core generates, or seconds to import the set. ratio: load / train."
    table.notes.append(note)
    if any("stand_in" in row for row in rows):
        table.notes.append("*: a stand-in, or a part of the set, and not the set itself.")
    return table


@contextmanager
def _temporary_home() -> Iterator[None]:
    before = os.environ.get("LONGLENS_HOME")
    with tempfile.TemporaryDirectory(prefix="longlens-bench-") as folder:
        os.environ["LONGLENS_HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("LONGLENS_HOME")
            if before is not None:
                os.environ["LONGLENS_HOME"] = before
