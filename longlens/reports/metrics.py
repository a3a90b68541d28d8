"""Other metrics than the task's own, by scikit-learn: of the best model of a run on its test samples."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longlens.data.datasets import Batches
from longlens.errors import BadInput
from longlens.reports.pictures import check_picture, plain, save_picture, styled, without_frame
from longlens.reports.sheet import Column, Sheet
from longlens.tasks.base import SplitName, Task
from longlens.training.evaluate import load_model
from longlens.training.run import read_config
from longlens.training.saved import Run, load_run
from longlens.training.step import evaluated_part

OF_CLASSES = ("balanced-accuracy", "macro-f1", "auc")
OF_NUMBERS = ("mae",)
AT_ONCE = 64  # samples


def check_metrics(task: Task, names: Sequence[str]) -> None:
    """Refuse, before anything runs, what a task does not have."""
    head = task.head if task.name != "files" else task.spec.head
    allowed = OF_CLASSES if head in ("classify", "match") else OF_NUMBERS if head == "regress" else ()
    for name in names:
        if name not in allowed:
            have = ", ".join(allowed) or "none but its own"
            raise BadInput(f"metrics must be among those of {task.name} ({have}), got {name}")


def other_metrics(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """The named metrics of a finished run, on the test samples of its result."""
    run = load_run(folder)
    outputs, targets = split_answers(folder, "test", "best", run.config.training.test_samples)
    return {name: _measure(name, outputs, targets, run.codec.label_deviation) for name in names}


def _measure(name: str, outputs: np.ndarray, targets: np.ndarray, deviation: float) -> float:
    """Numbers are in units of their deviation in the training set."""
    from sklearn import metrics

    match name:
        case "balanced-accuracy":
            return float(metrics.balanced_accuracy_score(targets, outputs.argmax(axis=1)))
        case "macro-f1":
            how: Any = {"average": "macro", "zero_division": 0.0}
            return float(metrics.f1_score(targets, outputs.argmax(axis=1), **how))
        case "auc":
            return _auc(outputs, targets)
        case _:  # mae
            return deviation * float(metrics.mean_absolute_error(targets.ravel(), outputs.ravel()))


def _auc(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The mean over the classes that are there, each against the others; nan if there is one only."""
    from sklearn.metrics import roc_auc_score

    present = [k for k in range(outputs.shape[1]) if 0 < (targets == k).sum() < len(targets)]
    return float(np.mean([roc_auc_score(targets == k, outputs[:, k]) for k in present])) if present else float("nan")


@cache
def split_answers(
    folder: Path, split: SplitName, checkpoint: str = "best", samples: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (N, classes) or numbers (N, …), and the targets, of the samples of a split."""
    task, model = read_config(folder).task, load_model(folder, checkpoint)
    outputs, targets = [], []
    with torch.no_grad():
        for batch in Batches(evaluated_part(task.split(split), samples), AT_ONCE):
            found = model(batch.inputs, batch.mask if batch.is_padded else None).float()
            outputs.append((found.softmax(dim=-1) if model.spec.head != "regress" else found).numpy())
            targets.append(batch.targets.numpy())
    return np.concatenate(outputs), np.concatenate(targets)


def class_table(run: Run, split: SplitName, checkpoint: str) -> Sheet:
    """Precision, recall and F1 of each class."""
    from sklearn.metrics import precision_recall_fscore_support

    names = _class_names(run)
    outputs, targets = split_answers(run.folder, split, checkpoint)
    how: Any = {"labels": list(range(len(names))), "zero_division": 0.0}
    parts: Any = precision_recall_fscore_support(targets, outputs.argmax(axis=1), **how)
    numbers = (Column(name, number=True) for name in ("precision", "recall", "F1", "samples"))
    sheet = Sheet(f"each class, {split}", [Column("class"), *numbers])
    for name, precision, recall, f1, count in zip(names, *parts, strict=True):
        sheet.rows.append([name, *(f"{100 * value:.1f} %" for value in (precision, recall, f1)), f"{count:,}"])
    return sheet


@styled()
def draw_confusion(run: Run, split: SplitName, checkpoint: str, out: Path) -> str:
    """The confusion matrix: how often each class is taken for which."""
    from matplotlib.figure import Figure
    from sklearn.metrics import confusion_matrix

    names = _class_names(run)
    check_picture(out)
    outputs, targets = split_answers(run.folder, split, checkpoint)
    counts = confusion_matrix(targets, outputs.argmax(axis=1), labels=list(range(len(names))))
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    size = max(4.0, 0.5 * len(names) + 2)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), [plain(name) for name in names], rotation=45, ha="right")
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    without_frame(axes)
    axes.set_xlabel("the model says")
    axes.set_ylabel("it is")
    for (row, column), count in np.ndenumerate(counts):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=10)
    return save_picture(figure, out)


def _class_names(run: Run) -> list[str]:
    if run.spec.head not in ("classify", "match"):
        raise BadInput(f"{run.config.task.name} has no classes: leave out --classes and --confusion")
    return run.codec.names or [str(number) for number in range(run.spec.outputs)]
