"""Folds in tables: the test's formula, its error, and what is said."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from sklearn.model_selection import StratifiedKFold

from longlens import create_task
from longlens.reports import tables
from longlens.reports.folds import Trial, compare_trials, resampled_t_test
from longlens.training.config import load_recipe
from longlens.training.many import Outcome

LAYERS = ("las", "transformer", "s4d", "lstm")


def test_the_formula_by_hand():
    """Five differences with mean 2 and variance 2.5: t = 2 / √(2.5 · (1/5 + 1/4)) = 1.886, with four degrees."""
    differences = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert resampled_t_test(differences, 5) == pytest.approx(stats.t.sf(1.8856180831641267, 4), rel=1e-12)
    assert resampled_t_test([-d for d in differences], 5) == pytest.approx(1 - resampled_t_test(differences, 5))


def test_without_an_overlap_of_training_sets_it_is_the_usual_t_test():
    """The correction is 1/(k - 1), which vanishes."""
    differences = np.random.default_rng(0).normal(0.5, 1, 12)
    wanted = stats.ttest_1samp(differences, 0, alternative="greater").pvalue
    assert resampled_t_test(differences.tolist(), 10**12) == pytest.approx(wanted, rel=1e-9)
    assert resampled_t_test(differences.tolist(), 3) > wanted


def test_differences_that_are_the_same_by_chance_are_not_taken_for_certain():
    """Two folds of ten samples, in each of which one layer has one more right than the other."""
    right, other = np.arange(10) < 7, np.arange(10) < 6
    one, two = ({(fold, 0, 0): Trial(float(r.mean()), r) for fold in range(2)} for r in (right, other))
    assert resampled_t_test([0.1, 0.1], 2) == 0
    p = compare_trials(one, two, 2, "accuracy", one_sided=False)
    assert p is not None
    assert p > 0.3


def test_only_folds_that_both_have_are_compared():
    one = {(fold, 0, 0): Trial(0.9 + 0.01 * fold) for fold in range(5)}
    two = {(fold, 0, 0): Trial(0.5 - 0.01 * fold) for fold in range(1, 5)}
    two[9, 9, 9] = Trial(1.0)
    wanted = resampled_t_test([0.4 + 0.02 * fold for fold in range(1, 5)], 5)
    assert compare_trials(one, two, 5, "accuracy", one_sided=True) == pytest.approx(wanted)
    assert compare_trials(one, two, 5, "perplexity", one_sided=True) == pytest.approx(1 - wanted), "lower is better"
    assert compare_trials(one, {(0, 0, 0): Trial(0.1)}, 5, "accuracy", one_sided=True) is None
    assert compare_trials(one, two, 5, "accuracy", one_sided=False) == pytest.approx(2 * wanted)
    assert compare_trials(two, one, 5, "accuracy", one_sided=False) == 1.0, "two leads by a fold that one has not"


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("luck", [0.0, 0.15])
def test_layers_that_are_equal_are_seldom_told_apart(repeats, luck):
    """At the level of scores: 300 samples, some harder than others, and runs that have more or less luck in training, a
    fifth of which comes from data that they have in common, as the correction assumes. 400 studies, of which 5 % would
    be 20; a plain t-test over folds errs more often as soon as there is luck."""
    random, errors, plain = np.random.default_rng(1), 0, 0
    for _ in range(400):
        easy = random.normal(1, 1, 300)
        pair: tuple[dict, dict] = ({}, {})
        for found in pair:
            of_data = random.normal(0, luck / 2)
            for repeat in range(repeats):
                for fold, rows in enumerate(np.split(random.permutation(300), 5)):
                    level = easy[rows] + 5 * (of_data + random.normal(0, luck))
                    right = random.random(60) < 1 / (1 + np.exp(-level))
                    found[fold, repeat, repeat] = Trial(float(right.mean()), right)
        p = compare_trials(*pair, 5, "accuracy", one_sided=False)
        assert p is not None
        errors += p < tables.LEVEL
        plain += stats.ttest_rel(*([t.value for t in found.values()] for found in pair)).pvalue < tables.LEVEL
    assert errors / 400 <= 0.05
    assert luck == 0 or plain / 400 > 0.1


def is_right(x, y, train, test):
    """Whether a linear model of the training samples is right on each test sample."""
    fitted = np.linalg.lstsq(x[train], 2 * y[train] - 1, rcond=None)[0]
    return (x[test] @ fitted > 0) == y[test]


def test_learners_that_are_equal_are_seldom_told_apart():
    """Real ones, 200 times: linear models of two halves of the features, which say as much of the label."""
    random, errors = np.random.default_rng(2), 0
    for study in range(200):
        x = random.normal(size=(120, 8))
        y = (x.sum(axis=1) + random.normal(size=120) > 0).astype(int)
        pair: tuple[dict, dict] = ({}, {})
        for fold, (train, test) in enumerate(StratifiedKFold(5, shuffle=True, random_state=study).split(x, y)):
            for found, part in zip(pair, (x[:, :4], x[:, 4:]), strict=True):
                right = is_right(part, y, train, test)
                found[fold, 0, 0] = Trial(float(right.mean()), right)
        p = compare_trials(*pair, 5, "accuracy", one_sided=False)
        assert p is not None
        errors += p < tables.LEVEL
    assert errors / 200 <= 0.05


@pytest.fixture
def study(tmp_path, monkeypatch):
    """``study([las, transformer, …])``: outcomes of layers that are right on so many of the samples of five folds."""
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "home"))
    random = np.random.default_rng(0)
    rows = [{"input": random.normal(size=4).round(3).tolist(), "label": "ab"[n % 2]} for n in range(100)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(shares, *, seeds=(0,), failed=0):
        random = np.random.default_rng(3)
        found = []
        for layer, share in zip(LAYERS, shares, strict=False):
            for seed in seeds:
                for fold in range(5):
                    task = create_task("files", path=str(path), folds=5, fold=fold, seed=seed)
                    task.prepare()
                    config = load_recipe("smoke", "files").resolve(task, layer, {"training.seed": seed})
                    folder = tmp_path / f"{layer}-{seed}-{fold}"
                    folder.mkdir(exist_ok=True)
                    right = random.random(20) < share
                    np.save(folder / "scores.npy", right.astype(np.float32))
                    result = {"metric": "accuracy", "valid": share, "test": float(right.mean()), "test_samples": 20}
                    result |= {"test_last": 0.5, "steps": 100 + fold, "parameters": 7, "tokens_per_second": 1.0}
                    result |= {"peak_memory_bytes": 2**20, "seconds": 1.0}
                    result["ended_by"] = "validation" if fold == 0 else "steps"
                    found.append(Outcome(config, folder, None if len(found) < failed else result))
        return found

    return make


def test_the_table_has_a_line_for_each_layer_and_baseline_with_the_spread_over_folds(study):
    outcomes = study([0.95, 0.5])
    sheet = tables.results_table(outcomes)
    assert sheet.title == "files (rows.jsonl, 5 folds): accuracy"
    named = {row[0]: row[1] for row in sheet.rows}
    assert list(named) == ["las (5 folds)", "transformer (5 folds)", "commonest class", "linear model of statistics"]
    values = [100 * outcome.result["test"] for outcome in outcomes[:5]]
    assert named["las (5 folds)"] == f"{np.mean(values):.1f} % ± {np.std(values, ddof=1):.1f} %"
    assert named["commonest class"] == "50.0 % ± 0.0 %"
    assert "2 of 10 runs ended when validation no longer improved" in sheet.notes
    assert sheet.columns[0].name == "mixer"
    assert sheet.columns[1].name == "test", "neither the fold nor the seed is a column"
    names = [row[0] for row in tables.results_table(study([0.9], seeds=(0, 1), failed=3)).rows]
    assert names[0] == "las (7 of 5 × 2 folds)"


def test_runs_of_one_fold_are_seeds(study):
    outcomes = [outcome for outcome in study([0.95, 0.5], seeds=(0, 1)) if outcome.config.task.fold == 0]
    outcomes = [replace(o, config=replace(o.config, task=replace(o.config.task, seed=0))) for o in outcomes]
    assert [row[0] for row in tables.results_table(outcomes).rows[:2]] == ["las (2 seeds)", "transformer (2 seeds)"]
    assert all("fold" not in line for line in (*tables.verdict(outcomes), *tables.beats_guessing(outcomes)))


def test_what_is_said_of_folds(study):
    (line,) = tables.verdict(study([0.6, 0.97]))
    assert line.startswith("transformer is better than las, 9")
    assert ", over 5 folds (p = " in line
    assert "chance" not in line
    (line,) = tables.verdict(study([0.7, 0.72]))
    assert line.endswith("): it may be chance")
    (line, *_) = tables.beats_guessing(study([0.6, 0.97]))
    assert line.startswith("transformer, the best on validation, beats guessing: 9")
    assert "and the commonest class 50.0 % over 5 folds (p = " in line
    (line,) = tables.beats_guessing(study([0.5, 0.51]))
    assert line.startswith("nothing beats guessing: transformer, the best on validation, has ")


def test_layers_that_learned_nothing_seldom_beat_guessing_over_folds():
    """Random labels, 200 times: a real model that is fitted to them, beside the commonest class of the same folds."""
    random, beaten = np.random.default_rng(4), 0
    for study in range(200):
        x, y = random.normal(size=(100, 10)), random.integers(0, 2, 100)
        model, chance = {}, {}
        for fold, (train, test) in enumerate(StratifiedKFold(5, shuffle=True, random_state=study).split(x, y)):
            right = is_right(x, y, train, test)
            always = y[test] == np.bincount(y[train]).argmax()
            model[fold, 0, 0] = Trial(float(right.mean()), right)
            chance[fold, 0, 0] = Trial(float(always.mean()), always)
        p = compare_trials(model, chance, 5, "accuracy", one_sided=True)
        assert p is not None
        beaten += p < tables.LEVEL
    assert beaten / 200 <= 0.05
