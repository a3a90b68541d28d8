"""A run folder has one writer and one config."""

import json

import pytest
from support.runs import SLOWLY

pytestmark = pytest.mark.faults


def test_a_second_writer_refuses_and_the_first_is_not_disturbed(runs, compare):
    flags = ["--steps", "60"]
    first = runs.start("run", *flags, setup=SLOWLY)
    first.wait_for(first.checkpoints)
    second = runs.train("run", *flags)
    assert first.is_running
    assert second.code == 3
    assert f"another process is at work in {first.folder}: wait for it, or stop it" in second.said
    assert "Traceback" not in second.said
    assert first.wait().code == 0
    compare.same(first.folder, runs.undisturbed(*flags))


def test_another_config_is_refused_with_the_fields_that_differ(runs, compare):
    folder = runs.unfinished("run", 12)
    run = runs.train("run", "--lr", "0.5", "--depth", "2", "--task.seed", "7", "--mixer.window", "7")
    assert run.code == 2
    assert f"{folder} belongs to a run with another config" in run.said
    wanted = "training.lr: 0.003, now 0.5|model.depth: 1, now 2|task.seed: 0, now 7|mixer.window: 5, now 7"
    for difference in wanted.split("|"):
        assert difference in run.said
    assert "training.seed" not in run.said
    assert run.checkpoints() == [3, 6, 8, 9, 12]
    assert runs.train("run", "--keep", "100").code == 0
    compare.same(folder, runs.undisturbed("--keep", "100"))


def test_a_finished_run_returns_its_result_at_once(runs, compare):
    folder = runs.unfinished("run", 24)
    assert runs.train("run").code == 0
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    again = runs.train("run")
    assert again.code == 0
    assert f"run folder: {folder}" in again.printed
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"} == files


def test_a_run_that_resumes_in_another_environment_says_so(runs):
    folder = runs.unfinished("run", 12)
    before = json.loads((folder / "environment.json").read_text())
    before[-1]["torch"] = "2.0.0"
    (folder / "environment.json").write_text(json.dumps(before))
    run = runs.train("run")
    assert run.code == 0
    assert "resuming in another environment (torch 2.0.0, now" in run.said
    assert "results will not be bitwise identical" in run.said
    assert len(json.loads((folder / "environment.json").read_text())) == 2


def test_the_last_checkpoints_and_the_best_are_kept(runs, compare):
    folder = runs.undisturbed("--lr", "3", "--steps", "18", "--keep", "1", "--checkpoint-every", "2")
    best = compare.result(folder)["best_step"]
    assert best == 8
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00000008", "00000018"]
    folder = runs.undisturbed("--keep", "3", "--checkpoint-every", "5")
    assert compare.result(folder)["best_step"] == 24
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00000016", "00000020", "00000024"]


def test_lines_are_means_since_the_last_line_also_if_the_interval_changes(runs, compare):
    losses = [line["loss"] for line in compare.lines(runs.undisturbed("--log-every", "1")) if line["split"] == "train"]
    folder = runs.unfinished("run", 9)  # a line at every other step: the loss of the ninth is pending
    assert runs.train("run", "--log-every", "5").code == 0
    line = next(line for line in compare.lines(folder) if line["step"] == 10)
    assert line["loss"] == sum(losses[8:10]) / 2
