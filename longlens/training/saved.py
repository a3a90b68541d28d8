"""The folder of a run, to read from and to use: ``load_run(folder).predict(sequences)``. No torch before it is needed.

The folder holds all of it, so that it can be moved or sent: the data of the run need not be there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longlens.errors import BadInput
from longlens.tasks.base import Spec, SplitName
from longlens.training.config import Config

if TYPE_CHECKING:
    from longlens.data.codec import Codec
    from longlens.data.values import Layout, Record
    from longlens.integrations.export import Target
    from longlens.models.model import Model
    from longlens.training.evaluate import Evaluation
    from longlens.training.explain import Explanation, Method
    from longlens.training.generate import Continuation


def load_run(folder: Path | str) -> "Run":
    """A run that is there, finished or not."""
    from longlens.training.run import read_config

    return Run(Path(folder), read_config(Path(folder)))


@dataclass(frozen=True)
class Run:
    """The folder of a run, to read from."""

    folder: Path
    config: Config

    @property
    def result(self) -> dict[str, Any] | None:
        """What ``result.json`` has; None before the run is finished."""
        from longlens.training.run import read_result

        return read_result(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: losses and evaluations by step."""
        from longlens.training.run import read_metrics

        return read_metrics(self.folder)

    @cached_property
    def _task(self) -> tuple[Spec, dict[str, Any]]:
        from longlens.training.run import read_task

        return read_task(self.folder, self.config.task)

    @property
    def spec(self) -> Spec:
        """What the model knows of its task."""
        return self._task[0]

    @property
    def description(self) -> dict[str, Any]:
        """What the codec is made of, as plain JSON."""
        return self._task[1]

    @cached_property
    def codec(self) -> "Codec":
        """What turns raw sequences into inputs, and outputs into names: vocabulary, scaling, classes."""
        from longlens.data.codec import Codec

        try:
            return Codec.make(*self._task)
        except BadInput as error:
            raise BadInput(f"{self.folder / 'task.json'}: {error}") from None

    def model(self, checkpoint: str | int = "best", *, device: str = "cpu") -> "Model":
        """The trained model of a checkpoint, ``"best"``, ``"last"`` or a step, ready to use."""
        from longlens.training.evaluate import load_model

        return load_model(self.folder, checkpoint, device)

    @contextmanager
    def opened(self, checkpoint: str | int = "best", device: str = "auto") -> "Iterator[Model]":
        """The model on a device, with as many threads as the machine has free cores, for long work."""
        from longlens.training.machine import choose_threads, use_threads

        with use_threads(choose_threads(None)[0]):
            yield self.model(checkpoint, device=device)

    def evaluate(
        self, split: SplitName = "test", checkpoint: str | int = "best", *, device: str = "auto"
    ) -> "Evaluation":
        """The metric of a checkpoint on a whole split."""
        from longlens.training.evaluate import evaluate_run

        return evaluate_run(self.folder, split, checkpoint, device)

    def evaluate_file(
        self, file: Path | str, checkpoint: str | int = "best", *, device: str = "auto", batch_size: int = 32
    ) -> "Evaluation":
        """The metric of a checkpoint on another labeled file, read and encoded as the data of the run was."""
        from longlens.training.evaluate import Evaluation, find_checkpoint
        from longlens.training.predict import score

        codec, spec = self.codec, self.spec
        if spec.head not in ("classify", "regress") or spec.positions is not None:
            raise BadInput(f"data must be sequences with a label each, and {self.config.task.name} has no such labels")
        rows = (
            (codec.encode_label(label, place), codec.encode(sequence, place, like_a_split=True))
            for place, sequence, label, *_ in self.records(file, with_labels=True)
        )
        step = int(find_checkpoint(self.folder, checkpoint).name)
        with self.opened(checkpoint, device) as model:
            found, count = score(model, rows, batch_size=batch_size, precision=self.config.training.precision)
        return Evaluation(self.config, Path(file).name, count, step, spec.metric, found.metric, found.loss)

    def records(self, file: Path | str, *, with_labels: bool = False) -> "Iterator[Record]":
        """The sequences of a file, one at a time, read as the data of the run was; of a .txt file, its lines."""
        from longlens.data.codec import line_records
        from longlens.data.readers import iter_records

        path = Path(file)
        if path.suffix != ".txt" or with_labels:
            return iter_records(path, self._layout(path.suffix), with_labels=with_labels)
        return line_records(_lines(path), str(path), self.codec)

    def _layout(self, suffix: str) -> "Layout":
        """That of the run's data, as far as it says something about files of this kind."""
        from longlens.data.values import Layout

        cells = "texts" if self.codec.is_text else "numbers"
        layout = Layout(cells=cells) if self.codec.layout is None else Layout.from_json(self.codec.layout)
        match suffix:
            case ".npy":
                return Layout()
            case ".jsonl":
                return Layout(label_column=layout.label_column, input_column=layout.input_column)
            case ".csv":
                return layout
        return replace(layout, delimiter=None)

    def predict(
        self,
        inputs: Iterable[Any],
        *,
        names: bool = False,
        probabilities: bool = False,
        encoded: bool = False,
        checkpoint: str | int = "best",
        batch_size: int = 32,
    ) -> np.ndarray:
        """What the model says about sequences of any lengths: class numbers, or numbers as they were in the labels;
        for a language model the token that follows each.

        Args:
            inputs: Sequences as they are in the files of the task: texts, or (L,) or (L, channels) numbers, which are
                scaled here; pixels from 0 to 255. For texts, (L,) token numbers will do as well. Pairs for pairs.
                Of a pandas frame, the rows of the columns that the run was trained on.
            names: Return names instead of numbers of classes or tokens.
            probabilities: Return the probabilities (N, classes), in the order of ``run.codec.names``.
            encoded: Take the inputs as they are, as those of a split, which are scaled already.
            checkpoint: Checkpoint to use: best, last, or a step.
            batch_size: Sequences at a time.
        """
        from longlens.training.predict import predict

        if hasattr(inputs, "columns"):
            inputs = self._rows_of(inputs)
        codec = self.codec.for_encoded() if encoded else self.codec
        how = {"names": names, "probabilities": probabilities, "batch_size": batch_size}
        return predict(self.model(checkpoint), inputs, codec=codec, precision=self.config.training.precision, **how)

    def _rows_of(self, frame: Any) -> Iterable[Any]:
        """The sequences of a pandas frame, read as those of a table: what is missing at the end is none."""
        from longlens.data.values import read_cells

        layout, names = self._layout(".csv"), [str(name) for name in frame.columns]
        if layout.group_column is not None:
            raise BadInput("inputs must have a sequence in each row, and a frame in long form has not: write it as CSV")
        one = layout.input_column
        if one in names and one not in layout.ignore and layout.columns in ((), (one,)):
            sequences = enumerate(frame.iloc[:, names.index(one)].tolist())
            if self.codec.is_text:
                return [sequence for _, sequence in sequences]
            return [read_cells(s.split(), f"inputs[{row}]") if isinstance(s, str) else s for row, s in sequences]
        place, others = {name: index for index, name in enumerate(names)}, {layout.label_column, *layout.ignore}
        wanted = layout.columns or [name for name in names if name not in others]
        if missing := [name for name in wanted if name not in place]:
            raise BadInput(f"inputs must have the columns that the run was trained on, and {missing[0]!r} is not there")
        values = frame.iloc[:, [place[name] for name in wanted]]
        rows = enumerate(np.where(values.isna(), "", values.astype(object)).tolist())
        return [read_cells(cells, f"inputs[{row}]", wanted) for row, cells in rows]

    def stream(
        self, prompt: Any, *, checkpoint: str | int = "best", device: str = "cpu", **options: Any
    ) -> "Continuation":
        """The text that a language model writes after a prompt, in pieces: ``for piece in run.stream("once upon ")``.

        Args:
            prompt: Text, or the numbers of its tokens.
            checkpoint: Checkpoint to use: best, last, or a step.
            device: Device to run on.
            options: Those of ``longlens.models.config.Writing``: tokens, temperature, top_k, top_p, seed, context.
        """
        from longlens.models.config import Writing
        from longlens.training.generate import Continuation

        writing = Writing.make(options, "generate")
        return Continuation(self.model(checkpoint, device=device), self.codec, prompt, writing)

    def generate(self, prompt: Any, **options: Any) -> str:
        """The same as one text, which does not have the prompt in it; the arguments are those of ``stream``."""
        return "".join(self.stream(prompt, **options))

    def export(self, folder: Path | str, to: "Target" = "hf", *, checkpoint: str | int = "best") -> Path:
        """Write the model to a new folder, for transformers (``"hf"``) or as a program that needs torch alone
        (``"torch-export"``): see ``longlens.integrations.export``."""
        # By name, as integrations know this room and not the other way round.
        return import_module("longlens.integrations.export").export_run(self, folder, to, checkpoint)

    def explain(
        self,
        sequence: Any,
        *,
        target: str | None = None,
        method: "Method" = "gradients",
        checkpoint: str | int = "best",
    ) -> "Explanation":
        """How much each value of a sequence speaks for a class, or raises the number that is predicted.

        Args:
            sequence: One sequence, as ``predict`` takes them.
            target: Name of the class to explain; by default the one that is predicted.
            method: Integrated gradients, or occlusion: the change when a value is left out.
            checkpoint: Checkpoint to use: best, last, or a step.
        """
        from longlens.training.explain import explain

        return explain(self.model(checkpoint), self.codec, sequence, target=target, method=method)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            yield from lines
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
