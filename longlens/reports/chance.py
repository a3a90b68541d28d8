"""Whether what runs show may be chance.

Each run has a score for each of the same test samples, and runs with the same seed go together. With d[s, i] the
difference for seed s and sample i, the estimate is the mean of d, and its squared error the sum of the spread over
seeds, var_s(d̄[s, ·]) / S, and that over samples, var_i(d̄[·, i]) / N: a new seed and a new sample would both change it.
The degrees of freedom are Satterthwaite's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from longlens.training.run import higher_is_better

LEVEL = 0.05  # chance alone would give such a difference in fewer cases
Verdict = Literal["holds", "does not hold", "not decided"]


class Trial(NamedTuple):
    """What a layer or a baseline reaches on a test set."""

    value: float
    right: np.ndarray | None = None  # (N,) whether each sample is, if that is the metric


@dataclass(frozen=True)
class Finding:
    """What runs say about a claimed difference, in the units of the metric."""

    estimate: float
    error: float  # standard error; nan if nothing is known of the spread
    freedom: float  # its degrees of freedom
    seeds: int
    samples: int

    @property
    def p(self) -> float:
        """The probability of a difference as large as this, to either side, if there was none; or nan."""
        from scipy import stats  # half a second to import

        if self.error == 0:
            return math.nan if self.estimate == 0 else 0.0
        return float(2 * stats.t.sf(abs(self.estimate) / self.error, self.freedom))

    @property
    def reach(self) -> float:
        """Half the width of the interval that contains the true difference in all but ``LEVEL`` of cases."""
        from scipy import stats

        return 0.0 if self.error == 0 else float(stats.t.ppf(1 - LEVEL / 2, self.freedom) * self.error)

    @property
    def verdict(self) -> Verdict:
        if not self.p < LEVEL:
            return "not decided"
        return "holds" if self.estimate > 0 else "does not hold"


def sign_of(metric: str) -> int:
    """1 if more of it is better, -1 if less is."""
    return 1 if higher_is_better(metric) else -1


def weigh(terms: Sequence[tuple[float, Sequence[Trial]]], metric: str, least: float = 0.0) -> Finding:
    """The claim that a sum of metrics, of weights and their trials by seed, is above ``least``."""
    sign = sign_of(metric)
    by_seed = np.sum([sign * weight * np.array([t.value for t in trials]) for weight, trials in terms], axis=0)
    rights = [[trial.right for trial in trials if trial.right is not None] for _, trials in terms]
    known = sum(map(len, rights)) == sum(len(trials) for _, trials in terms)
    if metric != "accuracy" or not known or any(len(set(map(len, found))) > 1 for found in rights):
        return weigh_seeds(by_seed, least)
    sets: dict[int, np.ndarray] = {}  # sets of other sizes have other samples
    for (weight, _), found in zip(terms, rights, strict=True):
        mean = weight * np.mean(found, axis=0)
        sets[len(mean)] = sets.get(len(mean), 0.0) + mean
    return weigh_seeds(by_seed, least, *sets.values())


def weigh_seeds(by_seed: np.ndarray, least: float, *by_sample: np.ndarray) -> Finding:
    """The claim that a difference is above ``least``: its values by seed and, for each test set, by sample."""
    samples = sum(map(len, by_sample))
    error, freedom = _error(by_seed, *(part for part in by_sample if len(part) > 1))
    return Finding(float(by_seed.mean()) - least, error, freedom, len(by_seed), samples)


def weigh_samples(by_sample: np.ndarray) -> Finding:
    """The claim that a difference of two runs, of one seed, is above 0: its values by test sample."""
    return Finding(float(by_sample.mean()), *_error(by_sample), 1, len(by_sample))


def _error(*parts: np.ndarray) -> tuple[float, float]:
    """The standard error of a mean that varies in several ways, and its degrees of freedom."""
    if min(map(len, parts)) < 2:
        return math.nan, math.nan
    spreads = [float(part.var(ddof=1)) / len(part) for part in parts]
    total = sum(spreads)
    weights = sum(spread**2 / (len(part) - 1) for spread, part in zip(spreads, parts, strict=True))
    return math.sqrt(total), total**2 / weights if weights > 0 else math.nan
