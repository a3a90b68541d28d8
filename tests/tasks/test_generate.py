"""Generated sets: the same bytes from any number of processes, whoever is killed in between."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from longlens.tasks.base import create_task
from longlens.tasks.generate import Block, GeneratedTask, _make_part
from longlens.tasks.store import CacheError, parts_folder

SMALL = {"sizes": (2500, 300, 200), "min_length": 5, "max_length": 80, "max_depth": 5}


def digests(task):
    return {name: facts["sha256"] for name, facts in task.prepared.meta["files"].items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The checksums that one process gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGLENS_HOME", str(tmp_path_factory.mktemp("home")))
        task = create_task("listops", **SMALL)
        task.prepare(workers=1)
        return digests(task)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_processes_gives_the_same_bytes(expected, workers):
    task = create_task("listops", **SMALL)
    task.prepare(workers=workers)
    assert digests(task) == expected
    assert not parts_folder(task.folder()).exists()


def test_sizes_are_exact_and_no_sample_is_repeated():
    """About 3000 different expressions are so short that random ones repeat often; the splits share none of them."""
    task = create_task("listops", sizes=(800, 100, 100), min_length=0, max_length=6, max_depth=2)
    seen = set()
    for name, size in zip(("train", "valid", "test"), task.sizes, strict=True):
        split = task.split(name)
        assert len(split) == size
        samples = split.take(np.arange(size))
        seen |= {row[:length].tobytes() for row, length in zip(samples.inputs, samples.lengths, strict=True)}
    assert len(seen) == 1000


def test_more_samples_than_there_are(home):
    task = create_task("listops", sizes=(1000, 10, 10), min_length=0, max_length=5, max_depth=2)
    with pytest.raises(ValueError, match="only about 400 different samples"):
        task.prepare(workers=1)
    assert [path.suffix for path in (home / "sets").iterdir()] == [".lock"]


COMMAND = [sys.executable, "-m", "longlens", "data", "prepare", "listops"]
SLOWER = ["--sizes", "30000", "1000", "1000", "--min-length", "300"]


def test_a_killed_process_goes_on_where_it_was(home):
    """Killed with its workers at some moment; then the blocks that are there are not made again."""
    process = subprocess.Popen([*COMMAND, *SLOWER], start_new_session=True)
    task = create_task("listops", sizes=(30_000, 1000, 1000), min_length=300)
    parts = parts_folder(task.folder())
    deadline = time.monotonic() + 60
    while len(list(parts.glob("*.npz"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not task.is_prepared()
    first = len(list(parts.glob("*.npz")))
    assert first >= 3

    made = []

    class Counted(type(task)):
        def block(self, index):
            made.append(index)
            return super().block(index)

    counted = Counted(sizes=(30_000, 1000, 1000), min_length=300)
    assert counted.folder() == task.folder()
    counted.prepare(workers=1)
    assert len(made) == 32 - first
    assert task.prepared.verify() == []
    labels = task.prepared.array("train", "labels")
    assert (labels[:1000] == task.block(0).labels).all()


def test_workers_stop_when_nobody_wants_their_blocks(home):
    process = subprocess.Popen([*COMMAND, *SLOWER])
    parts = parts_folder(create_task("listops", sizes=(30_000, 1000, 1000), min_length=300).folder())
    deadline = time.monotonic() + 60
    while not list(parts.glob("*.npz")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    time.sleep(2)
    before = len(list(parts.glob("*.npz")))
    time.sleep(1)
    assert len(list(parts.glob("*.npz"))) == before < 32


def test_a_damaged_part_is_made_again(expected):
    task = create_task("listops", **SMALL)
    parts = parts_folder(task.folder())
    parts.mkdir(parents=True)
    _make_part(task, parts, 1)
    (parts / "000000.npz").write_bytes(b"not a part")
    task.prepare(workers=1)
    assert digests(task) == expected


def test_two_commands_at_once_give_one_set(home, expected):
    options = ["--sizes", "2500", "300", "200", "--min-length", "5", "--max-length", "80", "--max-depth", "5"]
    processes = [subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    for process in processes:
        process.stdout.close()
    assert digests(create_task("listops", **SMALL)) == expected


@dataclass(frozen=True, kw_only=True)
class Failing(GeneratedTask):
    sizes: tuple[int, int, int] = (50, 10, 10)
    kind: str = "value"

    name: ClassVar[str] = "failing"
    block_size: ClassVar[int] = 10
    summary: ClassVar[str] = "fails"

    def block(self, index):
        if index == 3:
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"value": ValueError, "cache": CacheError, "other": KeyError}[self.kind]("of block 3")
        return Block(np.full(10, index, np.uint8), np.ones(10, np.int64), np.zeros(10, np.uint8))

    spec = load = None  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("value", ValueError, "^of block 3$"),
        ("cache", CacheError, "^of block 3$"),
        ("other", ChildProcessError, "KeyError: 'of block 3'; run the same command again"),
        ("killed", ChildProcessError, "it was killed; run the same command again"),
    ],
)
def test_what_stops_a_worker_is_told(monkeypatch, kind, error, message):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setattr(Failing, "__module__", "test_generate")
    task = Failing(kind=kind)
    with pytest.raises(error, match=message):
        task.prepare(workers=2)
    assert not task.is_prepared()


def test_generated_sets_import_nothing(tmp_path):
    with pytest.raises(ValueError, match="leave out --from"):
        create_task("listops").prepare(tmp_path)
