"""Folds: each sample is tested on once, and validation never sees it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longlens.data.folds import cut_fold
from longlens.errors import BadInput

RANDOM = np.random.default_rng(0)
CLASSES = RANDOM.choice(3, size=200, p=[0.6, 0.3, 0.1])


def cut(labels, folds=5, *, classes=True, valid_share=0.1, seed=0):
    how = {"classes": classes, "folds": folds, "valid_share": valid_share, "seed": seed}
    return [cut_fold(labels, fold=fold, **how) for fold in range(folds)]


@settings(max_examples=30)
@given(st.integers(2, 7), st.integers(30, 90), st.integers(2, 12), st.integers(0, 2**63 - 1), st.booleans())
def test_each_sample_is_in_one_part_of_a_fold_and_tested_on_once(folds, count, kinds, seed, classes):
    random = np.random.default_rng(seed % 1000)
    labels = random.integers(0, kinds, count) if classes else random.normal(size=count)
    try:
        found = cut(labels, folds, classes=classes, seed=seed)
    except BadInput:
        assert classes
        assert kinds > count / 10, "too many classes to leave one sample of each"
        return
    for parts in found:
        assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(count))
        assert all(len(rows) for rows in parts.values())
        if classes:
            assert set(labels[parts["valid"]]) <= set(labels[parts["train"]])
    assert sorted(np.concatenate([parts["test"] for parts in found]).tolist()) == list(range(count))


def test_each_class_has_its_share_of_each_part():
    counts = np.bincount(CLASSES)
    for parts in cut(CLASSES):
        for split, share in (("train", 0.7), ("valid", 0.1), ("test", 0.2)):
            assert np.abs(np.bincount(CLASSES[parts[split]], minlength=3) - share * counts).max() <= 2, split


def test_numbers_are_spread_evenly():
    """The folds of 100 numbers have two of each tenth; by chance alone, some would have none."""
    numbers = RANDOM.normal(size=100)
    tenth = np.argsort(np.argsort(numbers)) // 10
    for parts in cut(numbers, classes=False):
        assert np.bincount(tenth[parts["test"]], minlength=10).tolist() == [2] * 10


def test_another_seed_cuts_other_folds_and_the_same_the_same():
    first, again, other = (cut(CLASSES, seed=seed) for seed in (0, 0, 1))
    for one, same, new in zip(first, again, other, strict=True):
        assert all(np.array_equal(one[split], same[split]) for split in one)
        assert not np.array_equal(one["test"], new["test"])


def test_a_class_of_one_sample_is_trained_on_or_tested_on():
    labels = np.append(CLASSES, 3)
    places = [next(split for split, rows in parts.items() if 200 in rows) for parts in cut(labels)]
    assert sorted(places) == ["test", *["train"] * 4]


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (4, {}, "4 sequences of 2 classes are too few for 5 folds and a valid_share of 0.1"),
        (8, {"folds": 3}, "8 sequences of 2 classes are too few for 3 folds and a valid_share of 0.1"),
        (40, {"folds": 2, "valid_share": 0.4}, "valid_share must be below half of what 2 folds leave"),
    ],
)
def test_too_few_samples_are_a_sentence(count, options, message):
    with pytest.raises(BadInput, match=message):
        cut(np.arange(count) % 2, **options)
