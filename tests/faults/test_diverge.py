"""A loss, a gradient or a weight that is not finite ends the run; no such number is ever saved."""

import json

import pytest
from safetensors.torch import load_file

from longlens.training import checkpoint

pytestmark = pytest.mark.faults


def assert_all_good(folder):
    """Every checkpoint can be read and is finite, and so is every line."""
    for path in (folder / "checkpoints").iterdir():
        assert checkpoint.read(path).is_finite(), path
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("every", ["1", "4"])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_what_is_not_a_number_stops_the_run_and_is_not_saved(runs, compare, where, every):
    flags = ["--mixer", "fragile", "--mixer.where", where, "--clip", "None", "--checkpoint-every", every]
    flags += ["--evaluate-every", "12", "--log-every", "1"]
    run = runs.train("run", *flags)
    assert run.code == 3
    assert "Traceback" not in run.said
    # A gradient shows at once if its step is saved, else in the loss of the next step.
    step = 12 if (where, every) == ("gradient", "4") else 11
    lines = compare.lines(runs.undisturbed(*flags, LONGLENS_TEST_HEALED="1"))
    lr = next(line["lr"] for line in lines if line["step"] == step)
    assert f"at step {step}, at a learning rate of {lr:.3g}: try a smaller lr, a smaller clip, or a warm-up" in run.said
    assert ("a weight is not finite" if (where, every) == ("gradient", "1") else "the loss is nan") in run.said
    last = 10 if every == "1" else 8
    assert f"The last good checkpoint is {run.folder / 'checkpoints' / f'{last:08d}'}" in run.said
    assert run.checkpoints() == [last - int(every), last]
    assert_all_good(run.folder)

    assert runs.train("run", *flags, LONGLENS_TEST_HEALED="1").code == 0
    compare.same(run.folder, runs.undisturbed(*flags, LONGLENS_TEST_HEALED="1"))


def test_a_weight_that_breaks_at_an_evaluation_is_not_saved_as_the_best(runs):
    flags = ["--mixer", "fragile", "--mixer.where", "gradient", "--evaluate-every", "11", "--checkpoint-every", "100"]
    run = runs.train("run", *flags)
    assert run.code == 3
    assert "the loss on validation is nan at step 11, at a learning rate of" in run.said
    assert "There is no checkpoint yet" in run.said
    assert run.checkpoints() == []
    assert_all_good(run.folder) if (run.folder / "checkpoints").exists() else None
    assert '"valid"' not in (run.folder / "metrics.jsonl").read_text()


def test_a_learning_rate_beyond_all_bounds_is_named(runs):
    run = runs.train("run", "--lr", "1e12", "--clip", "None", "--schedule", "constant", "--checkpoint-every", "1")
    assert run.code == 3
    assert "at a learning rate of 1e+12" in run.said
    assert "Traceback" not in run.said
    assert_all_good(run.folder)
    for path in (run.folder / "checkpoints").iterdir():
        assert load_file(path / "model.safetensors")
