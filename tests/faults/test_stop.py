"""SIGTERM and SIGINT save and end with code 75; the same command goes on."""

import json
import os
import signal

import pytest

from longlens.training.events import StopSignals


def said_step(folder, split, step):
    path = folder / "metrics.jsonl"
    return path.exists() and f'{{"split": "{split}", "step": {step},' in path.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_at_which_it_came(runs, compare, number):
    flags = ["--checkpoint-every", "1000", "--evaluate-every", "1000", "--steps", "60", "--dropout", "0.1"]
    run = runs.start("run", *flags)
    run.wait_for(lambda: said_step(run.folder, "train", 4))
    run.signal(number)
    run.wait()
    assert run.code == 75
    (step,) = run.checkpoints()
    assert 4 <= step < 60
    assert f"stopped at step {step} of 60, and saved; the same command goes on" in run.said
    assert runs.train("run", *flags).code == 0
    compare.same(run.folder, runs.undisturbed(*flags))


def test_a_signal_during_an_evaluation_is_heard_at_once_and_the_evaluation_made_later(runs, compare):
    flags = ["--task.sizes", "40", "2000", "2000", "--checkpoint-every", "1000"]
    run = runs.start("run", *flags)
    run.wait_for(lambda: said_step(run.folder, "train", 8))
    run.signal(signal.SIGTERM)
    run.wait()
    assert run.code == 75, run.said
    assert "stopped during an evaluation, and saved" in run.said
    assert run.checkpoints() == [8]
    assert not said_step(run.folder, "valid", 8)

    # Then killed, after the evaluation was told of and before the next checkpoint: it is made and told again.
    with (run.folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"split": "valid", "step": 8, "loss": 1.0, "r2": 0.5}) + "\n")
    run = runs.start("run", *flags)
    run.wait_for(lambda: said_step(run.folder, "valid", 24) and run.checkpoints()[-1] == 24)
    run.signal(signal.SIGINT)  # in the midst of the test
    run.wait()
    assert run.code == 75, run.said
    assert not (run.folder / "result.json").exists()
    assert runs.train("run", *flags).code == 0
    compare.same(run.folder, runs.undisturbed(*flags))


def test_the_checkpoint_of_a_stopped_evaluation_is_never_replaced(runs):
    flags = ["--task.sizes", "40", "2000", "16", "--steps", "8", "--keep", "1"]
    run = runs.start("run", *flags)
    run.wait_for(lambda: said_step(run.folder, "train", 8))
    run.signal(signal.SIGTERM)
    run.wait()
    before = (run.folder / "checkpoints" / "00000008").stat().st_ino
    assert runs.train("run", *flags).code == 0
    assert (run.folder / "checkpoints" / "00000008").stat().st_ino == before


def test_one_signal_that_comes_twice_is_one_and_a_later_one_stops_at_once(monkeypatch):
    with StopSignals() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        monkeypatch.setattr(StopSignals, "PATIENCE", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_compare_stops_its_runs_which_are_saved_and_goes_on(runs, compare):
    flags = "--recipe smoke --task.length 16 --task.sizes 56 16 16 --checkpoint-every 9999 --log-every 2 --threads 1"
    arguments = ["compare", "atomic-cumsum", *flags.split(), "--mixers", "transformer", "las", "--jobs", "2"]
    arguments += ["--steps", "2000", "--evaluate-every", "9999", "--runs", runs.folder / "runs"]

    def lines():
        return [len(path.read_text().splitlines()) for path in sorted(runs.folder.glob("runs/*/*/*/metrics.jsonl"))]

    for times, of_a_terminal in ((1, True), (2, False)):
        before = lines() or [0, 0]
        command = runs.command(runs.folder / "compare", *arguments, setup="os.setsid()")
        command.wait_for(lambda before=before: len(lines()) == 2 and all(map(int.__gt__, lines(), before)))
        pid = command.processes[0].pid
        if of_a_terminal:  # which sends Ctrl-C to all processes of the group
            os.killpg(pid, signal.SIGINT)
        else:
            os.kill(pid, signal.SIGTERM)
        command.wait()
        assert command.code == 75, command.said
        assert "the same command goes on" in command.said
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)  # nobody of the group is left
        folders = sorted(runs.folder.glob("runs/*/*/*/"))
        assert len(folders) == 2
        for folder in folders:
            assert not (folder / "result.json").exists()
            assert len(list((folder / "checkpoints").iterdir())) == times, (folder / "log.txt").read_text()

    out = runs.folder / "out.json"
    again = runs.command(runs.folder / "again", *arguments, "--out", out).wait()
    assert again.code == 0, again.said
    for row, folder in zip(json.loads(out.read_text()), reversed(folders), strict=True):
        assert row["folder"] == str(folder)
        flags = ["--steps", 2000, "--evaluate-every", 9999, "--checkpoint-every", 9999]
        whole = runs.undisturbed("--mixer", row["config"]["mixer"], *flags)
        assert row["result"]["test"] == compare.result(whole)["test"]
        compare.same(folder, whole)
