"""Whether a claim holds in our runs.

Each run of a claim has a score for each of the same test samples, and runs with the same seed go together. With d[s, i]
the claimed difference for seed s and sample i, the estimate is the mean of d, and its squared error the sum of the
spread over seeds, var_s(d̄[s, ·]) / S, and that over samples, var_i(d̄[·, i]) / N: a new seed and a new sample would both
change it. The degrees of freedom are Satterthwaite's.
"""

import math
from dataclasses import dataclass

import numpy as np

from longlens.paper.records import Record
from longlens.paper.study import Verdict
from longlens.training.run import higher_is_better

LEVEL = 0.05  # a claim is decided if chance alone would give such a difference in fewer cases


@dataclass(frozen=True)
class Finding:
    """What runs say about a claim: the claimed difference, in the units of the metric."""

    estimate: float
    error: float  # standard error
    p: float  # two-sided
    seeds: int
    samples: int

    @property
    def verdict(self) -> Verdict:
        if not self.p < LEVEL:
            return "not decided"
        return "holds" if self.estimate > 0 else "does not hold"


def weigh(terms: list[tuple[float, list[Record]]], score: str = "test", least: float = 0.0) -> Finding:
    """The claim that a weighted sum of metrics is above ``least`` (below, where a lower metric is better)."""
    metric = terms[0][1][0].result["metric"]  # pyright: ignore[reportOptionalSubscript]
    sign = 1.0 if higher_is_better(metric) else -1.0
    by_seed = np.sum([sign * weight * _metrics(records, score) for weight, records in terms], axis=0)
    scores = [_scores(records) for _, records in terms]
    if score == "test" and metric == "accuracy" and not any(found is None for found in scores):
        weighted = [
            weight * found.mean(axis=0) for (weight, _), found in zip(terms, scores, strict=True) if found is not None
        ]
        return weigh_seeds(by_seed, least, np.sum(weighted, axis=0))
    return weigh_seeds(by_seed, least)


def weigh_seeds(by_seed: np.ndarray, least: float = 0.0, by_sample: np.ndarray | None = None) -> Finding:
    """The claim that a difference is above ``least``: its values by seed and, if it has such, by test sample."""
    spread = [by_seed.var(ddof=1) / len(by_seed)] if len(by_seed) > 1 else [math.nan]
    freedom = [len(by_seed) - 1]
    samples = 0 if by_sample is None else len(by_sample)
    if by_sample is not None and samples > 1:
        spread.append(by_sample.var(ddof=1) / samples)
        freedom.append(samples - 1)
    error = math.sqrt(sum(spread))
    estimate = float(by_seed.mean()) - least
    return Finding(estimate, error, _chance(estimate, spread, freedom), len(by_seed), samples)


def _chance(estimate: float, spread: list[float], freedom: list[int]) -> float:
    """The probability of a difference as large as this, if there was none."""
    from scipy import stats  # half a second to import

    total = sum(spread)
    if not total > 0:
        return math.nan if math.isnan(total) or estimate == 0 else 0.0
    degrees = total**2 / sum(part**2 / count for part, count in zip(spread, freedom, strict=True) if count)
    return float(2 * stats.t.sf(abs(estimate) / math.sqrt(total), degrees))


def _metrics(records: list[Record], score: str) -> np.ndarray:
    return np.array([record.result[score] for record in records if record.result])


def _scores(records: list[Record]) -> np.ndarray | None:
    """(seeds, samples)."""
    found = [record.scores for record in records if record.scores is not None]
    return np.stack(found) if len(found) == len(records) and len({len(scores) for scores in found}) == 1 else None
