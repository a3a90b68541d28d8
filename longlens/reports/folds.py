"""Runs over folds: which belong together, and whether two layers, or a layer and a baseline, differ.

The folds of one repetition test on each sample once, but their training sets overlap, so that their results are not
independent. The corrected resampled t-test allows for it: C. Nadeau and Y. Bengio, "Inference for the generalization
error", Machine Learning 52 (2003), for several repetitions as in R. R. Bouckaert and E. Frank, "Evaluating the
replicability of significance tests for comparing learning algorithms", PAKDD 2004.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance

import numpy as np

from longlens.reports.chance import Trial, sign_of
from longlens.training.config import Config
from longlens.training.many import Outcome
from longlens.training.run import read_scores

OF_A_FOLD = ("task.fold", "task.seed", "training.seed")  # in which runs of one layer differ
Fold = tuple[int, ...]  # its number and the seeds of its repetition


def fold_count(outcomes: Sequence[Outcome]) -> int | None:
    """Into how many folds the data of all these runs is cut, if it is. Runs of one fold alone have one test set: they
    are seeds as any others."""
    tasks = [outcome.config.task for outcome in outcomes]
    counts = {getattr(task, "folds", None) for task in tasks}
    return counts.pop() if len(counts) == 1 and len({getattr(task, "fold", None) for task in tasks}) > 1 else None


def fold_of(config: Config) -> Fold:
    values = config.values()
    return tuple(values.get(name, 0) for name in OF_A_FOLD)


def trials(outcomes: Sequence[Outcome]) -> dict[Fold, Trial]:
    """The test results of one layer, by seed, and by fold if there are such."""
    found = {}
    for outcome in outcomes:
        if outcome.result is not None and outcome.result["test"] is not None:
            right = read_scores(outcome.folder) if outcome.result["metric"] == "accuracy" else None
            found[fold_of(outcome.config)] = Trial(outcome.result["test"], right)
    return found


def compare_trials(
    first: dict[Fold, Trial], second: dict[Fold, Trial], folds: int, metric: str, *, one_sided: bool
) -> float | None:
    """How likely such a difference, or a larger one, is by chance: over the folds that both have. None of fewer than
    two."""
    pairs = [(first[key], second[key]) for key in first if key in second]
    differences = [sign_of(metric) * (one.value - other.value) for one, other in pairs]
    if len(pairs) < 2:
        return None
    p = resampled_t_test(differences, folds, least=fmean(_sampling_variance(*pair) for pair in pairs))
    return p if one_sided else min(1.0, 2 * p)  # the first leads by its mean; 1 if not over the folds that both have


def resampled_t_test(differences: Sequence[float], folds: int, least: float = 0.0) -> float:
    """The one-sided p-value of a mean above 0. Of n differences over k folds, with the variance s²,

        t = mean / √(s² · (1/n + 1/(k - 1))),    n - 1 degrees of freedom,

    where 1/(k - 1) is the size of a test set to that of what is left for training.

    Args:
        differences: One for each fold, and for each repetition.
        folds: Folds of a repetition, k.
        least: Variance that a difference has at least; few samples can make all differences the same by chance.
    """
    from scipy.stats import t  # half a second to import

    spread = max(variance(differences), least) * (1 / len(differences) + 1 / (folds - 1))
    mean = fmean(differences)
    if spread == 0:
        return 0.5 if mean == 0 else float(mean < 0)
    return float(t.sf(mean / math.sqrt(spread), len(differences) - 1))


def _sampling_variance(one: Trial, other: Trial) -> float:
    """The sampling variance of the difference of two accuracies on the same samples."""
    if one.right is None or other.right is None or len(one.right) != len(other.right):
        return 0.0
    return float(np.var(one.right.astype(float) - other.right.astype(float)) / len(one.right))
