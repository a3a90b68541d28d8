"""Samples of the tasks for people to look at: pictures, curves or texts."""

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from longlens.data.datasets import Samples
from longlens.errors import LongLensError
from longlens.tasks.base import StoredTask, Task

PICTURES, TEXTS, CURVES = 8, 2, 3  # of a task
MOST_TEXT = 700  # characters
CURVE_POINTS = 200
CURVE_WIDTH, CURVE_HEIGHT = 300.0, 60.0


@dataclass
class Shown:
    """What there is to see of a task."""

    title: str
    summary: str
    note: str = ""  # why there is nothing
    pictures: list[tuple[str, str]] = field(default_factory=list)  # the picture as an address, and its caption
    curves: list[tuple[str, str]] = field(default_factory=list)  # points of an SVG line, and the caption
    texts: list[str] = field(default_factory=list)


def show_samples(tasks: Iterable[Task]) -> list[Shown]:
    """The first training samples of each task whose data is there."""
    return [_show(task) for task in {task.title: task for task in tasks}.values()]


def _show(task: Task) -> Shown:
    shown = Shown(task.title, task.summary)
    try:
        if not task.is_prepared():
            command = task.import_command().removesuffix(" --from DIR") if isinstance(task, StoredTask) else ""
            shown.note = f"Not on this machine: {command}"
            return shown
        split = task.split("train")
        samples = split.take(np.arange(min(PICTURES, len(split))))
        for row in range(len(samples.targets)):
            _add(task, samples, row, shown)
    except (LongLensError, OSError, ValueError, LookupError) as error:  # a user's own task, or a damaged set
        shown.note = f"Its samples cannot be shown: {error}"
    return shown


def _add(task: Task, samples: Samples, row: int, shown: Shown) -> None:
    picture = task.picture(samples, row)
    if picture is not None:
        shown.pictures.append((_address(picture), task.render(samples, row)))
    elif task.spec.inputs == "real" and row < CURVES:
        length = int(np.atleast_1d(samples.lengths[row])[0])
        values = np.asarray(samples.inputs[row], dtype=np.float64).reshape(len(samples.inputs[row]), -1)[:length, 0]
        shown.curves.append((_points(values), _cut(task.render(samples, row))))
    elif task.spec.inputs != "real" and row < TEXTS:
        shown.texts.append(_cut(task.render(samples, row)))


def _cut(text: str) -> str:
    """Both ends of a long text: the answer is at its end."""
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 100]} … {text[-100:]}"


def _address(picture: np.ndarray) -> str:
    """A gray picture with values from 0 to 1, as an address that holds all of it."""
    written = io.BytesIO()
    Image.fromarray((255 * np.clip(picture, 0, 1)).astype(np.uint8)).save(written, "PNG", optimize=True)
    return inlined(written.getvalue())


def inlined(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _points(values: np.ndarray) -> str:
    chosen = np.linspace(0, len(values) - 1, min(CURVE_POINTS, len(values))).round().astype(int)
    low, size = values.min(), np.ptp(values) or 1.0
    width = max(1, len(values) - 1)
    pairs = ((CURVE_WIDTH * i / width, CURVE_HEIGHT * (1 - (values[i] - low) / size)) for i in chosen)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
