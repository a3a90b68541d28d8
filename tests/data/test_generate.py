"""Generated sets: the same bytes from any number of processes, whoever is killed in between."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from support.failing import Failing

from longlens.data import generate
from longlens.data.generate import _make_part
from longlens.data.store import CacheError, parts_folder
from longlens.errors import BadInput, Interrupted, LongLensError
from longlens.tasks.base import create_task

SMALL = {"sizes": (2500, 300, 200), "min_length": 5, "max_length": 80, "max_depth": 5}
SLOWER = {"sizes": (10_000, 1000, 1000), "min_length": 300}


def command(**options):
    """A process that prepares ListOps."""
    code = f"from longlens.tasks.base import create_task; create_task('listops', **{options!r}).prepare(workers=2)"
    return [sys.executable, "-c", code]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


@pytest.mark.slow
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
    with pytest.raises(ValueError, match=r"sizes must be smaller, got 1,020 .* only about 400 different ones"):
        task.prepare(workers=1)
    assert [path.suffix for path in (home / "sets").iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_killed_process_resumes_where_it_was(home):
    """Killed with its workers at some moment; then the shards that are there are not made again."""
    process = subprocess.Popen(command(**SLOWER), start_new_session=True)
    task = create_task("listops", **SLOWER)
    parts = parts_folder(task.folder())
    wait_until(lambda: len(list(parts.glob("*.npz"))) >= 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not task.is_prepared()
    first = len(list(parts.glob("*.npz")))
    assert first >= 3

    made = []

    class Counted(type(task)):
        def shard(self, index):
            made.append(index)
            return super().shard(index)

    counted = Counted(**SLOWER)
    assert counted.folder() == task.folder()
    counted.prepare(workers=1)
    assert len(made) == 12 - first
    assert task.prepared.verify() == []
    labels = task.prepared.array("train", "labels")
    assert (labels[:1000] == task.shard(0).labels).all()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path(f"/proc/{os.getpid()}/task").exists(), reason="needs /proc")
def test_workers_stop_when_nobody_wants_their_shards(home):
    process = subprocess.Popen(command(**SLOWER))
    parts = parts_folder(create_task("listops", **SLOWER).folder())
    wait_until(lambda: len(list(parts.glob("*.npz"))) > 1 and len(children(process.pid)) == 2)
    workers = children(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, workers)), seconds=20)
    assert len(list(parts.glob("*.npz"))) < 12


def test_a_damaged_part_is_made_again(expected):
    task = create_task("listops", **SMALL)
    parts = parts_folder(task.folder())
    parts.mkdir(parents=True)
    _make_part(task, parts, 1)
    (parts / "000000.npz").write_bytes(b"not a part")
    task.prepare(workers=1)
    assert digests(task) == expected


def test_nobody_else_touches_the_parts_of_a_set_that_is_made_again(tmp_path):
    """Another process uses the set, or asks for something impossible, while this one is generated by force."""
    task = create_task("listops", **SMALL)
    task.prepare(workers=1)
    parts = parts_folder(task.folder())
    parts.mkdir()
    task.prepare()
    for options in ({"workers": 0}, {"source": tmp_path, "force": True}):
        with pytest.raises(BadInput, match=r"workers must be .* at least 1 or none, got 0|leave out --from"):
            task.prepare(**options)
    assert parts.exists()


@pytest.mark.slow
def test_two_commands_at_once_give_one_set(home, expected):
    processes = [subprocess.Popen(command(**SMALL)) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert digests(create_task("listops", **SMALL)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("input", BadInput, "^of shard 3,\nand more$"),
        ("cache", CacheError, "^of shard 3,\nand more$"),
        ("memory", MemoryError, "^of shard 3,\nand more$"),
        ("bug", RuntimeError, r"(?s)Traceback .*in shard.*KeyError: 'of shard 3,"),
        (
            "SIGKILL",
            LongLensError,
            "was killed by signal 9, .* finished samples are kept, and the same command resumes",
        ),
        ("SIGINT", Interrupted, "stopped while samples were generated; finished ones are kept"),
        ("SIGTERM", Interrupted, "stopped while samples were generated; finished ones are kept"),
    ],
)
def test_what_stops_a_worker_is_told(home, kind, error, message):
    task = Failing(kind=kind)
    with pytest.raises(error, match=message):
        task.prepare(workers=2)
    assert not task.is_prepared()
    kept = {path.suffix for path in (home / "sets").iterdir()} - {".lock"}
    assert kept == (set() if kind == "input" else {".parts"})  # samples that are worth something


@pytest.mark.parametrize("kind", ["input", "bug"])
def test_what_stops_a_generator_in_this_process(home, kind):
    with pytest.raises((BadInput, KeyError)):
        Failing(kind=kind).prepare(workers=1)
    kept = {path.suffix for path in (home / "sets").iterdir()} - {".lock"}
    assert kept == (set() if kind == "input" else {".parts"})


def test_nothing_is_left_where_nothing_was_made(home, monkeypatch):
    monkeypatch.setattr(Failing, "shard", lambda self, index: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Failing().prepare(workers=1)
    assert [path.suffix for path in (home / "sets").iterdir()] == [".lock"]


def test_a_set_that_no_disk_holds_is_told_at_once(home):
    task = create_task("listops", **SMALL | {"sizes": (2**31 - 1, 2**31 - 1, 2**31 - 1)})
    with pytest.raises(CacheError, match=r"listops needs about [\d,.]+ MB in the cache folder"):
        task.prepare(workers=2)


def test_a_disk_that_is_too_small_is_told_at_once_and_what_is_finished_stays(home, monkeypatch, expected):
    task = create_task("listops", **SMALL)
    usage = namedtuple("Usage", "free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(100_000))
        with pytest.raises(
            CacheError, match=r"listops needs about 0\.\d MB in the cache folder .*, which has 0.1 MB left"
        ):
            task.prepare(workers=1)
    parts = parts_folder(task.folder())
    assert [path.name for path in parts.iterdir()] == ["000000.npz"]
    make = generate._make_part
    made = []
    monkeypatch.setattr(
        generate, "_make_part", lambda task, parts, index: made.append(index) or make(task, parts, index)
    )
    task.prepare(workers=1)
    assert made
    assert 0 not in made
    assert digests(task) == expected


OWN = """
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from longlens.data.generate import Shard
from longlens.tasks.base import Spec, register
from longlens.tasks.base import GeneratedTask

@register("own-digits")
@dataclass(frozen=True, kw_only=True)
class Digits(GeneratedTask):
    sizes: tuple[int, int, int] = (50, 10, 10)
    summary: ClassVar[str] = "digits"
    shard_size: ClassVar[int] = 10

    def shard(self, index):
        values = np.arange(10 * index, 10 * index + 10, dtype=np.uint8)
        return Shard(values, np.ones(10, np.int64), np.zeros(10, np.uint8))

    @property
    def spec(self):
        return Spec("tokens", 256, 1, self.head, 2, self.metric)

    def load(self, name, epoch):
        return self.sequences(name)
"""


@pytest.mark.slow
def test_a_task_of_ones_own_file_is_generated_by_several_processes(tmp_path, home):
    (tmp_path / "own.py").write_text(OWN)
    code = (
        "from longlens.tasks.base import create_task; task = create_task('own-digits'); task.prepare(workers=2); "
        "print(task.prepared.array('test', 'values').tolist())"
    )
    environment = os.environ | {"LONGLENS_IMPORT": str(tmp_path / "own.py")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(range(60, 70))


def test_generated_sets_import_nothing(tmp_path):
    with pytest.raises(ValueError, match="leave out --from"):
        create_task("listops").prepare(tmp_path)
