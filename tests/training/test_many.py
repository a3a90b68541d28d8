"""Many runs on this machine: threads, GPUs, and runs that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from longlens.api import run_configs
from longlens.errors import BadInput
from longlens.training import many
from longlens.training.config import Runtime
from longlens.training.many import ProcessPool, RunRequest, run_many
from longlens.training.run import read_environment, read_result


@pytest.fixture
def requests(tiny):
    """What would be started, without doing so."""

    def make(count, **runtime):
        values = Runtime(runs=tiny.folder / "runs", **runtime)
        configs = [tiny.config({"training.seed": seed, "steps": 4}) for seed in range(count)]
        return configs, values

    return make


@pytest.fixture
def launched(monkeypatch):
    """The requests of which a process would be started, with the GPU of each."""
    found: list[tuple[dict, str | None]] = []

    def launch(request, folder, quiet, pool, gpu=None):
        found.append((json.loads(request), gpu))
        time.sleep(0.05)
        return None, "not run"

    monkeypatch.setattr(many, "launch", launch)
    return found


def test_the_data_of_a_comparison_is_looked_at_once(requests, launched, monkeypatch):
    configs, runtime = requests(5)
    real, looked = type(configs[0].task).fingerprint, []
    monkeypatch.setattr(type(configs[0].task), "fingerprint", lambda self: looked.append(1) or real(self))
    outcomes = run_many(configs, runtime)
    assert len(looked) == 1
    assert len(launched) == 5
    assert [outcome.config for outcome in outcomes] == configs


@pytest.mark.parametrize(("jobs", "threads"), [(1, 6), (2, 3), (4, 1), (9, 1)])
def test_jobs_share_the_free_cores(requests, launched, monkeypatch, jobs, threads, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("longlens.training.machine.usable_cores", lambda: 8)
    monkeypatch.setattr("longlens.training.machine.busy_cores", lambda: 2.0)
    run_many(*requests(3), jobs=jobs)
    assert {request["runtime"]["threads"] for request, _ in launched} == {threads}
    assert f"longlens: {threads} of 8 cores" in capfd.readouterr().err
    launched.clear()
    run_many(*requests(1, threads=7), jobs=jobs)
    assert [request["runtime"]["threads"] for request, _ in launched] == [7]


def test_a_run_that_resumes_has_the_threads_of_its_last_start(requests, launched, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("longlens.training.machine.usable_cores", lambda: 8)
    monkeypatch.setattr("longlens.training.machine.busy_cores", lambda: 0.0)
    configs, runtime = requests(2)
    for outcome in run_many(configs, runtime)[:1]:
        outcome.folder.mkdir(parents=True)
        (outcome.folder / "environment.json").write_text(json.dumps([{"threads": 3}]))
    launched.clear()
    run_many(configs, runtime)
    assert {request["runtime"]["threads"] for request, _ in launched} == {3, 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "jobs", "device", "used"),
    [
        (["0", "1"], 2, "auto", {"0", "1"}),
        (["0", "1", "2"], 2, "cuda", {"0", "1"}),
        (["0", "1"], 4, "auto", {"0", "1"}),
        (["4", "GPU-7"], 2, "auto", {"4", "GPU-7"}),
        (["0"], 2, "auto", {None}),
        ([], 2, "auto", {None}),
        (["0", "1"], 1, "auto", {None}),
        (["0", "1"], 2, "cpu", {None}),
    ],
)
def test_each_job_has_a_gpu_of_its_own(requests, launched, monkeypatch, gpus, jobs, device, used):
    """Otherwise all runs would be on the first."""
    monkeypatch.setattr(many, "visible_gpus", lambda: gpus)
    run_many(*requests(6, device=device), jobs=jobs)
    assert {gpu for _, gpu in launched} == used
    counts = [sum(found == gpu for _, found in launched) for gpu in used]
    assert max(counts) - min(counts) <= 2, "in turn"


def test_the_gpus_are_those_that_the_user_leaves_visible(monkeypatch):
    for given, wanted in (("0,1", ["0", "1"]), ("3, GPU-5", ["3", "GPU-5"]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert many.visible_gpus() == wanted
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert many.visible_gpus() == ["0", "1", "2"]


def test_the_process_of_a_job_sees_its_gpu_only(tiny, monkeypatch):
    seen = []

    class Pool(ProcessPool):
        def start(self, command, **options):
            seen.append(options["env"].get("CUDA_VISIBLE_DEVICES"))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpu in ("1", None):
        assert many.launch("{}", tiny.folder / "run", False, Pool(), gpu) == (None, "not started")
    assert seen == ["1", None]


def test_what_cannot_be_is_a_sentence(requests):
    configs, runtime = requests(1)
    with pytest.raises(BadInput, match="jobs must be a whole number of at least 1, got 0"):
        run_many(configs, runtime, jobs=0)
    with pytest.raises(BadInput, match="folder is for a single run: leave it out"):
        run_configs(configs, Runtime(folder=Path("here")))


def test_torchrun_is_for_training(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        BadInput, match="torchrun is for train: compare, sweep and reproduce start processes of their own"
    ):
        run_many([], Runtime())


@pytest.mark.slow
def test_one_damaged_run_does_not_hide_the_others(tiny, requests):
    configs, runtime = requests(2, threads=1)
    first, second = run_many(configs, runtime)
    assert first.result is not None
    assert second.result is not None
    assert "result" not in json.loads((first.folder / "environment.json").read_text())[-1]["command"]
    path = first.folder / "result.json"
    path.write_text(path.read_text().replace('"test": ', '"test": 1'))
    first, second = run_many(configs, runtime)
    assert first.result is None
    assert first.error is not None
    assert "result.json is not as it was written: delete it and run the same command again" in first.error
    assert second.was_there
    path.unlink()
    first, second = run_many(configs, runtime)
    assert first.result is not None
    assert not first.was_there


@pytest.mark.slow
def test_a_run_of_a_comparison_remembers_the_command_that_the_user_gave(requests, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/longlens", "compare", "atomic-cumsum"])
    (outcome,) = run_many(*requests(1, threads=1))
    assert read_environment(outcome.folder)[0]["command"] == ["longlens", "compare", "atomic-cumsum"]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_bug_in_a_layer_leaves_its_traceback_and_the_others_end(runs, jobs):
    """What a layer prints is not taken for the reason. Be it, or the reason, more than a pipe holds, nobody waits."""
    out = runs.folder / "out.json"
    flags = "--recipe smoke --task.max-length 16 --task.sizes 56 16 16 --steps 3 --threads 1 --mixers las buggy".split()
    more = ["--jobs", jobs, "--runs", runs.folder / "runs", "--out", out]
    run = runs.command(runs.folder, "compare", "atomic-cumsum", *flags, *more).wait()
    assert run.code == 1, run.said
    las, buggy = json.loads(out.read_text())
    assert las["error"] is None
    assert buggy["error"].startswith("ValueError: my bug!!!")
    assert len(buggy["error"]) == 10_000
    log = (Path(buggy["folder"]) / "log.txt").read_text()
    assert "Traceback" in log
    assert "!" * 200_000 in log


ORPHANS = """
import sys
from pathlib import Path
from longlens.training.config import load_recipe
from longlens.training.many import run_many
from longlens.training.config import Runtime

recipe = load_recipe("smoke", "atomic-cumsum", ["las"])
changes = {"task.max_length": 16, "task.sizes": (56, 16, 16), "steps": 10**9, "evaluate_every": 10**9}
configs = [recipe.resolve("atomic-cumsum", "las", {**changes, "training.seed": seed}) for seed in (0, 1)]
run_many(configs, Runtime(runs=Path(sys.argv[1]), threads=1, log_every=1, checkpoint_every=10**9), jobs=2)
"""


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.faults
def test_runs_save_and_end_when_the_process_that_started_them_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path / "runs")], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: sum(path.stat().st_size > 0 for path in tmp_path.glob("runs/*/*/*/metrics.jsonl")) == 2)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    folders = list(tmp_path.glob("runs/*/*/*"))

    def free():
        try:
            for folder in folders:
                with FileLock(folder / ".lock", timeout=0):
                    pass
        except Timeout:
            return False
        return True

    wait_for(free)
    for folder in folders:
        assert len(list((folder / "checkpoints").iterdir())) == 1, (folder / "log.txt").read_text()
        assert read_result(folder) is None


def test_a_request_is_one_line(tiny):
    request = RunRequest(tiny.config(), Runtime(runs=Path("a\nb")), Path("c\nd"), False)
    assert "\n" not in request.to_json()
