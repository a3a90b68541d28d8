"""What needs no model: the commonest class, the mean, pairs of tokens, and a linear model of simple statistics.

A layer that does not beat them has learned nothing that is worth its training.
"""

from functools import cache

import numpy as np

from longlens.data.bigram import bigram_bits
from longlens.data.datasets import Split, read_all
from longlens.reports.chance import Trial
from longlens.tasks.base import Spec, Task
from longlens.training.step import all_targets, evaluated_part

FITTED = 5_000  # training samples of the linear model, at most
COUNTED = 256  # symbols of a vocabulary whose frequencies are counted; of a larger one, the commonest


def baselines(task: Task, test_samples: int | None) -> dict[str, Trial]:
    """Those that the task has, on the test samples of a run, the simplest first."""
    return _found(task, test_samples, task.fingerprint())


@cache
def _found(task: Task, test_samples: int | None, fingerprint: str) -> dict[str, Trial]:
    """Kept for a table and what is said of it; the same file may have other rows by then."""
    spec, test = task.spec, evaluated_part(task.split("test"), test_samples)
    if spec.head == "language":
        bits = bigram_bits(task.split("train"), test, spec.outputs)
        if bits is None:
            return {}
        return {"pairs of tokens": Trial(bits if spec.metric == "bits_per_byte" else 2**bits)}
    train = task.split("train")
    if len(train) > FITTED:
        train = evaluated_part(train, FITTED)
    if spec.head == "regress":
        return {} if spec.positions is not None else _numbers(train, test, spec)
    return _classes(train, test, spec)


def _classes(train: Split, test: Split, spec: Spec) -> dict[str, Trial]:
    known, truth = all_targets(train).astype(np.int64), all_targets(test)
    commonest = np.bincount(known).argmax()
    always = truth == commonest
    found = {"commonest class": Trial(float(always.mean()), always)}
    if len(set(known.tolist())) > 1:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        said = model.fit(_statistics(train, spec), known).predict(_statistics(test, spec))
        right = said == truth
        found["linear model of statistics"] = Trial(float(right.mean()), right)
    return found


def _numbers(train: Split, test: Split, spec: Spec) -> dict[str, Trial]:
    from sklearn.linear_model import RidgeCV
    from sklearn.metrics import r2_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known, truth = all_targets(train), all_targets(test)
    model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 7)))
    said = model.fit(_statistics(train, spec), known).predict(_statistics(test, spec))
    mean = np.full(len(truth), known.mean())
    values = {"mean": r2_score(truth, mean), "linear model of statistics": r2_score(truth, said)}
    return {name: Trial(float(value)) for name, value in values.items()}


def _statistics(split: Split, spec: Spec) -> np.ndarray:
    """(N, features) of each sequence; of a pair those of both, and how they differ."""
    rows = []
    for inputs, lengths, _ in read_all(split):
        if spec.head == "match":
            first, second = (_describe_all(inputs[:, k], lengths[:, k], spec) for k in (0, 1))
            rows.append(np.concatenate([first, second, np.abs(first - second)], axis=1))
        else:
            rows.append(_describe_all(inputs, lengths, spec))
    return np.concatenate(rows)


def _describe_all(inputs: np.ndarray, lengths: np.ndarray, spec: Spec) -> np.ndarray:
    return np.stack([_describe(x[:length], spec) for x, length in zip(inputs, lengths, strict=True)])


def _describe(x: np.ndarray, spec: Spec) -> np.ndarray:
    """Of tokens (L,): their frequencies. Of numbers (L, C): mean, deviation, least, largest, first, last, mean step,
    and the mean of the second half minus that of the first, of each channel. And the length."""
    length = len(x)
    if spec.inputs == "tokens":
        counts = np.bincount(np.minimum(x, COUNTED), minlength=min(spec.size, COUNTED) + 1) / max(length, 1)
        return np.append(counts, length)
    half = max(1, length // 2)
    steps = np.abs(np.diff(x, axis=0)).mean(axis=0) if length > 1 else np.zeros(x.shape[1])
    drift = x[half:].mean(axis=0) - x[:half].mean(axis=0) if length > 1 else np.zeros(x.shape[1])
    parts = [x.mean(axis=0), x.std(axis=0), x.min(axis=0), x.max(axis=0), x[0], x[-1], steps, drift]
    return np.append(np.concatenate(parts), length)
