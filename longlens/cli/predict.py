"""``longlens predict`` and ``explain``: a trained model at work on new sequences."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longlens.cli import sentence
from longlens.errors import BadInput
from longlens.options import Device, Size

if TYPE_CHECKING:
    from longlens.data.values import Record
    from longlens.training.saved import Run

STDIN = Path("-")


def predict(
    run: Path,
    input: Path,
    *,
    out: Path | None = None,
    checkpoint: str = "best",
    batch_size: Size = 32,
    device: Device = "auto",
) -> list[Any]:
    """Predict the labels of new sequences with the model of a run.

    The folder of the run is all that is needed: it may have been moved, and its data need not be there.

    Args:
        run: Folder of the run.
        input: File of sequences in one of the formats of training, where labels may be missing; a .txt file with a
            sequence in each line; or - for lines of stdin.
        out: File to write all predictions to: .jsonl, .csv or .npy; without it, the first ones are shown.
        checkpoint: Checkpoint to use: best, last, or a step.
        batch_size: Sequences at a time.
        device: Device to run on; auto is a GPU if there is one.
    """
    from longlens.progress import progress
    from longlens.reports.predictions import Summary, check_predictions, open_predictions
    from longlens.training.predict import answers
    from longlens.training.saved import load_run

    check_predictions(out)
    if out is not None and out.resolve() == input.resolve():
        raise BadInput(f"out must be another file than the input, got {out} for both")
    found = load_run(run)
    codec = found.codec
    if codec.head == "match":
        raise BadInput("predict takes single sequences, and this run pairs: use load_run(folder).predict in Python")
    rows = ((record, codec.encode(record.sequence, record.place)) for record in _records(found, input))
    summary = Summary(codec)
    with ExitStack() as stack:
        model = stack.enter_context(found.opened(checkpoint, device))
        done = stack.enter_context(progress("predicting", _count(input), "rows"))
        write = None if out is None else stack.enter_context(open_predictions(out, codec))
        how = {"batch_size": batch_size, "precision": found.config.training.precision}
        for row, (record, outputs) in enumerate(answers(model, rows, **how), start=1):
            prediction = _prediction(row, record, outputs, codec)
            summary.add(prediction)
            if write is not None:
                write(prediction)
            if row % batch_size == 0:
                done(row)
    if out is None:
        return [summary.table(), sentence(summary.line())]
    columns = f" (columns: {', '.join(codec.names)})" if out.suffix == ".npy" and codec.names else ""
    return [sentence(summary.line()), f"written to {out}{columns}"]


def _prediction(row: int, record: "Record", outputs: Any, codec: Any) -> Any:
    from longlens.reports.predictions import Prediction
    from longlens.training.predict import softmax

    if codec.head == "regress":
        return Prediction(row, record.group, None, codec.decode(outputs))
    return Prediction(row, record.group, codec.name(int(outputs.argmax())), softmax(outputs))


def _records(run: "Run", file: Path) -> "Iterator[Record]":
    from longlens.data.codec import line_records

    if file != STDIN:
        return run.records(file)
    if sys.stdin.isatty():
        print("longlens: a sequence a line, and then Ctrl-D", file=sys.stderr)
    return line_records(sys.stdin, "stdin", run.codec)


def _count(file: Path) -> int:
    """About how many sequences a file has, for a bar; 0 if that is not easily known."""
    from longlens.files import open_file

    if file == STDIN or file.suffix not in (".csv", ".tsv", ".jsonl", ".txt"):
        return 0
    try:
        with open_file(file) as opened:
            return sum(block.count(b"\n") for block in iter(lambda: opened.read(1 << 20), b""))
    except OSError:  # which is told when it is read
        return 0


def explain(
    run: Path,
    input: Path,
    *,
    row: Size = 1,
    out: Path | None = None,
    target: str | None = None,
    method: Literal["gradients", "occlusion"] = "gradients",
    checkpoint: str = "best",
) -> list[Any]:
    """Draw which part of a sequence decided what the model of a run says about it.

    Args:
        run: Folder of the run.
        input: File of sequences, as of predict.
        row: Number of the sequence in the file, from 1 on.
        out: Picture to write: .png, .pdf or .svg; by default none is drawn.
        target: Name of the class to explain; by default the one that is predicted.
        method: Integrated gradients, or occlusion, which leaves out a short window at a time.
        checkpoint: Checkpoint to use: best, last, or a step.
    """
    from importlib.util import find_spec

    from longlens.training.saved import load_run

    if find_spec("captum") is None:  # before torch is imported
        raise BadInput("captum is not installed: pip install 'longlens[explain]'")
    if out is not None:
        from longlens.reports.pictures import check_picture

        check_picture(out)
    found = load_run(run)
    record = next(islice(_records(found, input), row - 1, None), None)
    if record is None:
        raise BadInput(f"row must be the number of a sequence in {input}, got {row:,}: it has fewer")
    from longlens.reports.explanation import draw_explanation, say_explanation
    from longlens.training.explain import explain as find_attributions

    with found.opened(checkpoint, "cpu") as model:
        explained = find_attributions(
            model, found.codec, record.sequence, place=record.place, target=target, method=method
        )
    title = f"{found.config.mixer.name}, {record.place}"
    lines = [sentence(line) for line in say_explanation(explained)]
    return [*lines, draw_explanation(explained, title, out)] if out is not None else lines
