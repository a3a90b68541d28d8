"""The machine of a run: how many threads it takes if nobody says it, and what is remembered of it."""

import ctypes
import mmap
import multiprocessing
import resource
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import longlens
from longlens import train
from longlens.errors import BadInput
from longlens.training import machine as module
from longlens.training.machine import busy_cores, choose_threads, environment
from longlens.training.run import read_environment


def test_the_commit_of_a_checkout_is_part_of_the_environment(monkeypatch):
    found = environment(torch.device("cpu"))
    root = Path(longlens.__file__).parents[1]
    if (root / ".git").exists():
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        wanted = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        assert str(found["commit"]).removesuffix("+changes") == wanted
    else:
        assert found["commit"] is None
    assert (found["torch"], found["device"], found["longlens"]) == (torch.__version__, "cpu", longlens.__version__)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Eight cores, of which some are busy; the tests themselves may have been started with OMP_NUM_THREADS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(module, "usable_cores", lambda: 8)

    def set_busy(count):
        monkeypatch.setattr(module, "busy_cores", lambda: count)

    set_busy(0.0)
    return set_busy


@pytest.mark.parametrize(("busy", "count"), [(0.0, 8), (0.4, 8), (1.2, 7), (5.6, 2), (8.0, 1), (30.0, 1)])
def test_as_many_as_there_are_free_cores(machine, busy, count):
    machine(busy)
    found, said = choose_threads(None)
    assert found == count
    assert (said is None) == (count == 8)
    if said is not None:
        assert said == f"{count} of 8 cores as others use the machine; --threads chooses another number"


def test_what_the_user_says_comes_first(machine, monkeypatch):
    machine(5.0)
    assert choose_threads(6, 2) == (6, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(None, 2) == (5, None)
    assert choose_threads(6, 2) == (6, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    assert choose_threads(None)[0] == 3


def test_a_run_that_resumes_takes_as_many_as_before(machine):
    machine(7.0)
    assert choose_threads(None, 8) == (8, None)
    count, said = choose_threads(None, 3)
    assert count == 3
    assert said is not None
    assert "as when this run was started" in said


def test_processes_share_the_cores(machine):
    assert choose_threads(None, processes=2)[0] == 4
    machine(3.0)
    assert choose_threads(None, processes=2)[0] == 2
    assert choose_threads(None, processes=100)[0] == 1


@pytest.mark.parametrize(
    ("load", "running", "busy"), [(3.0, "5/900", 3.0), (3.0, "1/900", 0.0), (0.5, "9/900", 0.5), (3.0, "nonsense", 3.0)]
)
def test_what_has_just_ended_is_not_busy(monkeypatch, tmp_path, load, running, busy):
    """It is still in the load of the last minute, but does not run."""
    (tmp_path / "loadavg").write_text(f"{load} 1 1 {running} 1234\n")
    monkeypatch.setattr(module, "_RUNNING", tmp_path / "loadavg")
    monkeypatch.setattr("os.getloadavg", lambda: (load, 1.0, 1.0))
    assert busy_cores() == pytest.approx(busy)
    monkeypatch.setattr(module, "_RUNNING", tmp_path / "nothing")
    assert busy_cores() == load


@pytest.mark.slow
def test_a_run_says_what_it_chose_and_remembers_it(tiny, machine, capfd, monkeypatch):
    machine(6.0)
    folder = tiny.unfinished("run", 12, threads=None)
    assert "longlens: 2 of 8 cores as others use the machine" in capfd.readouterr().err
    assert [entry["threads"] for entry in read_environment(folder)] == [2]
    machine(0.0)
    tiny.train("run", threads=None)
    said = capfd.readouterr().err
    assert "2 of 8 cores as when this run was started" in said
    assert "another environment" not in said
    assert [entry["threads"] for entry in read_environment(folder)] == [2, 2]


SLURM = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}  # also of a batch script


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "RANK": "0"}, False),  # torchrun
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "8"}, False),  # the shell of salloc
        ({}, False),
    ],
)
def test_tasks_of_srun_do_not_train_beside_each_other(environment, refused, monkeypatch, tmp_path):
    for name in ("RANK", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (SLURM | environment).items():
        monkeypatch.setenv(name, value)
    if not refused:
        module.refuse_lone_tasks()
        return
    with pytest.raises(BadInput, match=r"started by srun with 8 tasks and no RANK, .* start it with torchrun"):
        train("atomic-cumsum", recipe="smoke", runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_memory_of_the_first_run_alone_is_known(monkeypatch):
    """Others would begin with what it has left."""
    monkeypatch.setattr(module.PeakMemory, "is_first", True)
    first = module.PeakMemory(torch.device("cpu"))
    monkeypatch.setattr(module.PeakMemory, "is_first", False)  # as a run that begins does
    second = module.PeakMemory(torch.device("cpu"))
    held = torch.ones(2**22)
    assert first.value() >= held.nbytes / 2
    assert second.value() is None


def _memory_of_tensors() -> tuple[int, int, int, int]:
    """Pages that 8 tensors of 64 MiB take while memory is kept, and larger ones later, which fit into no hole of
    these; bytes in use before its end, and at it."""

    def new_pages(size: int = 2**24) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            torch.ones(size)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def used() -> int:
        return module.PeakMemory(torch.device("cpu")).before

    with module.keep_memory():
        new_pages()
        kept, held = new_pages(), used()
    left = used()
    return kept, new_pages(2**26), held, left


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the memory of another C library is left alone")
def test_memory_is_kept_for_the_next_tensors_and_returned_in_the_end():
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as fresh:  # where earlier tests left no holes that would be used
        kept, after, held, left = fresh.submit(_memory_of_tensors).result()
    pages = 2**26 / mmap.PAGESIZE  # of a tensor
    assert kept < pages
    assert after > 4 * 6 * pages
    assert left < held - 2**25
