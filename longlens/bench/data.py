"""How fast data is made, imported and loaded: ``longlens bench data``."""

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch

from longlens.bench.measure import Row, begin, make_table, write_result
from longlens.errors import BadInput
from longlens.models.model import create_model, loss_sum
from longlens.options import REQUIRED, Size, options_of
from longlens.progress import progress
from longlens.reports.sheet import Sheet
from longlens.tasks.base import GeneratedTask, StoredTask, Task, create_task, find_task, list_tasks

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
    names = list_tasks() if tasks is None else tasks
    for name in names:
        find_task(name)
    if source is not None and not source.is_dir():
        raise BadInput(f"source must be a folder, got {source}")
    where = begin("cpu", out, tasks=tasks)
    rows: list[Row] = []
    missing: dict[str, list[str]] = {}  # tasks by the reason why they are not measured
    with (
        tempfile.TemporaryDirectory(prefix="longlens-bench-") as home,
        mock.patch.dict(os.environ, LONGLENS_HOME=home),
        progress("data", len(names), "tasks") as done,
    ):
        for count, name in enumerate(names):
            done(count, name)
            try:
                task, row = _prepare(name, source, batch_size, rounds)
                rows.append(row | _measure_loader(task, batch_size, rounds))
            except BadInput as error:
                missing.setdefault(str(error), []).append(name)
    notes = [f"{', '.join(tasks)}: not measured: {reason}" for reason, tasks in missing.items()]
    return [*([_table(rows)] if rows else []), *notes, *write_result(out, where, rows=rows)]


def _prepare(name: str, source: Path | None, batch_size: int, rounds: int) -> tuple[Task, Row]:
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


def _measure_import(task: StoredTask, source: Path) -> Row:
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


def _measure_generator(task: Task, rounds: int) -> Row:
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


def _measure_loader(task: Task, batch_size: int, rounds: int) -> Row:
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


def _table(rows: list[Row]) -> Sheet:
    columns = {"task": "{name}", "made": "{made}", "batch × L": "{batch} × {length:,}"}
    columns |= {"load": "{load_ms:.2f} ms", "train": "{train_ms:,.0f} ms", "ratio": "{ratio:.1%}"}
    notes = ["made: samples a second that one core generates, or seconds to import the set. ratio: load / train."]
    shown = []
    for row in rows:
        rate, ratio = row.get("generated_per_second"), row["load_ms"] / row["train_ms"]
        made = f"{row['import_seconds']:.1f} s" if rate is None else f"{rate:,.0f} / s"
        mark = "*" if "stand_in" in row else ""
        shown.append(row | {"name": row["name"] + mark, "made": made, "ratio": ratio})
    if any("stand_in" in row for row in rows):
        notes.append("*: a stand-in, or a part of the set, and not the set itself.")
    return make_table("making a set, loading a batch of it, training on the batch", shown, columns, *notes)
