"""Many runs on a Ray cluster and on this machine: one that fails does not stop the others."""

import json
import signal

import pytest
from filelock import FileLock

from longlens.errors import BadInput
from longlens.integrations.ray import check_address


def sweep(runs, name, *flags):
    out = runs.folder / "out.json"
    out.unlink(missing_ok=True)
    arguments = [
        *"sweep atomic-cumsum --recipe smoke --task.max-length 16 --task.sizes 56 16 16 --steps 6".split(),
        *"--clip None --threads 1 --grid lr=1e-3,3e-3,1e9,1e-2".split(),
    ]
    run = runs.command(runs.folder / name, *arguments, "--runs", runs.folder / "runs", "--out", out, *flags).wait(240)
    return run, json.loads(out.read_text()) if out.exists() else []


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_three_runs_of_four_end_and_are_not_run_again(runs, compare, engine):
    if engine == "ray":
        pytest.importorskip("ray")
    flags = ["--engine", "ray"] if engine == "ray" else ["--jobs", "2"]
    run, rows = sweep(runs, "first", *flags)
    assert run.code == 1, run.said
    assert [row["config"]["training.lr"] for row in rows] == [1e-3, 3e-3, 1e9, 1e-2]
    assert [row["error"] is None for row in rows] == [True, True, False, True]
    assert [row["result"] is None for row in rows] == [False, False, True, False]
    assert "the loss is nan at step" in rows[2]["error"]
    assert "seed 0 failed: the loss is nan at step" in run.printed
    whole = runs.undisturbed("--steps", "6", "--clip", "None", "--evaluate-every", "20")
    assert rows[1]["result"]["test"] == compare.result(whole)["test"]

    results = sorted(runs.folder.glob("runs/*/*/*/result.json"))
    assert len(results) == 3
    before = [path.stat().st_mtime_ns for path in results]
    environments = [len(json.loads(path.read_text())) for path in runs.folder.glob("runs/*/*/*/environment.json")]
    assert environments == [1] * 4
    run, again = sweep(runs, "again", *flags)
    assert run.code == 1
    assert [row["result"] for row in again] == [row["result"] for row in rows]
    assert [path.stat().st_mtime_ns for path in results] == before
    environments = [len(json.loads(path.read_text())) for path in runs.folder.glob("runs/*/*/*/environment.json")]
    assert sorted(environments) == [1, 1, 1, 2], "only the one that failed was tried again"


@pytest.mark.slow
def test_an_address_is_for_ray_only(runs):
    run, _ = sweep(runs, "first", "--address", "localhost:1")
    assert run.code == 2
    assert "address is that of a Ray cluster: choose the engine ray, or leave it out" in run.said


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "[::1]:{port}"])
def test_an_address_where_nobody_listens_is_a_sentence(address, free_port):
    address = address.format(port=free_port)
    with pytest.raises(
        BadInput, match=r"no Ray cluster answers at .* \(.*\): start one there, or leave the address out"
    ):
        check_address(address)


def test_an_address_that_never_answers_is_given_up_after_ten_seconds(monkeypatch):
    waited = []

    def connect(place, timeout):
        waited.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr("socket.create_connection", connect)
    with pytest.raises(BadInput, match=r"no Ray cluster answers at 10.0.0.1:6379 \(timed out\)"):
        check_address("10.0.0.1:6379")
    assert waited == [10.0]


@pytest.mark.parametrize("address", ["nowhere", ":1", "host:", "host:0", "host:70000", "host:port"])
def test_an_address_that_is_none_is_a_sentence(address):
    with pytest.raises(BadInput, match="address must be HOST:PORT, ray://HOST:PORT or auto, got"):
        check_address(address)
    for good in (None, "auto", "local"):
        check_address(good)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_signal_saves_the_runs_on_ray(runs):
    """They would take days: none ends before the signal, however slow the machine is."""
    pytest.importorskip("ray")
    arguments = [
        *"sweep atomic-cumsum --recipe smoke --task.max-length 16 --task.sizes 56 16 16 --steps 1000000000".split(),
        *"--checkpoint-every 1000000 --evaluate-every 1000000 --log-every 1 --threads 1".split(),
        *["--grid", "lr=1e-3,3e-3", "--engine", "ray", "--runs", runs.folder / "runs"],
    ]
    run = runs.command(runs.folder / "first", *arguments)
    run.wait_for(lambda: any(path.stat().st_size for path in runs.folder.glob("runs/*/*/*/metrics.jsonl")), 180)
    run.signal(signal.SIGTERM)
    run.wait(240)
    assert run.code == 75, run.said
    assert "the same command resumes" in run.said
    saved = list(runs.folder.glob("runs/*/*/*/checkpoints/*/SHA256SUMS"))
    assert saved, [path.read_text() for path in runs.folder.glob("runs/*/*/*/log.txt")]
    for folder in runs.folder.glob("runs/*/*/*/"):
        with FileLock(folder / ".lock", timeout=0):  # nobody is at work in it
            assert not (folder / "result.json").exists()
