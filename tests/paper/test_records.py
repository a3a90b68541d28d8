"""Records keep what a result is made of, and outlive new options."""

import json

import numpy as np
import pytest
from filelock import FileLock

from longlens.api import _run_here
from longlens.paper.records import POINTS, Records, pack, thin, unpack
from longlens.paper.study import Cell
from longlens.training.config import Runtime
from longlens.training.many import Outcome

CELL = Cell("LaS", "listops", "las", {"training.steps": 12, "training.evaluate_every": 6})


@pytest.fixture
def config():
    return CELL.config("smoke", 0, None)


@pytest.fixture
def outcome(config, tmp_path):
    return _run_here(config, Runtime(runs=tmp_path / "runs"))


@pytest.fixture
def records(tmp_path, outcome):
    records = Records(tmp_path / "results" / "smoke")
    records.add(outcome)
    return records


def test_a_record_is_found_by_its_config(records, config, outcome):
    again = Records(records.folder)
    record = again.find(config)
    assert record.result == outcome.result
    assert record.config == config
    assert again.find(CELL.config("smoke", 1, None)) is None
    assert [line["step"] for line in record.metrics if line["split"] == "valid"] == [6, 12]
    assert set(record.environment) == {"longlens", "commit", "torch", "processor", "device", "threads", "date"}


def test_scores_are_those_of_the_test_samples(records, config, outcome):
    record = records.find(config)
    assert len(record.scores) == outcome.result["test_samples"]
    assert record.scores.mean() == pytest.approx(outcome.result["test"])
    from longlens import load_run

    samples = config.task.split("test")
    model = load_run(outcome.folder)
    rows = [samples.take(np.array([row])) for row in range(len(samples))]
    said = model.predict([row.inputs[0, : row.lengths[0]] for row in rows])
    assert np.array_equal(said == np.array([row.targets[0] for row in rows]), record.scores.astype(bool))


def test_an_option_that_was_not_there_has_its_default(records, config):
    (path,) = records.folder.glob("*/*.json")
    values = json.loads(path.read_text())
    del values["config"]["training"]["train_on_valid"], values["config"]["mixer_options"]["dropout"]
    path.write_text(json.dumps(values))
    assert Records(records.folder).find(config) is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.pop("config"),
        lambda values: values["config"].update(mixer="none such"),
        lambda values: values["config"]["training"].update(lr=-1),
        lambda values: values.update(result=None),
        lambda values: values["scores"].update(kind="float16"),
        lambda values: values["result"].update(test="high"),
        lambda values: values["result"].update(test=values["result"]["test"] + 0.3),
        lambda values: values.update(environment=None),
    ],
)
def test_a_damaged_record_is_named_and_hides_no_other(records, damage):
    (path,) = records.folder.glob("*/*.json")
    values = json.loads(path.read_text())
    (path.parent / "other.json").write_text(path.read_text())
    damage(values)
    path.write_text(json.dumps(values))
    found = Records(records.folder)
    assert len(found.found) == 1
    (problem,) = found.problems
    assert str(path) in problem


def test_an_error_is_kept_until_there_is_a_result(records, config, outcome):
    failed = Outcome(config, outcome.folder, error="no memory")
    records.add(failed)
    assert records.find(config).result == outcome.result
    empty = Records(records.folder.parent / "other")
    empty.add(failed)
    assert empty.find(config).error == "no memory"
    empty.add(outcome)
    assert empty.find(config).error is None


def test_what_another_process_is_at_has_not_failed(config, outcome, tmp_path):
    records = Records(tmp_path / "results" / "other")
    busy = Outcome(config, outcome.folder, error="another process is at work")
    with FileLock(outcome.folder / ".lock"):
        records.add(busy)
    assert records.find(config) is None
    records.add(busy)
    assert records.find(config) is not None


def test_records_of_other_data_are_left_out(records, outcome):
    (path,) = records.folder.glob("*/*.json")
    values = json.loads(path.read_text())
    values["config"]["training"]["seed"] = 7
    other = path.with_name("other.json")
    other.write_text(json.dumps(values | {"data": "0123"}))
    found = Records(records.folder)
    assert len(found.found) == 1
    assert found.problems == [
        f"{other} was made of other data than {path.name}: keep the records of other data in a folder of their own "
        "(--results)"
    ]


def test_metrics_are_thinned():
    lines = [{"split": "train", "step": step, "loss": 1 / (step + 3)} for step in range(1000)]
    lines += [{"split": "valid", "step": step, "accuracy": 0.123456789} for step in range(0, 1000, 100)]
    found = thin(lines)
    assert len(found) == POINTS
    assert [line["step"] for line in found] == sorted(line["step"] for line in found)
    assert sum(line["split"] == "valid" for line in found) == 10
    assert found[-1]["step"] == 999
    assert {line.get("accuracy") for line in found} == {None, 0.1235}


def test_scores_are_packed():
    bits = np.random.default_rng(0).integers(0, 2, 77).astype(np.float32)
    assert np.array_equal(unpack(pack(bits)), bits)
    losses = np.random.default_rng(0).random(77).astype(np.float32)
    np.testing.assert_allclose(unpack(json.loads(json.dumps(pack(losses)))), losses, rtol=1e-3)
