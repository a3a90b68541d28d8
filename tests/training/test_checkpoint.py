"""Checkpoints: a model is restored from all of its tensors, or refused."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from longlens.errors import BadInput, RunError
from longlens.files import sha256
from longlens.training import checkpoint
from longlens.training.evaluate import evaluate_run, load_model
from longlens.training.open_run import TrainState


def change_tensors(folder, file, change):
    """As someone would who knows the format: the checksums are right."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    lines = [f"{sha256(folder / name)}  {name}\n" for name in checkpoint.TENSORS]
    (folder / "SHA256SUMS").write_text("".join(lines))


def add(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def remove(name):
    return lambda tensors: tensors.pop(name)


CHANGES = {
    "the head is missing": ("model.safetensors", remove("head.linear.weight"), "it lacks head.linear.weight"),
    "a tensor too many": ("model.safetensors", add("more", torch.ones(2)), "it has more, which the model has not"),
    "another shape": (
        "model.safetensors",
        add("head.linear.bias", torch.ones(2)),
        r"head.linear.bias is \(2,\), and \(1,\) in the model",
    ),
    "nothing": ("model.safetensors", dict.clear, "it lacks blocks"),
    "a moment is missing": (
        "optimizer.safetensors",
        remove("head.linear.bias/exp_avg"),
        "it lacks head.linear.bias/exp_avg",
    ),
    "moments of others": (
        "optimizer.safetensors",
        add("more/step", torch.ones(())),
        "it has more/step, which the model has not",
    ),
    "no moments": ("optimizer.safetensors", dict.clear, "it lacks blocks"),
    "moments of another shape": (
        "optimizer.safetensors",
        add("head.linear.bias/exp_avg", torch.ones(2)),
        r"head.linear.bias/exp_avg is \(2,\)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_that_lacks_a_tensor_or_has_others_is_refused(tiny, name):
    """torch would leave what is missing as it is, at random, and the figures would look plausible."""
    file, change, said = CHANGES[name]
    folder = tiny.unfinished("run", 12)
    last = folder / "checkpoints" / "00000012"
    change_tensors(last, file, change)
    uses = [lambda: tiny.train("run")]
    if file.startswith("model"):
        uses += [lambda: evaluate_run(folder, "test", "last"), lambda: load_model(folder, "last")]
    for use in uses:
        with pytest.raises(RunError, match=rf"00000012 is not one of this model: {said}.*Was it written by another"):
            use()
    assert last.exists(), "it may be good for another version"


@pytest.mark.slow
def test_a_parameter_that_never_has_a_gradient_is_no_obstacle(runs, compare):
    flags = ["--mixer", "half-used"]
    folder = runs.unfinished("run", 12, *flags)
    state = json.loads((folder / "checkpoints" / "00000012" / "state.json").read_text())
    assert state["without_moments"] == ["blocks.0.mixer.unused"]
    run = runs.train("run", *flags, "--keep", "100")
    assert run.code == 0, run.said
    compare.same(folder, runs.undisturbed("--keep", "100", *flags))


def test_the_checksums_are_as_sha256sum_reads_them(tiny):
    folder = tiny.train("run", {"steps": 3})
    last = folder / "checkpoints" / "00000003"
    lines = [line.split("  ") for line in (last / "SHA256SUMS").read_text().splitlines()]
    assert lines == [[sha256(last / name), name] for name in ("model.safetensors", "optimizer.safetensors")]
    assert set(json.loads((last / "state.json").read_text())) == {"progress", "schedule", "without_moments", "sha256"}


def test_of_a_checkpoint_that_is_there_only_the_state_is_replaced(tiny):
    folder = tiny.train("run", {"steps": 3})
    last = folder / "checkpoints" / "00000003"
    found = checkpoint.read(last)
    before = {path.name: path.stat().st_ino for path in [last, *last.iterdir()]}
    checkpoint.write(last, checkpoint.Checkpoint({**found.state, "schedule": {"level": 0.5}}, {}, {}))
    after = {path.name: path.stat().st_ino for path in [last, *last.iterdir()]}
    assert {name for name in before if before[name] != after[name]} == {"state.json"}
    again = checkpoint.read(last)
    assert again.state["schedule"] == {"level": 0.5}
    assert again.model.keys() == found.model.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("progress"),
        lambda state: state.update(progress=[]),
        lambda state: state["progress"].pop("step"),
        lambda state: state["progress"].update(step="many"),
        lambda state: state["progress"].update(step=13),
        lambda state: state.update(more=1),
    ],
)
def test_a_state_of_another_shape_is_damage_though_its_checksum_is_right(tiny, compare, capfd, damage):
    folder = tiny.unfinished("run", 12)
    last = folder / "checkpoints" / "00000012"
    state = checkpoint.read_state(last)
    damage(state)
    checkpoint.write_sealed(last / "state.json", state)
    tiny.train("run")
    said = capfd.readouterr().err
    assert f"checkpoint {last} is damaged (" in said
    assert "and kept as 00000012.damaged: the one before it is used" in said
    compare.same(folder, tiny.train("whole"))


def test_the_state_refuses_what_it_cannot_be():
    state = TrainState(step=3, best=float("nan"), best_step=2)
    again = TrainState.from_json(json.loads(json.dumps(asdict(state))))
    assert asdict(again).keys() == asdict(state).keys()
    assert again.best != again.best  # r2 of constant targets is none
    for wrong in (None, [], {}, {**asdict(state), "more": 1}, {**asdict(state), "tokens": "x"}):
        with pytest.raises(BadInput, match="the state"):
            TrainState.from_json(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model.safetensors", "SHA256SUMS", "state.json"])
def test_a_folder_in_the_place_of_a_file_is_damage(tiny, compare, capfd, file):
    folder = tiny.unfinished("run", 12)
    path = folder / "checkpoints" / "00000012" / file
    path.unlink()
    path.mkdir()
    tiny.train("run")
    assert "is damaged (" in capfd.readouterr().err
    assert (folder / "checkpoints" / "00000012.damaged" / file).is_dir(), "it is put aside, not deleted"
    compare.same(folder, tiny.train("whole"))


@pytest.mark.slow
def test_damaged_checkpoints_of_the_same_step_are_all_kept(tiny, capfd):
    folder = tiny.unfinished("run", 12)
    for number in range(3):
        (folder / "checkpoints" / "00000012" / "SHA256SUMS").write_text(f"{number}")
        tiny.train("run")
        (folder / "result.json").unlink()
        for step in (15, 16, 18, 21, 24):
            shutil.rmtree(folder / "checkpoints" / f"{step:08d}")
    names = {path.name for path in (folder / "checkpoints").glob("*damaged*")}
    assert names == {"00000012.damaged", "00000012.damaged-2", "00000012.damaged-3"}


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_damaged(tiny, monkeypatch):
    folder = tiny.unfinished("run", 12)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "sha256", refuse)
    with pytest.raises(RunError, match=r"checkpoint .*00000012 cannot be read: Permission denied"):
        tiny.train("run")
    assert (folder / "checkpoints" / "00000012").exists()
