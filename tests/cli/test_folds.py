"""``longlens compare files --folds``: what can be learned is found, what cannot is not, and each run is made once."""

import json

import numpy as np
import pytest

FLAGS = "--recipe smoke --steps 40 --evaluate-every 20 --lr 1e-2 --threads 1 --mixers las lstm".split()


@pytest.fixture
def table(here, monkeypatch):
    """``table(named)`` writes curves with a pulse, up or down, and what is named by 1 or 0 as their labels."""
    monkeypatch.setattr("longlens.api._is_only_here", lambda config: True)  # a process for each run takes seconds

    def write(named):
        random = np.random.default_rng(0)
        labels = random.integers(0, 2, 90)
        rows = random.normal(0, 1, (90, 12))
        rows[:, 3:6] += 3 * (2 * labels - 1)[:, None]
        pairs = zip(rows.round(3).tolist(), map(named, labels), strict=True)
        lines = [{"input": row, "label": label} for row, label in pairs]
        (here / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return write


def test_what_can_be_learned_is_found_and_runs_are_made_once(longlens, here, table):
    table(lambda label: ("down", "up")[label])
    command = ["compare", "files", "--path", "rows.jsonl", "--folds", 3, *FLAGS]
    said = longlens(*command, "--out", "out.json")
    assert said.code == 0, said.err
    assert "las (3 folds)" in said.words
    assert ", the best on validation, beats guessing: " in said.words
    assert "over 3 folds (p = " in said.words
    found = json.loads((here / "out.json").read_text())
    assert [(run["config"]["mixer"], run["config"]["task.fold"]) for run in found] == [
        (mixer, fold) for mixer in ("las", "lstm") for fold in range(3)
    ]
    assert sum(run["result"]["test_samples"] for run in found[:3]) == 90
    assert "6 of 6 were finished before" in longlens(*command).words
    assert "2 of 2 were finished before" not in longlens("list", "runs").words
    again = longlens("compare", "files", "--path", "rows.jsonl", "--folds", 3, "--seeds", 0, 1, *FLAGS)
    assert "las (3 × 2 folds)" in again.words
    assert "6 of 12 were finished before" in again.words


def test_labels_that_say_nothing_are_not_found(longlens, here, table):
    random = np.random.default_rng(5)
    table(lambda label: ("a", "b")[random.integers(2)])
    said = longlens("compare", "files", "--path", "rows.jsonl", "--folds", 3, *FLAGS)
    assert said.code == 0, said.err
    assert "nothing beats guessing: " in said.words


def test_numbers_are_compared_over_folds(longlens, here, table):
    random = np.random.default_rng(5)
    table(lambda label: float(label) + round(random.normal(0, 0.1), 3))
    said = longlens("compare", "files", "--path", "rows.jsonl", "--folds", 3, *FLAGS)
    assert said.code == 0, said.err
    assert "the best on validation, beats guessing: 0." in said.words
    assert "and the mean -0." in said.words


def test_what_does_not_go_together_is_one_sentence(longlens, here, table):
    table(lambda label: ("down", "up")[label])
    files = ["compare", "files", "--path", "rows.jsonl"]
    for arguments, message in (
        (["compare", "listops", "--folds", 3], "folds are for the task files, whose samples have no splits yet"),
        ([*files, "--folds", 1], "--folds must be a whole number of at least 2 or none, got 1"),
        ([*files, "--folds", 3, "--seeds", 0, 1, "--task.seed", 5], "task.seed must be left out with folds and seeds"),
        ([*files, "--folds", 3, "--test-share", 0.3], "test_share must be left out, as one of 3 folds is the test set"),
        ([*files, "--folds", 91], "90 sequences of 2 classes are too few"),
        ([*files, "--minutes", 1, "--steps", 3], "one of epochs, steps and minutes must be given"),
        ([*files, "--class-weights", "rare"], "--class-weights must be balanced or none, got rare"),
    ):
        said = longlens(*arguments, "--recipe", "smoke")
        assert (said.code, said.out) == (2, ""), message
        assert message in said.err
        assert len(said.err.splitlines()) == 1
