"""How long a run trains: at least so many steps, until validation no longer improves, or by the clock."""

import json
import math

import numpy as np
import pytest

from longlens import create_task, train
from longlens.errors import BadInput
from longlens.training import loop
from longlens.training.config import LATER, TrainingConfig
from longlens.training.run import read_config
from longlens.training.step import Schedule

WORSE = {"steps": 60, "evaluate_every": 3, "stop_after": 3, "lr": 0.3, "schedule": "linear", "warmup": 0.0}


def test_training_stops_when_validation_no_longer_improves(tiny, compare):
    """Three evaluations after the best one; up to there it is the same run, on the same schedule."""
    long = tiny.train("long", WORSE | {"stop_after": None})
    short = tiny.train("short", WORSE)
    result = compare.result(short)
    assert result["ended_by"] == "validation"
    assert result["steps"] == result["best_step"] + 9 < 60
    assert compare.result(long)["ended_by"] == "steps"
    assert compare.lines(short) == [line for line in compare.lines(long) if line["step"] <= result["steps"]]
    metrics = [line["r2"] for line in compare.lines(short) if line["split"] == "valid"]
    assert max(metrics) == result["valid"] == metrics[-4]


def test_where_r2_is_not_a_number_the_loss_decides(tmp_path, monkeypatch, compare):
    """The validation set of twelve rows is one. With a large rate, the first model is not the best, nor is the last."""
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "home"))
    inputs = np.random.default_rng(1).normal(size=(12, 5))
    task = create_task("files", frame=(inputs, inputs.sum(axis=1)))
    how = {"recipe": "smoke", "min_steps": 0, "evaluate_every": 3, "stop_after": 3, "threads": 1, "lr": 0.01}
    folder = train(task, "las", steps=60, folder=str(tmp_path / "run"), schedule="constant", **how).folder
    losses = {line["step"]: line["loss"] for line in compare.lines(folder) if line["split"] == "valid"}
    result = compare.result(folder)
    assert result["best_step"] == min(losses, key=losses.__getitem__) > 3
    assert result["steps"] == min(60, result["best_step"] + 9)
    assert math.isnan(result["valid"])
    assert math.isnan(result["valid_last"])


@pytest.mark.parametrize("back", [0, 4])
def test_a_run_that_stops_early_ends_the_same_after_a_kill(tiny, compare, back):
    """After its last evaluation but before its result, and before the one before."""
    whole = tiny.train("whole", WORSE)
    step = compare.result(whole)["steps"] - back
    tiny.unfinished("run", step, WORSE)
    assert compare.result(whole) == compare.result(tiny.train("run", WORSE))
    compare.same(tiny.folder / "run", whole)


def test_few_samples_are_passed_over_more_often(tiny, compare):
    """Of 56 samples, 4 batches an epoch; as many evaluations as epochs, unless there is a number of them."""
    changes = {"steps": None, "epochs": 2, "evaluate_every": None}
    evaluated = []
    for name, least in (("few", 5), ("many", 11)):
        folder = tiny.train(name, {**changes, "min_steps": least})
        evaluated.append([line["step"] for line in compare.lines(folder) if line["split"] == "valid"])
    assert evaluated == [[4, 8], [6, 11]]


@pytest.fixture
def seconds(monkeypatch):
    """A clock that goes by one second a step."""
    now = [100.0]

    def slow_step(*args):
        now[0] += 1
        return train_step(*args)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", slow_step)
    monkeypatch.setattr("longlens.training.open_run.time.perf_counter", lambda: now[0])
    return now


MINUTES = {"steps": None, "minutes": 0.5, "schedule": "cosine", "warmup": 0.2, "lr": 0.01}


def test_the_clock_ends_a_run_and_its_schedule(tiny, compare, seconds):
    folder = tiny.train("run", MINUTES, log_every=1)
    result = compare.result(folder)
    assert (result["steps"], result["ended_by"]) == (30, "minutes")
    rates = [line["lr"] for line in compare.lines(folder) if line["split"] == "train"]
    schedule = Schedule(TrainingConfig(steps=30, warmup=0.2), 30, higher_is_better=True)
    assert rates[6:] == pytest.approx([0.01 * schedule.factor(step) for step in range(6, 30)], abs=1e-6)
    assert rates[:6] == pytest.approx([0.01 * step / 6 for step in range(6)], abs=1e-6)
    assert [line["step"] for line in compare.lines(folder) if line["split"] == "valid"] == [8, 16, 24, 30]


def test_a_run_by_the_clock_resumes_with_what_is_left_of_its_time(tiny, compare, seconds):
    """With a clock that goes evenly, even the bits are the same."""
    tiny.unfinished("run", 12, MINUTES)
    compare.same(tiny.train("run", MINUTES), tiny.train("whole", MINUTES))
    state = json.loads((tiny.folder / "run" / "checkpoints" / "00000030" / "state.json").read_text())
    assert state["progress"]["training_seconds"] == 30


@pytest.mark.distributed
def test_two_processes_agree_on_the_time(runs, compare):
    run = runs.train("run", "--steps", "None", "--minutes", "0.01", processes=2)
    assert run.code == 0, run.said
    assert compare.result(run.folder)["ended_by"] == "minutes"
    assert compare.result(run.folder)["steps"] >= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of epochs, steps and minutes must be given, got none"),
        ({"minutes": 3, "steps": 5}, "one of epochs, steps and minutes must be given, got steps=5 and minutes=3"),
        ({"minutes": 0}, "minutes must be a number above 0"),
        ({"minutes": 3, "warmup": 10}, "minutes have no number of steps: give warmup as a fraction"),
        ({"minutes": 3, "decay_steps": 10}, "minutes have no number of steps"),
        ({"minutes": 3, "schedule": "inverse-sqrt", "warmup": 0}, "inverse-sqrt needs a warmup above 0 with minutes"),
        ({"steps": 3, "stop_after": 0}, "stop_after must be a whole number of at least 1"),
    ],
)
def test_a_budget_that_is_none_is_a_sentence(options, message):
    with pytest.raises(BadInput, match=message):
        TrainingConfig(**options)


def test_a_budget_of_a_command_takes_the_place_of_the_recipes(tiny):
    for budget, value in (("steps", 5), ("epochs", 2.0), ("minutes", 3.0)):
        training = tiny.config({"steps": None, "evaluate_every": 4, budget: value}).training
        assert {name: getattr(training, name) for name in ("steps", "epochs", "minutes")} == {
            **dict.fromkeys(("steps", "epochs", "minutes")),
            budget: value,
        }


def test_a_run_of_before_there_were_these_options_is_still_found(tiny):
    """Its folder has the same name, its config is whole, and it is not run again."""
    config = tiny.config({"steps": 4})
    assert config.digest("data") == config.digest("data", without=LATER)
    for changes in ({"stop_after": 3}, {"min_steps": 3}, {"class_weights": "balanced"}):
        assert tiny.config({"steps": 4, **changes}).digest("data") != config.digest("data")
    folder = tiny.train("run", {"steps": 4})
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name in LATER:
        values["training"].pop(name.removeprefix("training."), None)
    path.write_text(json.dumps(values))
    assert read_config(folder) == config
    before = (folder / "result.json").stat().st_mtime_ns
    tiny.train("run", {"steps": 4})
    assert (folder / "result.json").stat().st_mtime_ns == before
