"""The cache: whole or not at all, however it ends, and however many want it at once."""

import errno
import multiprocessing
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from longlens.tasks import store
from longlens.tasks.store import CacheError, Prepared, Writer, prepare

RECIPE = {"task": "numbers", "count": 3}


def build(writer: Writer):
    writer.append("train", "values", np.arange(6, dtype=np.uint8).reshape(3, 2))
    writer.append("train", "values", np.arange(4, dtype=np.uint8).reshape(2, 2))
    writer.append("train", "labels", np.array([1.5, 2.5]))
    return {"sizes": {"train": 5}}


def names(home: Path) -> list[str]:
    """What is in the cache, but for locks."""
    return sorted(path.name for path in (home / "sets").iterdir() if path.suffix != ".lock")


def test_arrays_come_back_memory_mapped_and_readable_by_numpy():
    prepared = prepare("numbers", RECIPE, build)
    values = prepared.array("train", "values")
    assert isinstance(values, np.memmap)
    assert values.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert values.dtype == np.uint8
    assert np.load(prepared.folder / "train.labels.npy").tolist() == [1.5, 2.5]
    assert prepared.details == {"sizes": {"train": 5}}
    assert prepared.verify() == []


def test_a_set_is_made_once_and_again_by_force():
    calls = []

    def counted(writer):
        calls.append(1)
        return build(writer)

    for _ in range(3):
        prepare("numbers", RECIPE, counted)
    assert len(calls) == 1
    prepare("numbers", RECIPE, counted, force=True)
    assert len(calls) == 2


def test_another_recipe_is_another_set():
    folders = {store.set_folder("numbers", recipe) for recipe in (RECIPE, RECIPE | {"count": 4}, RECIPE | {"more": 1})}
    assert len(folders) == 3
    reordered = dict(reversed(RECIPE.items()))
    assert store.set_folder("numbers", reordered) == store.set_folder("numbers", RECIPE)


@pytest.mark.parametrize("error", [ValueError("bad data"), KeyboardInterrupt(), MemoryError()])
def test_nothing_is_left_of_a_set_that_failed(home, error):
    def failing(writer):
        build(writer)
        raise error

    with pytest.raises(type(error)):
        prepare("numbers", RECIPE, failing)
    assert names(home) == []
    assert prepare("numbers", RECIPE, build).verify() == []


def test_a_failed_replacement_keeps_what_was_there():
    prepare("numbers", RECIPE, build)

    def failing(writer):
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        prepare("numbers", RECIPE, failing, force=True)
    assert prepare("numbers", RECIPE, build).verify() == []


def test_a_replacement_that_cannot_be_renamed_keeps_what_was_there(monkeypatch):
    prepared = prepare("numbers", RECIPE, build)
    rename = Path.rename

    def refuse(self, target):
        if self.name.endswith(".new"):
            raise PermissionError(errno.EACCES, "in use")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(CacheError, match="in use"):
            prepare("numbers", RECIPE, build, force=True)
    assert Prepared(prepared.folder).verify() == []


def test_a_set_whose_replacement_was_killed_is_found_again():
    folder = prepare("numbers", RECIPE, build).folder
    folder.rename(folder.with_name(f"{folder.name}.old"))

    def failing(writer):
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        prepare("numbers", RECIPE, failing, force=True)
    assert Prepared(folder).verify() == []


def test_readers_do_not_notice_a_replacement():
    prepared = prepare("numbers", RECIPE, build)
    before = prepared.array("train", "values")
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            prepare("numbers", RECIPE, build, force=True)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(300):
            assert Prepared(prepared.folder).array("train", "values").sum() == 21
    finally:
        stop.set()
        thread.join()
    assert before.sum() == 21


def test_leftovers_of_a_killed_process_are_removed(home):
    folder = store.set_folder("numbers", RECIPE)
    half = folder.with_name(f"{folder.name}.new")
    half.mkdir(parents=True)
    (half / "train.values.npy").write_bytes(b"half")
    assert not store.is_prepared(folder)
    prepare("numbers", RECIPE, build)
    assert names(home) == [folder.name]


def _prepare_slowly(home: str, log: str) -> None:
    os.environ["LONGLENS_HOME"] = home

    def slow(writer):
        with open(log, "a") as file:
            file.write("made\n")
        import time

        time.sleep(0.5)
        return build(writer)

    assert prepare("numbers", RECIPE, slow).array("train", "values").sum() == 21


def test_two_processes_make_it_once(home, tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_prepare_slowly, args=(str(home), str(log))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "made\n"


@pytest.mark.parametrize("damage", ["cut", "header", "missing", "meta", "bits"])
def test_damage_is_found_and_force_repairs_it(damage):
    folder = prepare("numbers", RECIPE, build).folder
    file = folder / "train.values.npy"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "header":
        file.write_bytes(b"x" * 138)
    elif damage == "missing":
        file.unlink()
    elif damage == "meta":
        (folder / "meta.json").write_text('{"files": {}}')
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    if damage == "bits":  # only a checksum can tell
        assert Prepared(folder).verify() == ["train.values.npy was changed after it was written"]
    else:
        with pytest.raises(CacheError, match=r"damaged: .*--force"):
            Prepared(folder).array("train", "values")
    if damage != "meta":
        assert len(Prepared(folder).verify()) == 1
    assert prepare("numbers", RECIPE, build, force=True).verify() == []


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CacheError, match=r"cannot write to the cache folder .* set LONGLENS_HOME"):
        prepare("numbers", RECIPE, build)


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A real file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    monkeypatch.setenv("LONGLENS_HOME", str(disk / "home"))
    yield disk / "home"
    subprocess.run(["umount", disk], check=True)


def large(writer: Writer):
    for _ in range(100):
        writer.append("train", "values", np.zeros(4096, dtype=np.uint8))
    return {"sizes": {"train": 1}}


def test_a_full_disk(small_disk):
    parts = store.parts_folder(store.set_folder("large", {}))
    parts.mkdir(parents=True)
    with pytest.raises(CacheError, match="No space left on device; make room there"):
        prepare("large", {}, large)
    assert names(small_disk) == []
    assert prepare("numbers", RECIPE, build).verify() == []


def test_a_write_that_fails(home, monkeypatch):
    """The same where nothing can be mounted: the error of a full disk, from the file itself."""

    def no_room(self, piece):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store._Array, "append", no_room)
        with pytest.raises(CacheError, match="No space left on device; make room there"):
            prepare("numbers", RECIPE, build)
    assert names(home) == []


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGLENS_HOME", "~/there")
    assert store.home() == Path.home() / "there"
    monkeypatch.delenv("LONGLENS_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.home() == tmp_path / "longlens"


def test_pieces_must_fit():
    def mixed(writer):
        writer.append("train", "values", np.zeros(3, dtype=np.uint8))
        writer.append("train", "values", np.zeros(3))
        return {"sizes": {}}

    with pytest.raises(ValueError, match="a piece of float64"):
        prepare("numbers", RECIPE, mixed)
    with pytest.raises(ValueError, match="must note the sizes"):
        prepare("numbers", RECIPE, lambda writer: {})
