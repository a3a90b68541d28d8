"""SIGTERM and SIGINT save and end with code 75; the same command resumes."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.runs import SLOWLY

from longlens.errors import Interrupted
from longlens.training.logs import StopSignals

pytestmark = pytest.mark.faults


def said_step(folder, split, step):
    path = folder / "metrics.jsonl"
    return path.exists() and f'{{"split": "{split}", "step": {step},' in path.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_at_which_it_came(runs, compare, number):
    flags = ["--checkpoint-every", "1000", "--evaluate-every", "1000", "--steps", "60", "--dropout", "0.1"]
    run = runs.start("run", *flags, setup=SLOWLY)
    run.wait_for(lambda: said_step(run.folder, "train", 4))
    run.signal(number)
    run.wait()
    assert run.code == 75
    (step,) = run.checkpoints()
    assert 4 <= step < 60
    assert f"stopped at step {step} of 60, and saved; the same command resumes" in run.said
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


def test_the_checkpoint_of_a_stopped_evaluation_is_never_replaced_but_for_its_state(runs):
    flags = ["--task.sizes", "40", "2000", "16", "--steps", "8", "--keep", "1"]
    run = runs.start("run", *flags)
    run.wait_for(lambda: said_step(run.folder, "train", 8))
    run.signal(signal.SIGTERM)
    run.wait()
    folder = run.folder / "checkpoints" / "00000008"
    before = {path.name: path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert runs.train("run", *flags).code == 0
    after = {path.name: path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert {name for name in before if before[name] != after[name]} == {"state.json"}
    progress = json.loads((folder / "state.json").read_text())["progress"]
    assert (progress["evaluated"], progress["best_step"]) == (8, 8), "the evaluation was made afterwards"


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["usual", "in the background"])
def test_one_signal_that_comes_twice_is_one_and_a_later_one_stops_at_once(monkeypatch, before):
    """Also where SIGINT is ignored, as by a job that a shell has started in the background."""
    outside = signal.signal(signal.SIGINT, before)
    try:
        with StopSignals() as stop:
            stop.defer("saved")
            assert not stop.asked
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked
            monkeypatch.setattr(StopSignals, "PATIENCE", -1.0)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, outside)


def _fail_in_signals(before):
    with StopSignals() as stop:
        before(stop)
        raise OSError("it failed")


def test_a_signal_stops_at_once_what_has_nothing_to_save():
    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(Interrupted, match="stopped before the first step"):
            _fail_in_signals(lambda stop, number=number: os.kill(os.getpid(), number) or time.sleep(5))


def test_what_fails_because_of_a_signal_is_interrupted_and_what_fails_by_itself_is_not():
    """A terminal also stops the processes that generate data, whose end may be seen first."""
    with pytest.raises(Interrupted):
        _fail_in_signals(lambda stop: setattr(stop, "asked", True))
    with pytest.raises(OSError, match="it failed"):
        _fail_in_signals(lambda stop: None)
    with pytest.raises(OSError, match="it failed"):
        _fail_in_signals(lambda stop: setattr(stop.defer("saved"), "asked", True))


def test_signals_are_heard_again_after_a_library_has_set_its_own_handler():
    """Ray does so when it starts."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        stop.defer("saved")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_can_be_used_outside_of_the_main_thread():
    handlers = []

    def use():
        with StopSignals() as stop:
            handlers.append((stop.asked, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert handlers == [(False, before)]


def test_a_signal_while_data_is_made_ends_with_75(runs):
    setup = (
        "import time, longlens.tasks.atomic as module\n"
        "def slow(self):\n"
        "    print('making', flush=True)\n"
        "    time.sleep(60)\n"
        "module.Atomic.fingerprint = slow"
    )
    for arguments in (["train", "atomic-cumsum"], ["compare", "atomic-cumsum", "--mixers", "las"]):
        for number in (signal.SIGTERM, signal.SIGINT):
            more = ["--recipe", "smoke", "--runs", runs.folder / "runs"]
            run = runs.command(runs.folder / "run", *arguments, *more, setup=setup)
            run.wait_for(lambda run=run: "making" in run.printed)
            run.signal(number)
            run.wait()
            assert run.code == 75, run.said
            assert "Traceback" not in run.said
    assert not (runs.folder / "runs").exists()


@pytest.mark.slow
def test_compare_stops_its_runs_which_are_saved_and_resumes(runs, compare):
    flags = (
        "--recipe smoke --task.max-length 16 --task.sizes 56 16 16 --checkpoint-every 9999 --log-every 2 --threads 1"
    )
    arguments = ["compare", "atomic-cumsum", *flags.split(), "--mixers", "patient", "--seeds", "0", "1", "--jobs", "2"]
    arguments += ["--steps", "300", "--evaluate-every", "9999", "--runs", runs.folder / "runs"]

    def lines():
        return [len(path.read_text().splitlines()) for path in sorted(runs.folder.glob("runs/*/*/*/metrics.jsonl"))]

    for times, of_a_terminal in ((1, True), (2, False)):
        before = lines() or [0, 0]
        slow = {"setup": "os.setsid()", "LONGLENS_TEST_PATIENCE": "0.3"}  # so that none ends before the signal
        command = runs.command(runs.folder / "compare", *arguments, **slow)
        command.wait_for(lambda before=before: len(lines()) == 2 and all(map(int.__gt__, lines(), before)))
        pid = command.processes[0].pid
        if of_a_terminal:  # which sends Ctrl-C to all processes of the group
            os.killpg(pid, signal.SIGINT)
        else:
            os.kill(pid, signal.SIGTERM)
        command.wait()
        assert command.code == 75, command.said
        assert "the same command resumes" in command.said
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
    rows = json.loads(out.read_text())
    assert {row["folder"] for row in rows} == set(map(str, folders))
    for row in rows:
        flags = ["--steps", 300, "--evaluate-every", 9999, "--checkpoint-every", 9999]
        whole = runs.undisturbed("--mixer", "patient", "--seed", row["config"]["training.seed"], *flags)
        assert row["result"]["test"] == compare.result(whole)["test"]
        compare.same(Path(row["folder"]), whole)
