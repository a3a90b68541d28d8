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
from rich.console import Console
from rich.table import Table

from longlens.bench.measure import check_out, write_result
from longlens.console import say
from longlens.models.heads import loss_sum
from longlens.models.model import create_model
from longlens.naming import nearest
from longlens.tasks.base import Task, create_task
from longlens.tasks.generate import GeneratedTask

GENERATED = {
    "listops": {"sizes": (2_000, 500, 500)},
    "pathfinder": {"sizes": (2_000, 500, 500)},
    "path-x": {"sizes": (400, 100, 100)},
    "atomic-select": {},
    "atomic-cummax": {},
    "atomic-cumsum": {},
}
IMPORTED = {  # the folder below --source, and the task's options
    "text": ("imdb", {}),
    "retrieval": ("aan", {"stand_in": True}),
    "image": ("cifar10", {}),
    "smnist": ("mnist", {}),
    "pmnist": ("mnist", {}),
    "text8": ("text8", {"stand_in": True}),
    "enwik8": ("enwik8", {"stand_in": True}),
    "wikitext-2": ("wikitext-2", {}),
}
TOKENS = 65_536  # in a batch, at most
LOGITS = 2**27  # of a batch of language, at most
STEPS = 4  # of training, for each task


def bench_data(
    *, tasks: tuple[str, ...], source: Path | None, batch_size: int, rounds: int, out: Path | None, console: Console
) -> list[dict]:
    """Measure these tasks (all, if none is named), print the table, write ``out``, and return the rows."""
    for name in tasks:
        if name not in GENERATED and name not in IMPORTED:
            raise ValueError(f"{name!r} is not measured; {nearest(name, [*GENERATED, *IMPORTED])}")
    if batch_size < 1 or rounds < 1:
        raise ValueError(f"batch_size is {batch_size} and rounds is {rounds}; both must be at least 1")
    if source is not None and not any((source / folder).is_dir() for folder, _ in IMPORTED.values()):
        raise ValueError(f"{source} has none of the folders {', '.join(dict(IMPORTED.values()))}")
    check_out(out)
    rows: list[dict[str, Any]] = []
    with _temporary_home():
        for name in tasks or (*GENERATED, *IMPORTED):
            folder, options = IMPORTED.get(name, (None, GENERATED.get(name, {})))
            if folder is not None and (source is None or not (source / folder).is_dir()):
                console.print(f"{name}: not measured, as its data is not there (--source)")
                continue
            console.print(f"measuring {name}")
            task = create_task(name, **options)
            if source is not None and folder is not None:
                start = time.perf_counter()
                task.prepare(source / folder, force=True)
                row = {"import_seconds": time.perf_counter() - start}
            else:
                row = _measure_generator(task, rounds)
            rows.append(row | _measure_loader(task, batch_size, rounds))
    console.print(_table(rows))
    if out is not None:
        write_result(out, "cpu", {"rows": rows})
        say(console, f"written to {out}")
    return rows


def _measure_generator(task: Task, rounds: int) -> dict[str, Any]:
    """Samples a second of one process."""
    rates = []
    for index in range(rounds):
        start = time.perf_counter()
        if isinstance(task, GeneratedTask):
            count = len(task.block(index).labels)
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
        next(batches)  # the order of the epoch is made with the first
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
    row = {"task": task.title, "batch": size, "length": spec.max_length}
    return row | {"load_ms": 1e3 * median(loading), "train_ms": 1e3 * median(training)}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("task", "samples/s, one core", "import", "batch × L", "load a batch", "train on it", "share")
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['generated_per_second']:,.0f}" if "generated_per_second" in row else "",
            f"{row['import_seconds']:.1f} s" if "import_seconds" in row else "",
            f"{row['batch']} × {row['length']:,}",
            f"{row['load_ms']:.2f} ms",
            f"{row['train_ms']:,.0f} ms",
            f"{100 * row['load_ms'] / row['train_ms']:.1f} %",
        )
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
