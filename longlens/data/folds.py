"""Folds: each sample is tested on once, by a model that has not seen it."""

import warnings

import numpy as np

from longlens.data.datasets import SplitName
from longlens.errors import BadInput

BINS = 10  # of equal size, by which numbers are stratified


def cut_fold(
    labels: np.ndarray, *, classes: bool, folds: int, fold: int, valid_share: float, seed: int
) -> dict[SplitName, np.ndarray]:
    """Which samples belong to train, valid and test when ``fold`` of ``folds`` is the test set.

    Each class, or each tenth of the numbers, is spread evenly over the folds. ``valid_share`` of all samples is held
    out of the other folds alike; one sample at least of each class that they have stays for training. The labels (N,)
    are places of ``classes``, or numbers.
    """
    strata = labels if classes else _tenths(labels, folds)
    parts = round((1 - 1 / folds) / valid_share)  # into which the other folds are cut, one of them for validation
    if parts < 2:
        raise BadInput(f"valid_share must be below half of what {folds} folds leave for training, got {valid_share}")
    few = f"{len(labels)} sequences{f' of {len(set(labels))} classes' if classes else ''}"
    too_few = f"{few} are too few for {folds} folds and a valid_share of {valid_share}"
    if len(labels) - -(-len(labels) // folds) < max(folds - 1, parts):
        raise BadInput(too_few)
    rest, test = _deal(strata, folds, fold, seed)
    train, valid = (rest[chosen] for chosen in _deal(strata[rest], parts, 0, seed))
    known = np.isin(strata[valid], strata[train])  # of a class that has one sample, it is not there to validate
    if not known.any():
        raise BadInput(too_few)
    return {"train": np.concatenate([train, valid[~known]]), "valid": valid[known], "test": test}


def _tenths(labels: np.ndarray, folds: int) -> np.ndarray:
    """The bin of each number; fewer than ten if a bin had less than two samples for each fold."""
    bins = max(1, min(BINS, len(labels) // (2 * folds)))
    return np.searchsorted(np.quantile(labels, np.linspace(0, 1, bins + 1)[1:-1]), labels)


def _deal(strata: np.ndarray, parts: int, part: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All but one of the parts, and that one. Where no class has a sample for each part, they are dealt out plainly."""
    from sklearn.model_selection import KFold, StratifiedKFold  # half a second to import

    kind = StratifiedKFold if np.bincount(strata).max() >= parts else KFold
    with warnings.catch_warnings():  # of rare classes, of which screening warns
        warnings.simplefilter("ignore", UserWarning)
        return list(kind(parts, shuffle=True, random_state=seed % 2**32).split(strata, strata))[part]
