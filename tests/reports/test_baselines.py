"""What needs no model: by hand, and as the bar that layers must pass."""

import json

import numpy as np
import pytest

from longlens import create_task
from longlens.data.bigram import bigram_bits
from longlens.reports import tables
from longlens.reports.baselines import baselines
from longlens.reports.chance import Trial
from longlens.training.config import load_recipe
from longlens.training.many import Outcome

RANDOM = np.random.default_rng(0)


@pytest.fixture
def files(tmp_path):
    """A task of sequences and labels."""

    def make(inputs, labels, **options):
        rows = [{"input": np.asarray(x).tolist(), "label": y} for x, y in zip(inputs, labels, strict=True)]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return create_task("files", path=str(path), **options)

    return make


def test_the_commonest_class(files):
    labels = ["no"] * 70 + ["yes"] * 30
    task = files(RANDOM.normal(size=(100, 8)), labels, test_share=0.3)
    (first_name, first), (second_name, second) = baselines(task, None).items()
    targets = task.split("test").take(np.arange(30)).targets
    names = ["no", "yes"]
    assert first_name == "commonest class"
    assert first.right.tolist() == [names[target] == "no" for target in targets]
    assert first.value == first.right.mean()
    assert second_name == "linear model of statistics"
    assert second.value < 0.9, "there is nothing to find"


@pytest.mark.parametrize(
    "signal",
    [
        lambda x, y: x + 2 * y,
        lambda x, y: x * (1 + 3 * y),
        lambda x, y: np.concatenate([x[:10], x[10:] + 2 * y]),
        lambda x, y: x[: 20 - 10 * y],
    ],
    ids=["mean", "deviation", "drift", "length"],
)
def test_a_linear_model_finds_simple_signals(files, signal):
    labels = RANDOM.integers(0, 2, 300)
    inputs = [signal(RANDOM.normal(size=20), label) for label in labels]
    assert baselines(files(inputs, labels.tolist(), test_share=0.3), None)["linear model of statistics"].value > 0.95


def test_a_linear_model_counts_symbols(files):
    labels = RANDOM.integers(0, 2, 300)
    texts = ["".join(RANDOM.choice(list("abc" + "c" * 6 * label), 30)) for label in labels]
    assert baselines(files(texts, labels.tolist(), test_share=0.3), None)["linear model of statistics"].value > 0.95


def test_numbers_are_predicted(files):
    inputs = RANDOM.normal(size=(300, 10))
    found = baselines(files(inputs, (inputs.mean(axis=1) + 0.5).tolist(), test_share=0.3), None)
    mean, linear = found.values()
    assert mean.value == pytest.approx(0, abs=0.1)
    assert linear.value > 0.99


def test_pairs_are_described_by_both_and_their_difference(real_data):
    task = create_task("retrieval", stand_in=True, max_length=200)
    task.prepare(real_data("aan"))
    first, second = baselines(task, 200).values()
    assert len(first.right) == len(second.right) == 200


def test_a_language_has_its_pairs(real_data):
    task = create_task("text8", stand_in=True, max_length=64)
    task.prepare(real_data("text8"))
    (found,) = baselines(task, None).values()
    assert found.value == bigram_bits(task.split("train"), task.split("test"), task.spec.outputs)


def outcomes_of(tmp_path, valid, rights):
    """Runs with these validation accuracies and scores of the test samples."""
    recipe = load_recipe("smoke", "listops")
    found = []
    for place, (score, right) in enumerate(zip(valid, rights, strict=True)):
        folder = tmp_path / str(place)
        folder.mkdir(exist_ok=True)
        np.save(folder / "scores.npy", right.astype(np.float32))
        result = {"metric": "accuracy", "valid": score, "test": float(right.mean()), "test_samples": len(right)}
        config = recipe.resolve("listops", ("las", "transformer", "s4d", "lstm", "local")[place])
        found.append(Outcome(config, folder, result))
    return found


def test_what_is_said(tmp_path, monkeypatch):
    truth = RANDOM.integers(0, 2, 200)
    known = {"commonest class": Trial(0.5, truth == 1), "linear model of statistics": Trial(0.97)}
    monkeypatch.setattr(tables, "_baselines", lambda outcomes: known)
    good, bad = RANDOM.random(200) < 0.95, RANDOM.random(200) < 0.5
    (line, other) = tables.beats_guessing(outcomes_of(tmp_path, [0.9, 0.5], [good, bad]))
    assert line.startswith("las, the best on validation, beats guessing: ")
    assert other == "but a linear model of statistics is better: 97.0 %"
    (line,) = tables.beats_guessing(outcomes_of(tmp_path, [0.5, 0.9], [good, bad]))
    assert line.startswith("nothing beats guessing: transformer, the best on validation, has ")


def test_layers_that_learned_nothing_seldom_beat_guessing(tmp_path, monkeypatch):
    """Five layers that guess, 200 times: choosing among them on validation does not help them."""
    random, beaten = np.random.default_rng(3), 0
    for _ in range(200):
        truth = random.integers(0, 2, 60)
        known = {"commonest class": Trial(float((truth == 1).mean()), truth == 1)}
        monkeypatch.setattr(tables, "_baselines", lambda outcomes, known=known: known)
        rights = [random.integers(0, 2, 60) == truth for _ in range(5)]
        lines = list(tables.beats_guessing(outcomes_of(tmp_path, random.random(5).tolist(), rights)))
        beaten += not lines[0].startswith("nothing")
    assert beaten / 200 < 0.05


def test_other_rows_in_the_same_file_are_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for share in (10, 4):
        rows = [{"input": [float(n), 0.5], "label": int(n % share == 0)} for n in range(200)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(baselines(create_task("files", path="rows.jsonl"), None)["commonest class"].value)
    assert found[0] != found[1]
