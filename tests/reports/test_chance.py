"""Verdicts weigh seeds and test samples; chance alone decides nothing."""

import numpy as np
import pytest
from scipy import stats

from longlens.reports.chance import Trial, weigh, weigh_samples, weigh_seeds


def trials(scores, with_scores=True):
    """A trial for each row of scores (seeds, samples)."""
    rows = np.atleast_2d(np.asarray(scores, dtype=float))
    return [Trial(float(row.mean()), row if with_scores else None) for row in rows]


def versus(ours, theirs, metric="accuracy", with_scores=True):
    return weigh([(1.0, trials(ours, with_scores)), (-1.0, trials(theirs, with_scores))], metric)


def test_by_hand():
    """Two seeds and four samples: differences (1 0 1 0) and (1 0 0 0) have the means 0.5 and 0.25."""
    found = versus([[1, 1, 1, 0], [1, 1, 0, 0]], [[0, 1, 0, 0], [0, 1, 0, 0]])
    assert found.estimate == pytest.approx(0.375)
    over_seeds, over_samples = np.var([0.5, 0.25], ddof=1) / 2, np.var([1, 0, 0.5, 0], ddof=1) / 4
    assert found.error == pytest.approx(np.sqrt(over_seeds + over_samples))
    freedom = (over_seeds + over_samples) ** 2 / (over_seeds**2 / 1 + over_samples**2 / 3)
    assert found.p == pytest.approx(2 * stats.t.sf(0.375 / found.error, freedom))
    assert found.reach == pytest.approx(stats.t.ppf(0.975, freedom) * found.error)
    assert (found.seeds, found.samples, found.verdict) == (2, 4, "not decided")


def test_without_samples_it_is_a_paired_test_over_seeds():
    ours, theirs = np.array([0.51, 0.55, 0.56]), np.array([0.40, 0.46, 0.44])
    found = versus(ours[:, None], theirs[:, None], with_scores=False)
    assert found.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert (found.verdict, found.samples) == ("holds", 0)


@pytest.mark.parametrize("metric", ["bits_per_byte", "perplexity"])
def test_a_lower_loss_is_better(metric):
    low, high = [[1.0], [1.1], [1.05]], [[2.0], [2.12], [2.04]]
    assert versus(low, high, metric).verdict == "holds"
    assert versus(high, low, metric).verdict == "does not hold"


def test_a_difference_of_differences():
    terms = [
        (weight, trials([[value], [value + 0.01]])) for weight, value in ((1, 0.9), (-1, 0.5), (-1, 0.7), (1, 0.6))
    ]
    assert weigh(terms, "accuracy").estimate == pytest.approx(0.3)


def test_a_claim_may_ask_for_a_least_value():
    found = weigh([(1.0, trials([[0.99], [0.97], [0.98]]))], "accuracy", least=0.95)
    assert found.estimate == pytest.approx(0.03)
    assert weigh([(1.0, trials([[0.80], [0.81], [0.79]]))], "accuracy", least=0.95).verdict == "does not hold"


def test_one_seed_decides_nothing():
    assert versus([[1, 1, 1, 1]], [[0, 0, 0, 0]]).verdict == "not decided"


def test_samples_alone_are_a_paired_test_over_samples():
    random = np.random.default_rng(0)
    ours, theirs = (random.random(50) < chance for chance in (0.8, 0.5))
    found = weigh_samples(ours.astype(float) - theirs)
    assert found.p == pytest.approx(stats.ttest_rel(ours.astype(float), theirs.astype(float)).pvalue)
    assert (found.seeds, found.samples) == (1, 50)
    assert np.isnan(weigh_samples(np.ones(1)).p)


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
        decided += versus(*groups).verdict != "not decided"
    assert decided / studies < 0.08


def test_small_p_values_of_three_seeds_are_too_small():
    """If seeds vary four times as much as samples do, p is below 0.01 in three to four of a hundred studies, not one.
    ``docs/reproduction.md`` says so."""
    random, samples, studies = np.random.default_rng(0), 50, 5000
    noise = random.normal(size=samples)
    by_sample = (noise - noise.mean()) / noise.std(ddof=1) * np.sqrt(samples)  # an error of 1 of its mean
    small = 0
    for _ in range(studies):
        by_seed = random.normal(0, 4 * np.sqrt(3), size=3)
        shared = random.normal()  # what these samples add to all seeds
        small += weigh_seeds(by_seed + shared, 0.0, by_sample).p < 0.01
    assert 0.025 < small / studies < 0.045


def test_a_true_difference_is_found():
    random = np.random.default_rng(1)
    groups = [(random.random((3, 2000)) < chance).astype(float) for chance in (0.45, 0.35)]
    assert versus(*groups).verdict == "holds"
