"""Your own sequences: a folder of CSV, JSONL or .npy files becomes a task.

The folder has ``train``, ``valid`` and ``test`` files, or fewer: what is missing is held out of the training set, where
a sample of each class stays. A single file may have any name, and is cut into three. Formats:

- ``train.csv``: a header with a column ``label``. The sequence is in the column ``input`` (text, or numbers with spaces
  between them), or in all other columns, a number each, where empty cells at the end make it shorter.
- ``train.jsonl``: an object a line, ``{"input": …, "label": …}``. The input is a text, a list of numbers, or a list of
  lists of numbers (channels).
- ``train.inputs.npy`` (N, L) or (N, L, C), ``train.labels.npy`` (N,), and ``train.lengths.npy`` (N,) if they differ.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.data.datasets import SPLITS, Metric, Samples, Sequences, SplitName, Stream, as_tokens
from longlens.data.readers import Records, companions, find_files, read_records
from longlens.data.store import Details, Writer, expand
from longlens.errors import BadInput
from longlens.options import Fraction, Seed, Size, shorten
from longlens.tasks.base import Head, Length, Spec, StoredTask, register

SPECIALS = ("<pad>", "<unk>")  # before the values of a vocabulary
UNK = 1


@register("files")
@dataclass(frozen=True, kw_only=True)
class Files(StoredTask):
    """Your own sequences, from a folder of CSV, JSONL or .npy files.

    Args:
        path: Folder with the files, or one file.
        inputs: Tokens (whole numbers or characters) or real numbers. By default, texts are tokens, and so are numbers
            if all are written without a fraction (1, not 1.0) and in one channel.
        labels: Classes, or numbers to be predicted. By default, they are to be predicted if one has a fraction.
        standardize: Shift and scale real inputs, channel by channel, and numbers to be predicted, to mean 0 and
            deviation 1 over the training set.
        max_length: Length to which longer sequences are cut; none are cut by default.
        valid_share: Fraction of the training set held out for validation, if there is no file of it.
        test_share: Fraction of the training set held out for the test, if there is no file of it.
        seed: Seed that decides which samples are held out.
    """

    path: str
    inputs: Literal["auto", "tokens", "real"] = "auto"
    labels: Literal["auto", "classes", "numbers"] = "auto"
    standardize: bool = True
    max_length: Length | None = None
    valid_share: Fraction = 0.1
    test_share: Fraction = 0.1
    seed: Seed = 0

    summary: ClassVar[str] = "your own sequences: a folder of CSV, JSONL or .npy files"
    origin: ClassVar[str] = "your own files"
    head: ClassVar[Head] = "classify"  # or regress
    metric: ClassVar[Metric] = "accuracy"  # or r2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "path", str(expand(self.path, "path")))
        valid, test = self.valid_share, self.test_share
        if valid + test >= 1:
            raise BadInput(f"valid_share and test_share must be below 1 together, got {valid} and {test}")

    @property
    def spec(self) -> Spec:
        prepared = self.prepared
        inputs: Any = prepared.detail("inputs", Literal["tokens", "real"])
        size, longest = prepared.detail("size", Size), prepared.detail("max_length", Size)
        length = min(longest, self.max_length or longest)
        if "classes" in prepared.details:
            return Spec(inputs, size, length, "classify", len(prepared.detail("classes", list[str])), "accuracy")
        return Spec(inputs, size, length, "regress", 1, "r2")

    @property
    def title(self) -> str:
        return f"files ({Path(self.path).resolve().name})"

    @property
    def slug(self) -> str:
        return "files-" + re.sub(r"[^\w.-]+", "-", Path(self.path).resolve().name)

    def vocabulary(self) -> list[str] | None:
        return self.prepared.detail("symbols", list[str]) if "symbols" in self.prepared.details else None

    def load(self, name: SplitName, epoch: int) -> Sequences:
        transform = np.asarray if self.vocabulary() is None else as_tokens
        return self.sequences(name, transform=transform, max_length=self.max_length)

    def identity(self) -> dict[str, Any]:
        files = [part for file in find_files(Path(self.path)).values() for part in companions(file) if part.exists()]
        stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        options = self.values() | {"path": str(Path(self.path).resolve())}
        del options["max_length"]  # sequences are stored whole
        return {"version": 1, "files": stamps, **options}

    def check_source(self, source: Path) -> None:
        raise BadInput("the task 'files' reads its own --path: leave out --from")

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        found = find_files(Path(self.path))
        tables = {split: read_records(found[split]) for split in SPLITS if split in found}
        for split, table in tables.items():
            if table.kind != tables["train"].kind:
                kinds = f"{found[split]} has {table.kind} as inputs, but {found['train'].name} {tables['train'].kind}"
                raise BadInput(f"{kinds}; they must be of one kind")
        label_details, tables = self._encode_labels(tables)
        tables = self._hold_out(tables, len(label_details.get("classes", [])))
        input_details, inputs = self._encode_inputs(tables)
        targets = {split: table.labels for split, table in tables.items()}
        if "classes" not in label_details:
            label_details["label_mean"], label_details["label_deviation"], targets = self._scale(targets)
        for split in SPLITS:
            writer.append(split, values=inputs[split], lengths=tables[split].lengths, labels=targets[split])
        longest = max(int(table.lengths.max()) for table in tables.values())
        sizes = {split: len(tables[split].lengths) for split in SPLITS}
        return {"sizes": sizes, "max_length": longest, "source": self.path, **input_details, **label_details}

    def _encode_labels(self, tables: dict[str, Records]) -> tuple[Details, dict[str, Records]]:
        """Labels as float64, or as int64 places in the list of classes."""
        labels = [label for table in tables.values() for label in table.labels]
        texts = [label for label in labels if isinstance(label, str)]
        fractions = [label for label in labels if isinstance(label, float) and not label.is_integer()]
        if texts and self.labels == "numbers":
            given = f"the label {shorten(texts[0])!r} in {self.path}"
            raise BadInput(f"{given} is not a number; labels='classes' allows texts")
        if texts and fractions and self.labels == "auto":
            mixed = f"numbers such as {fractions[0]} and texts such as {shorten(texts[0])!r}"
            raise BadInput(f"the labels in {self.path} are {mixed}; correct them, or use labels='classes' for names")
        if len(set(labels)) < 2:
            raise BadInput(f"all labels in {self.path} are {shorten(labels[0])}; there must be two different ones")
        if self.labels == "numbers" or (self.labels == "auto" and fractions):
            return {}, {split: t._replace(labels=t.labels.astype(np.float64)) for split, t in tables.items()}
        classes = sorted(set(tables["train"].labels), key=lambda label: (isinstance(label, str), label))
        place = {label: index for index, label in enumerate(classes)}  # 1 and 1.0 are the same key
        for label in labels:
            if label not in place:
                missing = f"the training set of {self.path} has no label {shorten(label)}, but another split has"
                raise BadInput(f"{missing}; add samples of it, or use labels='numbers' if they are to be predicted")
        names = [str(int(c)) if isinstance(c, float) and c.is_integer() else str(c) for c in classes]
        encoded = {split: np.array([place[label] for label in table.labels]) for split, table in tables.items()}
        return {"classes": names}, {split: tables[split]._replace(labels=encoded[split]) for split in tables}

    def _hold_out(self, tables: dict[str, Records], classes: int) -> dict[str, Records]:
        """Train, valid and test; what has no file is held out of the training set."""
        train = tables["train"]
        count = len(train.lengths)
        order = Stream("files", self.seed).permutation(count)
        if classes:  # one sample of each goes to the end, to stay in the training set
            first = np.unique(train.labels[order], return_index=True)[1]
            order = np.concatenate([np.delete(order, first), order[first]])
        parts, held = {}, 0
        for split, share in (("valid", self.valid_share), ("test", self.test_share)):
            if split in tables:
                parts[split] = tables[split]
                continue
            size = round(count * share)
            if size < 1 or held + size > count - max(classes, 1):
                few = f"too few sequences, {count}{f' of {classes} classes' if classes else ''}"
                held_out = f"to hold out a {split} set of {share:.0%}; change {split}_share, or add a {split} file"
                raise BadInput(f"{self.path} has {few}, {held_out}")
            parts[split] = train.take(order[held : held + size])
            held += size
        return {"train": train.take(order[held:]), **parts}

    def _encode_inputs(self, tables: dict[str, Records]) -> tuple[Details, dict[str, np.ndarray]]:
        """Inputs as int32 tokens (total,) or float32 numbers (total, C)."""
        text, values = tables["train"].kind == "texts", {split: table.values for split, table in tables.items()}
        one_channel = values["train"].ndim == 1
        if self.inputs == "real" and text:
            raise BadInput(f"the inputs in {self.path} are texts, not real numbers; use inputs='tokens'")
        if self.inputs == "tokens" and not (one_channel and all((v == np.floor(v)).all() for v in values.values())):
            raise BadInput(f"the inputs in {self.path} are not all whole numbers in one channel; use inputs='real'")
        written_whole = all(np.issubdtype(v.dtype, np.integer) for v in values.values())
        if self.inputs == "tokens" or (self.inputs == "auto" and one_channel and written_whole):
            return _tokens(values, text)
        if one_channel:
            values = {split: v[:, None] for split, v in values.items()}
        mean, deviation, scaled = self._scale(values)
        return {"inputs": "real", "size": values["train"].shape[1], "mean": mean, "deviation": deviation}, scaled

    def _scale(self, parts: dict[str, np.ndarray]) -> tuple[Any, Any, dict[str, np.ndarray]]:
        """The mean and the deviation that the parts are freed of, if at all, and the parts in float32."""
        train = parts["train"]
        mean, deviation = np.zeros(train.shape[1:]), np.ones(train.shape[1:])
        if self.standardize:
            # The deviation of a constant is not always 0: rounding may leave 1e-17, which must not be divided by.
            mean, deviation = train.mean(axis=0), np.where(train.min(axis=0) < train.max(axis=0), train.std(axis=0), 1)
        scaled = {split: ((part - mean) / deviation).astype(np.float32) for split, part in parts.items()}
        return mean.tolist(), deviation.tolist(), scaled

    def render(self, samples: Samples, row: int) -> str:
        prepared = self.prepared
        inputs = samples.inputs[row, : samples.lengths[row]]
        symbols = self.vocabulary()
        if symbols is None:
            with np.printoptions(precision=3, suppress=True, threshold=40, linewidth=110):
                shown = str(inputs.squeeze(-1) if inputs.shape[1] == 1 else inputs)
        else:
            shown = ("" if prepared.detail("text", bool) else " ").join(symbols[i] for i in inputs)
        target = samples.targets[row]
        if "classes" in prepared.details:
            target = prepared.detail("classes", list[str])[target]
        return f"{shown}\n= {target}"


def _tokens(values: dict[str, np.ndarray], text: bool) -> tuple[Details, dict[str, np.ndarray]]:
    """Places in the vocabulary, which has the values of the training set."""
    known = np.unique(values["train"])
    symbols = [*SPECIALS, *(chr(v) if text else str(int(v)) for v in known)]
    encoded = {}
    for split, those in values.items():
        place = np.minimum(np.searchsorted(known, those), len(known) - 1)
        encoded[split] = np.where(known[place] == those, place + len(SPECIALS), UNK).astype(np.int32)
    details: Details = {"inputs": "tokens", "size": len(symbols), "symbols": symbols, "text": text}
    unknown = max(float((tokens == UNK).mean()) for tokens in encoded.values())
    if unknown > 0.01 and not text:
        details["warning"] = f"{unknown:.0%} of a split is not in training; inputs='real' is for quantities"
    return details, encoded
