"""Evaluation: each sample once, subsets, and the command."""

import json

import numpy as np
import pytest
import torch

from longlens.models.model import create_model
from longlens.tasks.base import create_task
from longlens.tasks.stream import Stream
from longlens.training.config import TrainingConfig
from longlens.training.distributed import Processes
from longlens.training.evaluate import evaluate

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture
def listops(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path))
    return create_task("listops", sizes=(8, 31, 4), min_length=4, max_length=32, max_depth=3, max_args=4)


def one_by_one(model, task, indices):
    """The accuracy and the loss of some validation samples."""
    split, hits, losses = task.split("valid"), [], []
    for index in indices:
        sample = split.take(np.array([index]))
        with torch.no_grad():
            outputs = model(torch.from_numpy(sample.inputs))
        targets = torch.from_numpy(sample.targets)
        hits.append((outputs.argmax(-1) == targets).float().item())
        losses.append(torch.nn.functional.cross_entropy(outputs, targets).item())
    return np.mean(hits), np.mean(losses)


@pytest.mark.parametrize("batch_size", [1, 4, 31, 50])
def test_every_sample_counts_once(listops, batch_size):
    model = create_model(listops, "las", depth=1, width=16, heads=2, norm="batch", dropout=0.5)
    found = evaluate(model, listops, "valid", TrainingConfig(steps=1, batch_size=batch_size), ALONE)
    assert model.training, "it is left as it was"
    assert found == pytest.approx(one_by_one(model.eval(), listops, range(31)), rel=1e-5)


def test_some_samples_are_the_same_ones_each_time(listops):
    model = create_model(listops, "las", depth=1, width=16, heads=2).eval()
    options = TrainingConfig(steps=1, batch_size=4)
    found = evaluate(model, listops, "valid", options, ALONE, samples=6)
    drawn = Stream("evaluated").permutation(31)[:6]
    assert found == pytest.approx(one_by_one(model, listops, drawn.tolist()), rel=1e-5)
    assert not model.training
    everything = evaluate(model, listops, "valid", options, ALONE)
    assert evaluate(model, listops, "valid", options, ALONE, samples=100) == everything


def test_the_command_gives_the_numbers_of_the_result(runs, compare):
    """A run whose best model is not its last."""
    folder = runs.undisturbed("--lr", "3", "--steps", "18", "--keep", "1")
    result = compare.result(folder)
    assert result["best_step"] < result["steps"]
    assert result["test"] != result["test_last"]
    valid = {line["step"]: line["r2"] for line in compare.lines(folder) if line["split"] == "valid"}
    assert result["valid"] == max(valid.values()) == valid[result["best_step"]]
    assert result["valid_last"] == valid[18]
    for flags, wanted in (
        ([], f"step {result['best_step']}: r2 {result['test']:.4f}"),
        (["--checkpoint", "last"], f"step 18: r2 {result['test_last']:.4f}"),
        (["--checkpoint", str(result["best_step"]), "--split", "valid"], f"r2 {result['valid']:.4f}"),
    ):
        run = runs.command(folder, "evaluate", folder, *flags).wait()
        assert run.code == 0, run.said
        assert wanted in run.printed
        assert "(16 samples)" in run.printed
    steps = f"{result['best_step']}, 18"
    for name, said in (
        ("worst", f"checkpoint is 'worst'; it can be best, last, {steps}"),
        ("7", f"checkpoint is '7'; it can be best, last, {steps}"),
    ):
        run = runs.command(folder, "evaluate", folder, "--checkpoint", name).wait()
        assert run.code == 2
        assert said in run.said


def test_the_command_says_what_is_missing(runs):
    folder = runs.unfinished("run", 12)
    (folder / "checkpoints" / "00000012" / "model.safetensors").write_bytes(b"")
    for name, code, said in (("last", 3, "00000012 is damaged: model.safetensors"), ("6", 0, "")):
        run = runs.command(folder, "evaluate", folder, "--checkpoint", name).wait()
        assert (run.code, said in run.said) == (code, True), run.said
    nothing = runs.unfinished("nothing", 0)
    run = runs.command(nothing, "evaluate", nothing).wait()
    assert run.code == 2
    assert f"{nothing} has no checkpoint yet" in run.said
    run = runs.command(nothing, "evaluate", runs.folder).wait()
    assert run.code == 2
    assert f"{runs.folder} is not a run: it has no config.json" in run.said


def test_tests_of_a_subset_say_so(runs):
    folder = runs.undisturbed("--test-samples", "5", "--valid-samples", "3")
    assert json.loads((folder / "result.json").read_text())["test_samples"] == 5
