"""What looks wrong in sequences before a model is trained on them: a sentence each, with the flag that changes it."""

import re
import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from longlens.data.datasets import offsets_of
from longlens.data.readers import Records
from longlens.options import shorten

FEW = 5  # a class with fewer samples is hardly learned, and hardly tested
RUN, DIFFER = 10, 20  # rows from which on a column of running or different numbers is said to be an id
ROWS = 30  # from which on a column is said to tell the label
MOST_ROWS = 2_000  # that are looked at for it
MOST_CLASSES = 100
SURE = 0.99  # share of the samples whose label a column tells
USUAL = 0.95  # share of the commonest class, beyond which telling the others means little
SYMBOLS = 256  # more different whole numbers than bytes have are rather quantities
NAMED = 3  # columns or classes that a sentence names
ID_NAMES = re.compile(r"(.*[_\s.-])?(id|ids|uuid|guid|index|idx|nr|row|unnamed: \d+|#)", re.IGNORECASE)


def screen(records: Records, classes: Sequence[str], *, numeric_classes: bool, symbols: int) -> list[str]:
    """The warnings about a training set, whose labels are places in ``classes``, or numbers if there are none.

    ``numeric_classes``: the names of the classes are numbers. ``symbols``: as so many symbols whole numbers were read,
    unasked.
    """
    columns = Columns(records)
    ids = columns.ids()
    leaks = columns.leaks(len(classes), leave=ids) if classes else []
    found = []
    if ids:
        look = f"{columns.named(ids)} look{_s(ids)} like a number of the row"
        found.append(f"{look}, not like a measurement; {columns.ignore(ids)}")
    if leaks:
        tell = f"{columns.named(leaks)} alone tell{_s(leaks)} the label, and no other does"
        found.append(f"{tell}; if that is not known of new sequences, {columns.ignore(leaks)}")
    if constant := columns.constant():
        found.append(f"{columns.named(constant)} never change{_s(constant)}; {columns.ignore(constant)}")
    if symbols > SYMBOLS:
        read = f"the inputs are read as {symbols:,} symbols, as all are whole numbers"
        found.append(f"{read}; if they are quantities, use --inputs real")
    if few := _few(records.labels, classes):
        flag = "use --labels numbers if they are quantities, or " if numeric_classes and len(classes) > 2 else ""
        found.append(f"{few}; {flag}add samples, or leave out the rows")
    return found


def equal_labels(splits: Mapping[str, Records]) -> list[str]:
    """The warnings about numbers to be predicted that are all the same where a model is validated or tested."""
    found = []
    for split in ("valid", "test"):
        labels = splits[split].labels
        if labels.min() == labels.max():
            equal = f"the labels of the {split} set are all {labels[0]:g}, so that its R² is not a number"
            found.append(f"{equal}; hold out more sequences, or others by another task.seed")
    return found


class Columns:
    """The values of a set by columns: those of a table with a sequence in each row, otherwise the channels."""

    def __init__(self, records: Records):
        layout = records.layout
        whole = layout.group_column is None and layout.columns == (layout.input_column,)  # sequences in single cells
        self.names = () if whole else layout.columns
        self.in_a_row = bool(self.names) and layout.group_column is None
        self.word = "column" if self.in_a_row else "channel"
        self.records = records
        self.starts = offsets_of(records.lengths)

    def named(self, places: Sequence[int]) -> str:
        """Some columns in words; channels without names are counted from 1."""
        shown = [repr(shorten(self.names[place])) if self.names else str(place + 1) for place in places[:NAMED]]
        more = f" … ({len(places):,} in all)" if len(places) > NAMED else ""
        return f"{self.word}{'' if len(places) == 1 else 's'} {', '.join(shown)}{more}"

    def ignore(self, places: Sequence[int]) -> str:
        """What to do without them."""
        if not self.names:
            return "leave it out of the file" if len(places) == 1 else "leave them out of the file"
        more = " …" if len(places) > NAMED else ""
        return f"use --ignore {shlex.join(self.names[place] for place in places[:NAMED])}{more}"

    def _column(self, place: int) -> np.ndarray:
        """(N,) the values of all rows of a table in one of its columns, which all have."""
        if self.in_a_row:
            return self.records.values[self.starts[:-1] + place]
        return self.records.values.reshape(len(self.records.values), -1)[:, place]

    def ids(self) -> list[int]:
        """Columns of whole numbers that are called so, that run, or that alone are different in all rows."""
        width = min(int(self.records.lengths.min()), len(self.names)) if self.in_a_row else len(self.names)
        if width < 2:  # what is left must be a sequence
            return []
        called, run, differ = [], [], []
        for place in range(width):
            values = self._column(place)
            if (values[:100] != np.floor(values[:100])).any() or (values != np.floor(values)).any():
                continue
            steps = np.diff(values)
            if ID_NAMES.fullmatch(self.names[place]):
                called.append(place)
            elif len(values) >= RUN and ((steps > 0).all() or (steps < 0).all()):
                run.append(place)
            elif len(values) >= DIFFER and len(np.unique(values)) == len(values):
                differ.append(place)
        run, differ = run if 2 * len(run) <= width else [], differ if len(differ) == 1 else []
        return sorted([*called, *run, *differ])

    def constant(self) -> list[int]:
        """Channels with one value; in a table with a sequence in each row, there is one channel."""
        values = self.records.values.reshape(len(self.records.values), -1)
        if self.in_a_row or self.records.kind == "texts" or values.shape[1] < 2:
            return []
        return np.flatnonzero(values.min(axis=0) == values.max(axis=0)).tolist()

    def leaks(self, classes: int, *, leave: Sequence[int]) -> list[int]:
        """The column that tells the class of nearly all samples by its values or by one threshold, if no other does:
        where several do, they are rather what is to be learned."""
        labels = self.records.labels.astype(np.int64)
        if len(labels) < ROWS or self.records.kind == "texts" or classes > MOST_CLASSES:
            return []
        if np.bincount(labels).max() > USUAL * len(labels):
            return []
        some = np.linspace(0, len(labels) - 1, min(len(labels), MOST_ROWS)).astype(np.int64)
        columns = self._per_sequence(some)
        told = [place for place, values in enumerate(columns) if _tells(values, labels[some], classes)]
        told = [place for place in told if place not in leave]
        return told if len(told) == 1 < len(columns) else []

    def _per_sequence(self, rows: np.ndarray) -> list[np.ndarray]:
        """(rows,) for each column. A channel that is not constant in each sequence has zeros."""
        if self.in_a_row:
            return [self._column(place)[rows] for place in range(int(self.records.lengths.min()))]
        if self.records.values.ndim < 2:
            return []
        starts, found = self.starts[:-1], []
        for values in self.records.values.T:
            same = np.minimum.reduceat(values, starts) == np.maximum.reduceat(values, starts)
            found.append(values[starts][rows] if same.all() else np.zeros(len(rows)))
        return found


def _tells(values: np.ndarray, labels: np.ndarray, classes: int) -> bool:
    """Whether the commonest class of each value, if they are few, or on each side of the best threshold, is right."""
    order = np.argsort(values, kind="stable")
    values, labels = values[order], labels[order]
    ends = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)  # the last place of each value
    if len(ends) < 2:
        return False
    below = np.zeros((len(ends), classes))  # how many of each class have this value or a smaller one
    np.add.at(below, (np.searchsorted(ends, np.arange(len(labels))), labels), 1)
    of_value = below.max(axis=1).sum() if len(ends) <= 2 * classes else 0
    below = below.cumsum(axis=0)
    by_threshold = (below.max(axis=1) + (below[-1] - below).max(axis=1))[:-1].max()
    return max(of_value, by_threshold) >= SURE * len(labels)


def _few(labels: np.ndarray, classes: Sequence[str]) -> str:
    """The classes with few samples, in words."""
    if not classes:
        return ""
    counts = np.bincount(labels.astype(np.int64), minlength=len(classes))
    rare = [f"{shorten(classes[place])!r} has {counts[place]}" for place in np.flatnonzero(counts < FEW).tolist()]
    if len(rare) == 1:
        return f"class {rare[0]} sample{'s' if counts.min() > 1 else ''} only"
    more = f" … ({len(rare):,} classes)" if len(rare) > NAMED else ""
    return f"some classes have fewer than {FEW} samples: {', '.join(rare[:NAMED])}{more}" if rare else ""


def _s(places: Sequence[int]) -> str:
    """The ending of a verb."""
    return "s" if len(places) == 1 else ""
