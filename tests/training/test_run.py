"""The folder of a run: nothing in it is believed that is not as it was written, and nothing is written elsewhere."""

import json
import linecache
import os
import random
import shutil
import stat
import sys
import types
from pathlib import Path

import pytest

from longlens.errors import BadInput, RunError
from longlens.files import write_sealed
from longlens.registry import foreign_source
from longlens.training import run as run_module
from longlens.training.config import Runtime
from longlens.training.evaluate import evaluate_run
from longlens.training.loop import train_run
from longlens.training.run import (
    RunFolder,
    fingerprint,
    read_config,
    read_environment,
    read_metrics,
    read_result,
    run_folder,
)

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def finished(tiny) -> Path:
    return tiny.train("run", {"steps": 4, "evaluate_every": 4})


def train_again(tiny, folder: Path, **runtime):
    values = {"folder": folder, "threads": 1, "keep": 100, "log_every": 2, "checkpoint_every": 3, **runtime}
    return train_run(tiny.config({"steps": 4, "evaluate_every": 4}), Runtime(**values))


def test_naming_a_folder_prepares_nothing(tiny, monkeypatch):
    config = tiny.config()
    for method in ("fingerprint", "prepare", "load"):
        monkeypatch.setattr(type(config.task), method, lambda *_: pytest.fail("it was asked for a path only"))
    folder = run_folder(config, Runtime(runs=Path("somewhere")), "data")
    assert folder == Path("somewhere") / "atomic-cumsum" / "las" / config.digest("data")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("model", "depth", 2), ("model", "pooling", "last"), ("mixer_options", "window", 7), ("training", "seed", 5)],
)
def test_a_config_that_was_changed_is_refused(tiny, finished, section, name, value):
    """evaluate would give the figures of another model."""
    path = finished / "config.json"
    values = json.loads(path.read_text())
    assert values[section][name] != value
    values[section][name] = value
    path.write_text(json.dumps(values))
    for use in (read_config, evaluate_run, lambda folder: train_again(tiny, folder)):
        with pytest.raises(BadInput, match=r"config.json is not the config that this run was started with: undo"):
            use(finished)


def test_the_layout_of_a_config_does_not_matter(tiny, finished):
    path = finished / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))
    assert read_config(finished) == tiny.config({"steps": 4, "evaluate_every": 4})


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[]", "5", "{}", '{"digest": 1, "fingerprint": 2}', DEEP, "\udcff"])
@pytest.mark.parametrize("name", ["config.json", "identity.json"])
def test_what_says_which_run_it_is_must_be_as_it_was_written(tiny, finished, name, text):
    (finished / name).write_text(text, errors="surrogateescape")
    for use in (read_config, evaluate_run, lambda folder: train_again(tiny, folder)):
        with pytest.raises(BadInput, match=name) as caught:
            use(finished)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    (finished / name).unlink()
    with pytest.raises(BadInput, match=name):
        read_config(finished)


@pytest.mark.slow
def test_no_flipped_bit_of_a_result_gives_another_value(finished):
    """Nearly half of them would be read as another figure without a checksum."""
    path = finished / "result.json"
    content, wanted, refused = path.read_bytes(), read_result(finished), 0
    for bit in random.Random(0).sample(range(8 * len(content)), 500):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert read_result(finished) == wanted
        except BadInput as error:
            refused += 1
            assert "run the same command again" in str(error)  # noqa: PT017
    assert refused > 400


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{}", "[]", "5", '"x"', DEEP, '{"test": 0.99}', "\udcff"])
def test_a_result_that_is_none_is_a_sentence(tiny, finished, text):
    (finished / "result.json").write_text(text, errors="surrogateescape")
    for use in (read_result, lambda folder: train_again(tiny, folder), evaluate_run):
        with pytest.raises(BadInput, match=r"result.json .*: delete it and run the same command again") as caught:
            use(finished)
        assert "\n" not in str(caught.value)


def test_a_result_that_was_edited_is_refused_and_made_again(tiny, finished):
    path = finished / "result.json"
    before = read_result(finished)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "test": 0.99}))
    with pytest.raises(
        BadInput, match=r"result.json is not as it was written: delete it and run the same command again"
    ):
        read_result(finished)
    path.unlink()
    after = train_again(tiny, finished)
    assert before is not None
    assert (after["test"], after["steps"], after["tokens"]) == (before["test"], before["steps"], before["tokens"])


@pytest.mark.parametrize("change", [{"metric": "beauty"}, {"steps": "many"}, {"more": 1}, {"steps": None}])
def test_a_result_of_another_shape_is_a_sentence_though_its_checksum_is_right(finished, change):
    values = read_result(finished)
    assert values is not None
    write_sealed(finished / "result.json", {**values, **change})
    (name,) = change
    with pytest.raises(BadInput, match=rf"is not the result of a run \({name}: .*\): delete it"):
        read_result(finished)


ENVIRONMENTS = ["", "{}", "5", '"x"', "[1]", DEEP, "\udcff"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ENVIRONMENTS)
def test_a_damaged_environment_is_told_and_kept(tiny, finished, text, capfd):
    path = finished / "environment.json"
    path.write_text(text, errors="surrogateescape")
    content = path.read_bytes()
    assert read_environment(finished) == []
    (finished / "result.json").unlink()
    train_again(tiny, finished)
    assert "it is kept as environment.json.damaged, and a new one begins" in capfd.readouterr().err
    assert (finished / "environment.json.damaged").read_bytes() == content
    (entry,) = read_environment(finished)
    assert {"commit", "torch", "device", "threads", "command"} <= entry.keys()


@pytest.mark.slow
def test_lines_after_a_damaged_one_are_kept(tiny, capfd):
    folder = tiny.unfinished("run", 12)
    path = folder / "metrics.jsonl"
    whole = read_metrics(folder)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"step"', '"stop"')
    lines[3] = DEEP + "\n"
    path.write_text("".join(lines))
    assert read_metrics(folder) == [line for i, line in enumerate(whole) if i not in (1, 3)]
    tiny.train("run")
    assert f"2 damaged lines of {path} are left out" in capfd.readouterr().err
    after = [(line["split"], line["step"]) for line in read_metrics(folder)]
    assert after == [(line["split"], line["step"]) for i, line in enumerate(whole) if i not in (1, 3)]


def test_metrics_that_are_missing_or_a_folder_are_a_sentence(finished):
    (finished / "metrics.jsonl").unlink()
    assert read_metrics(finished) == []
    (finished / "metrics.jsonl").mkdir()
    with pytest.raises(BadInput, match=r"metrics.jsonl cannot be read: Is a directory"):
        read_metrics(finished)


def test_a_finished_run_is_read_where_nobody_may_write(tiny, finished, monkeypatch):
    wanted = read_result(finished)

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for module, name in ((run_module, "write_json"), (run_module, "write_atomic"), (Path, "mkdir"), (os, "replace")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(run_module.FileLock, "acquire", refuse)
    assert train_again(tiny, finished) == wanted
    other = tiny.folder / "other"
    with pytest.raises(BadInput, match=r"cannot write to .*other \(Read-only file system\): choose another place"):
        train_again(tiny, other)


@pytest.mark.parametrize("place", ["/proc/nothing/run", "{file}/run", "{file}"])
def test_a_folder_that_cannot_be_is_a_sentence(tiny, place):
    file = tiny.folder / "file"
    file.write_text("mine")
    with pytest.raises(BadInput, match=r"cannot (write to|read) .*: choose another place with --runs or --folder"):
        train_again(tiny, Path(place.format(file=file)))
    assert file.read_text() == "mine"


def test_a_folder_with_other_peoples_files_is_refused(tiny):
    folder = tiny.folder / "data"
    folder.mkdir()
    (folder / "train.csv").write_text("mine")
    with pytest.raises(BadInput, match=r"data is no run and has other files, such as train.csv: choose another folder"):
        train_again(tiny, folder)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "train.csv"]


def test_files_have_the_permissions_that_the_umask_gives(tiny):
    before = os.umask(0o027)
    try:
        folder = tiny.train("run", {"steps": 4})
    finally:
        os.umask(before)
    for path in folder.rglob("*"):
        if path.name != ".lock":
            assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["result.json", "environment.json", "metrics.jsonl", "config.json", "identity.json"])
def test_nothing_is_written_through_a_symbolic_link(tiny, finished, name):
    """Neither through the link of a file nor through one of the file that is written before it."""
    target = tiny.folder / "thesis.txt"
    target.write_text("mine")
    (finished / "result.json").unlink()
    shutil.rmtree(finished / "checkpoints")
    for link in (finished / f".{name}.partial", finished / f".{name}.abc.partial"):
        link.symlink_to(target)
    if name in ("environment.json", "metrics.jsonl"):  # the others are only read if they are there
        (finished / name).unlink()
        (finished / name).symlink_to(target)
    train_again(tiny, finished)
    assert target.read_text() == "mine"
    assert not (finished / name).is_symlink()
    assert not list(finished.glob("*.partial"))


def test_metrics_that_are_a_dangling_link_are_refused(tiny, finished):
    (finished / "metrics.jsonl").unlink()
    (finished / "metrics.jsonl").symlink_to(tiny.folder / "nowhere")
    (finished / "result.json").unlink()
    with pytest.raises(BadInput, match=r"metrics.jsonl is a symbolic link, which is not written through: delete it"):
        train_again(tiny, finished)
    assert not (tiny.folder / "nowhere").exists()


@pytest.mark.slow
def test_checkpoints_on_another_disk_are_used_and_other_peoples_folders_stay(tiny, compare):
    whole = tiny.train("whole", keep=1)
    disk, folder = tiny.folder / "disk", tiny.folder / "run"
    files = ["99999999/thesis.txt", "00000003.partial/thesis.txt", "00000001/thesis.txt", "00000002/thesis.txt"]
    files.append("77777777/model.safetensors/thesis.txt")
    for name in files:
        (disk / name).parent.mkdir(parents=True)
        (disk / name).write_text("mine")
    folder.mkdir()
    config = tiny.config()
    RunFolder(folder, keep=1).claim(config, fingerprint(config))
    (folder / "checkpoints").symlink_to(disk)
    with pytest.raises(RunError, match=r"00000003.partial is in the way, and it is not ours: move it"):
        tiny.train("run", keep=1)
    (disk / "00000003.partial").rename(disk / "other")
    tiny.train("run", keep=1)
    assert (folder / "checkpoints").is_symlink()
    found = sorted(path.relative_to(disk).as_posix() for path in disk.rglob("thesis.txt"))
    assert len(found) == 5, found
    assert (disk / "77777777.damaged" / "model.safetensors" / "thesis.txt").read_text() == "mine"
    assert compare.result(folder) == compare.result(whole)


@pytest.mark.slow
def test_a_link_in_the_place_of_a_checkpoint_is_not_followed_to_delete(tiny):
    folder = tiny.unfinished("run", 12)
    elsewhere = tiny.folder / "elsewhere"
    (folder / "checkpoints" / "00000003").rename(elsewhere)
    (folder / "checkpoints" / "00000003").symlink_to(elsewhere)
    tiny.train("run", keep=1)
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(run_module.CHECKPOINT_FILES)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["00000003", "00000024"]


def test_one_damaged_run_is_an_error_of_its_own(tiny, finished):
    """Whoever lists runs asks each of them."""
    (finished / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"config.json"):
        read_config(finished)
    whole = tiny.train("whole", {"steps": 4})
    assert read_config(whole) == tiny.config({"steps": 4})


CELL = """
class Layer:
    def __init__(self, d_model):
        self.width = d_model

    def forward(self, x, *, mask=None):
        return {body}
"""


@pytest.mark.parametrize("has_source", [True, False], ids=["notebook", "prompt"])
def test_a_layer_of_a_notebook_that_changed_is_another_one(monkeypatch, has_source):
    """It has no file. An old result would be shown for the new layer otherwise."""
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    found = []
    for number, body in enumerate(("x", "2 * x", "x")):
        text, name = CELL.format(body=body), f"<cell {number}>"
        if has_source:
            monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        exec(compile(text, name, "exec"), vars(module))
        found.append(foreign_source(module.Layer))
    assert found[0]
    assert found[0] == found[2] != found[1]
