"""Other metrics than the task's own: by hand, from runs, and in tables."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from longlens import compare, create_task, load_run
from longlens.errors import BadInput
from longlens.reports import metrics
from longlens.reports.metrics import check_metrics, class_table, draw_confusion, other_metrics, split_answers

SMALL = {"recipe": "smoke", "steps": 6, "evaluate_every": 3, "depth": 1, "width": 8, "threads": 1}


@pytest.fixture
def answered(monkeypatch):
    """What a run would say, and what is so."""

    def given(outputs, targets, deviation=1.0):
        found = np.asarray(outputs, dtype=float), np.asarray(targets)
        run = SimpleNamespace(config=create_config(), codec=SimpleNamespace(label_deviation=deviation))
        monkeypatch.setattr(metrics, "split_answers", lambda *_: found)
        monkeypatch.setattr(metrics, "load_run", lambda folder: run)
        return lambda *names: other_metrics("anywhere", names)

    return given


def create_config():
    from longlens.training.config import load_recipe

    return load_recipe("smoke", "listops").resolve("listops", "las")


def test_by_hand(answered):
    """Three of four of the first class and one of two of the second are right."""
    outputs = [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6], [0.3, 0.7], [0.6, 0.4]]
    found = answered(outputs, [0, 0, 0, 0, 1, 1])("balanced-accuracy", "macro-f1", "auc")
    assert found["balanced-accuracy"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert found["macro-f1"] == pytest.approx((2 * 3 / (2 * 3 + 1 + 1) + 2 * 1 / (2 * 1 + 1 + 1)) / 2)
    pairs = [(0.7, x) for x in (0.1, 0.2, 0.3, 0.6)] + [(0.4, x) for x in (0.1, 0.2, 0.3, 0.6)]
    assert found["auc"] == pytest.approx(np.mean([a > b for a, b in pairs]))


def test_a_class_that_is_not_there_does_not_count(answered):
    found = answered([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1]], [0, 1])("auc", "balanced-accuracy")
    assert found == {"auc": 1.0, "balanced-accuracy": 1.0}


def test_numbers(answered):
    assert answered([1.0, 2.0, 4.0], [1.5, 2.0, 3.0])("mae")["mae"] == pytest.approx(0.5)


def test_errors_are_in_the_units_of_the_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    rows = [{"input": random.normal(size=4).tolist(), "label": 1e5 + 2e4 * random.normal()} for _ in range(40)]
    Path("prices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (outcome,) = compare("files", ["las"], **SMALL, **{"task.path": "prices.jsonl"}).outcomes
    run, test = load_run(outcome.folder), outcome.config.task.split("test")
    samples = test.take(np.arange(len(test)))
    labels = samples.targets * run.codec.label_deviation + run.codec.label_mean
    wanted = np.abs(run.predict(list(samples.inputs), encoded=True) - labels).mean()
    assert other_metrics(outcome.folder, ["mae"])["mae"] == pytest.approx(wanted, rel=1e-4)
    assert wanted > 1000


def test_what_a_task_has():
    check_metrics(create_task("listops"), ["auc", "macro-f1"])
    check_metrics(create_task("atomic-cumsum"), ["mae"])
    with pytest.raises(BadInput, match=r"metrics must be among those of atomic-cumsum \(mae\), got auc"):
        check_metrics(create_task("atomic-cumsum"), ["auc"])
    with pytest.raises(BadInput, match=r"those of text8 \(none but its own\), got mae"):
        check_metrics(create_task("text8"), ["mae"])


@pytest.fixture
def compared(tmp_path):
    path = tmp_path / "rows.jsonl"
    random = np.random.default_rng(0)
    rows = [{"input": random.normal(k, 1, 9).tolist(), "label": ("low", "high")[k]} for k in [0, 1] * 60]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return compare(
        "files", ["las", "lstm"], path=str(path), runs=tmp_path / "runs", metrics=("macro-f1", "auc"), **SMALL
    )


def test_they_are_columns_of_a_comparison(compared):
    names = [column.name for column in compared.table.columns]
    assert names[1:3] == ["macro-f1", "auc"]
    assert compared.table.rows[0][1].endswith(" %")
    assert 0 <= float(compared.table.rows[0][2]) <= 1
    assert [row[0] for row in compared.table.rows] == ["las", "lstm", "commonest class", "linear model of statistics"]


def test_each_class_and_what_it_is_taken_for(compared, tmp_path):
    run = load_run(compared.outcomes[0].folder)
    outputs, targets = split_answers(run.folder, "test")
    assert (outputs.argmax(axis=1) == targets).mean() == pytest.approx(run.result["test"])
    assert outputs.sum(axis=1) == pytest.approx(1, abs=1e-5)
    table = class_table(run, "test", "best")
    assert [row[0] for row in table.rows] == ["high", "low"]
    assert [row[-1] for row in table.rows] == [str((targets == k).sum()) for k in (0, 1)]
    draw_confusion(run, "test", "best", tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
