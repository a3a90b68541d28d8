"""Verdicts weigh seeds and test samples; chance alone decides nothing."""

import numpy as np
import pytest
from scipy import stats

from longlens.paper.records import Record
from longlens.paper.verdict import weigh


def records(scores, metric="accuracy", with_scores=True):
    """A record for each row of scores (seeds, samples)."""
    return [
        Record(
            None,
            {},
            {"metric": metric, "test": float(row.mean()), "valid": 0.5},
            [],
            row if with_scores else None,
            None,
        )
        for row in np.atleast_2d(np.asarray(scores, dtype=float))
    ]


def test_by_hand():
    """Two seeds and four samples: differences (1 0 1 0) and (1 0 0 0) have the means 0.5 and 0.25."""
    ours, theirs = records([[1, 1, 1, 0], [1, 1, 0, 0]]), records([[0, 1, 0, 0], [0, 1, 0, 0]])
    found = weigh([(1.0, ours), (-1.0, theirs)])
    assert found.estimate == pytest.approx(0.375)
    over_seeds, over_samples = np.var([0.5, 0.25], ddof=1) / 2, np.var([1, 0, 0.5, 0], ddof=1) / 4
    assert found.error == pytest.approx(np.sqrt(over_seeds + over_samples))
    freedom = (over_seeds + over_samples) ** 2 / (over_seeds**2 / 1 + over_samples**2 / 3)
    assert found.p == pytest.approx(2 * stats.t.sf(0.375 / found.error, freedom))
    assert (found.seeds, found.samples, found.verdict) == (2, 4, "not decided")


def test_without_samples_it_is_a_paired_test_over_seeds():
    ours, theirs = np.array([0.51, 0.55, 0.56]), np.array([0.40, 0.46, 0.44])
    terms = [(1.0, records(ours[:, None], with_scores=False)), (-1.0, records(theirs[:, None], with_scores=False))]
    found = weigh(terms)
    assert found.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert (found.verdict, found.samples) == ("holds", 0)


@pytest.mark.parametrize("metric", ["bits_per_byte", "perplexity"])
def test_a_lower_loss_is_better(metric):
    low, high = records([[1.0], [1.1], [1.05]], metric), records([[2.0], [2.12], [2.04]], metric)
    assert weigh([(1.0, low), (-1.0, high)]).verdict == "holds"
    assert weigh([(1.0, high), (-1.0, low)]).verdict == "does not hold"


def test_a_difference_of_differences():
    terms = [
        (weight, records([[value], [value + 0.01]])) for weight, value in ((1, 0.9), (-1, 0.5), (-1, 0.7), (1, 0.6))
    ]
    assert weigh(terms).estimate == pytest.approx(0.3)


def test_a_claim_may_ask_for_a_least_value():
    found = weigh([(1.0, records([[0.99], [0.97], [0.98]]))], least=0.95)
    assert found.estimate == pytest.approx(0.03)
    assert weigh([(1.0, records([[0.80], [0.81], [0.79]]))], least=0.95).verdict == "does not hold"


def test_one_seed_decides_nothing():
    assert weigh([(1.0, records([[1, 1, 1, 1]])), (-1.0, records([[0, 0, 0, 0]]))]).verdict == "not decided"


@pytest.mark.parametrize(("gain", "seed_noise"), [(0.0, 0.02), (0.0, 0.0), (0.0, 0.1)])
def test_chance_alone_seldom_decides(gain, seed_noise):
    """Two equal layers, whose accuracy varies by seed: at most about one of twenty studies says otherwise."""
    random, decided, studies = np.random.default_rng(0), 0, 400
    for _ in range(studies):
        difficulty = random.normal(size=300)
        groups = []
        for _ in range(2):
            skill = random.normal(0.3, 10 * seed_noise, size=(3, 1))
            groups.append((random.logistic(size=(3, 300)) < skill - difficulty).astype(float))
        decided += weigh([(1.0, records(groups[0])), (-1.0, records(groups[1]))]).verdict != "not decided"
    assert decided / studies < 0.08


def test_a_true_difference_is_found():
    random = np.random.default_rng(1)
    groups = [(random.random((3, 2000)) < chance).astype(float) for chance in (0.45, 0.35)]
    assert weigh([(1.0, records(groups[0])), (-1.0, records(groups[1]))]).verdict == "holds"
