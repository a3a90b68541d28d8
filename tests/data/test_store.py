"""The cache: whole or not at all, however it ends, and however many want it at once."""

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from longlens.data import store
from longlens.data.store import CacheError, NpyWriter, Prepared, Writer, prepare
from longlens.errors import BadInput

IDENTITY = {"task": "numbers", "count": 3}


def build(writer: Writer):
    writer.append("train", values=np.arange(6, dtype=np.uint8).reshape(3, 2))
    writer.append("train", values=np.arange(4, dtype=np.uint8).reshape(2, 2))
    writer.append("train", labels=np.array([1.5, 2.5]))
    return {"sizes": {"train": 5}}


def names(home: Path) -> list[str]:
    """What is in the cache, but for locks."""
    return sorted(path.name for path in (home / "sets").iterdir() if path.suffix != ".lock")


def test_arrays_come_back_memory_mapped_and_readable_by_numpy():
    prepared = prepare("numbers", IDENTITY, build)
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
        prepare("numbers", IDENTITY, counted)
    assert len(calls) == 1
    prepare("numbers", IDENTITY, counted, force=True)
    assert len(calls) == 2


def test_another_identity_is_another_set():
    folders = {
        store.set_folder("numbers", identity)
        for identity in (IDENTITY, IDENTITY | {"count": 4}, IDENTITY | {"more": 1})
    }
    assert len(folders) == 3
    reordered = dict(reversed(IDENTITY.items()))
    assert store.set_folder("numbers", reordered) == store.set_folder("numbers", IDENTITY)


@pytest.mark.parametrize("error", [ValueError("bad data"), KeyboardInterrupt(), MemoryError()])
def test_nothing_is_left_of_a_set_that_failed(home, error):
    def failing(writer):
        build(writer)
        raise error

    with pytest.raises(type(error)):
        prepare("numbers", IDENTITY, failing)
    assert names(home) == []
    assert prepare("numbers", IDENTITY, build).verify() == []


def test_a_failed_replacement_keeps_what_was_there():
    prepare("numbers", IDENTITY, build)

    def failing(writer):
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        prepare("numbers", IDENTITY, failing, force=True)
    assert prepare("numbers", IDENTITY, build).verify() == []


def test_a_replacement_that_cannot_be_renamed_keeps_what_was_there(monkeypatch):
    prepared = prepare("numbers", IDENTITY, build)
    rename = Path.rename

    def refuse(self, target):
        if self.name.endswith(".new"):
            raise PermissionError(errno.EACCES, "in use")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(CacheError, match="in use"):
            prepare("numbers", IDENTITY, build, force=True)
    assert Prepared(prepared.folder).verify() == []


def test_a_set_whose_replacement_was_killed_is_found_again():
    folder = prepare("numbers", IDENTITY, build).folder
    folder.rename(folder.with_name(f"{folder.name}.old"))

    def failing(writer):
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        prepare("numbers", IDENTITY, failing, force=True)
    assert Prepared(folder).verify() == []
    old, new = (folder.with_name(f"{folder.name}.{age}") for age in ("old", "new"))
    shutil.copytree(folder, new)
    (new / "mark").touch()
    folder.rename(old)
    assert prepare("numbers", IDENTITY, failing).verify() == [], "nothing is made again"
    assert (folder / "mark").exists(), "the new one, which was whole"
    assert not old.exists()
    assert not new.exists()


@pytest.mark.slow
def test_readers_do_not_notice_a_replacement():
    prepared = prepare("numbers", IDENTITY, build)
    before = prepared.array("train", "values")
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            prepare("numbers", IDENTITY, build, force=True)

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
    folder = store.set_folder("numbers", IDENTITY)
    half = folder.with_name(f"{folder.name}.new")
    half.mkdir(parents=True)
    (half / "train.values.npy").write_bytes(b"half")
    assert not store.is_prepared(folder)
    prepare("numbers", IDENTITY, build)
    assert names(home) == [folder.name]


def _prepare_slowly(home: str, log: str) -> None:
    os.environ["LONGLENS_HOME"] = home

    def slow(writer):
        with open(log, "a") as file:
            file.write("made\n")
        import time

        time.sleep(0.5)
        return build(writer)

    assert prepare("numbers", IDENTITY, slow).array("train", "values").sum() == 21


@pytest.mark.slow
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


def flip(file: Path) -> None:
    """Change the last byte."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def replace_by(make):
    """Replace a file by something else."""

    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


HEADERS = {
    "changed": b"\x93NUMPY\x01\x00\x76\x00"
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (3, 2)}".ljust(117)
    + b"\n",
    "garbage": b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': (((((".ljust(117) + b"\n",
    "nested": b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 117 + b"\n",
}
DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"0"),
    "rubbish": lambda file: file.write_bytes(b"x" * 138),
    "bits": flip,
    "missing": Path.unlink,
    "folder": replace_by(Path.mkdir),
    "pipe": replace_by(os.mkfifo),
    "loop": replace_by(lambda file: file.symlink_to(file)),
    **{
        f"header {name}": lambda file, h=header: file.write_bytes(h + file.read_bytes()[128:])
        for name, header in HEADERS.items()
    },
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_array_is_found_before_it_is_used_and_force_repairs_it(damage):
    prepared = prepare("numbers", IDENTITY, build)
    damage(prepared.folder / "train.values.npy")
    for use in (lambda: Prepared(prepared.folder).array("train", "values"), lambda: Prepared(prepared.folder).check()):
        with pytest.raises(CacheError, match=r"damaged: train.values.npy: .*--force") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert len(Prepared(prepared.folder).verify()) == 1
    assert Prepared(prepared.folder).array("train", "labels").tolist() == [1.5, 2.5]
    assert Prepared(prepared.folder).size() > 0
    repaired = prepare("numbers", IDENTITY, build, force=True)
    assert repaired.verify() == []
    assert repaired.array("train", "values").sum() == 21


def edit(change):
    """Change the values of meta.json, which stays valid JSON."""

    def rewrite(file: Path) -> None:
        meta = json.loads(file.read_text())
        change(meta)
        file.write_text(json.dumps(meta))

    return rewrite


def without_checksum(change):
    """The same in a set that an older version made."""
    return edit(lambda meta: (meta.pop("sha256"), change(meta)))


METAS = {
    "cut": lambda file: file.write_text(file.read_text()[:-5]),
    "list": lambda file: file.write_text("[1, 2]"),
    "number": lambda file: file.write_text("5"),
    "incomplete": lambda file: file.write_text('{"files": {}}'),
    "nested": lambda file: file.write_text("[" * 100_000 + "]" * 100_000),
    "nested inside": edit(lambda meta: meta["details"].update(more=[[[]]])),
    "not UTF-8": lambda file: file.write_bytes(b"\xff" + file.read_bytes()),
    "folder": replace_by(Path.mkdir),
    "pipe": replace_by(os.mkfifo),
    "another count": edit(lambda meta: meta["details"]["sizes"].update(train=4)),
    "files": without_checksum(lambda meta: meta.update(files=[1])),
    "facts": without_checksum(lambda meta: meta.update(files={"train.values.npy": 5})),
    "shape": without_checksum(lambda meta: meta["files"]["train.values.npy"].update(shape="3")),
    "checksum": without_checksum(lambda meta: meta["files"]["train.values.npy"].update(sha256=5)),
    "sizes": without_checksum(lambda meta: meta["details"].update(sizes=[5])),
    "recipe": without_checksum(lambda meta: meta.update(recipe=None)),
    "elsewhere": without_checksum(lambda meta: meta["files"].update({"../x.npy": meta["files"]["train.labels.npy"]})),
}


@pytest.mark.parametrize("damage", METAS.values(), ids=METAS)
def test_a_damaged_meta_file_is_found(damage):
    folder = prepare("numbers", IDENTITY, build).folder
    damage(folder / "meta.json")
    with pytest.raises(CacheError, match=r"damaged: meta.json: .*--force") as caught:
        Prepared(folder)
    assert "\n" not in str(caught.value)
    assert prepare("numbers", IDENTITY, build, force=True).verify() == []


def test_details_have_their_types():
    prepared = prepare("numbers", IDENTITY, build)
    assert prepared.detail("sizes", dict[str, int]) == {"train": 5}
    with pytest.raises(CacheError, match=r"meta.json: sizes must be .*got"):
        prepared.detail("sizes", list[str])
    with pytest.raises(CacheError, match=r"meta.json: it has no symbols"):
        prepared.detail("symbols", list[str])


def test_a_set_that_an_older_version_made_is_read():
    folder = prepare("numbers", IDENTITY, build).folder
    without_checksum(lambda meta: None)(folder / "meta.json")
    assert Prepared(folder).array("train", "values").sum() == 21


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The names of the files whose checksums are computed."""
    names, compute = [], store.sha256
    monkeypatch.setattr(store, "sha256", lambda path: names.append(path.name) or compute(path))
    return names


def age(folder: Path) -> None:
    """Make all files old enough to be trusted."""
    for file in folder.glob("*.npy"):
        os.utime(file, ns=(10**18, 10**18))


def test_each_file_is_compared_with_its_checksum_once(monkeypatch, hashed):
    folder = prepare("numbers", IDENTITY, build).folder
    age(folder)
    monkeypatch.setattr(store, "RACY", -1)
    hashed.clear()
    Prepared(folder).check()
    assert sorted(hashed) == ["train.labels.npy", "train.values.npy"]
    for _ in range(3):
        Prepared(folder).check()
        Prepared(folder).array("train", "values")
    assert len(hashed) == 2
    os.utime(folder / "train.values.npy", ns=(10**18 + 1, 10**18 + 1))
    Prepared(folder).check()
    assert hashed[2:] == ["train.values.npy"]


def test_a_change_that_keeps_size_and_time_is_found(monkeypatch):
    monkeypatch.setattr(store, "RACY", -1)
    folder = prepare("numbers", IDENTITY, build).folder
    age(folder)
    Prepared(folder).check()
    for change in (flip, lambda file: (file.rename(file.with_suffix(".old")), file.write_bytes(b"0" * 138))):
        change(folder / "train.values.npy")
        age(folder)
        with pytest.raises(CacheError, match="was changed after it was written"):
            Prepared(folder).check()


def test_a_file_that_is_new_is_compared_again(hashed):
    """It may change within the resolution of its time."""
    folder = prepare("numbers", IDENTITY, build).folder
    hashed.clear()
    for _ in range(2):
        Prepared(folder).check()
    assert len(hashed) == 4
    assert not (folder / store.VERIFIED).exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"train.values.npy": 5}', "[" * 100_000])
def test_a_damaged_record_of_what_was_compared(monkeypatch, content):
    monkeypatch.setattr(store, "RACY", -1)
    folder = prepare("numbers", IDENTITY, build).folder
    (folder / store.VERIFIED).write_text(content)
    Prepared(folder).check()
    flip(folder / "train.labels.npy")
    with pytest.raises(CacheError, match=r"train.labels.npy: it was changed"):
        Prepared(folder).check()


def test_a_record_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(store, "RACY", -1)
    folder = prepare("numbers", IDENTITY, build).folder

    def read_only(path, value):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store, "write_json", read_only)
    Prepared(folder).check()


def test_a_linked_set_is_replaced_and_not_what_it_points_to(tmp_path, home):
    folder = prepare("numbers", IDENTITY, build).folder
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    assert Prepared(folder).verify() == []
    prepare("numbers", IDENTITY, build, force=True)
    assert not folder.is_symlink()
    assert (elsewhere / "meta.json").exists()
    assert names(home) == [folder.name]


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CacheError, match=r"cannot write to the cache folder .* set LONGLENS_HOME"):
        prepare("numbers", IDENTITY, build)


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
        writer.append("train", values=np.zeros(4096, dtype=np.uint8))
    return {"sizes": {"train": 1}}


def test_a_full_disk(small_disk):
    parts = store.parts_folder(store.set_folder("large", {}))
    parts.mkdir(parents=True)
    (parts / "000000.npz").write_bytes(b"finished")
    with pytest.raises(CacheError, match="No space left on device; make room there"):
        prepare("large", {}, large)
    assert names(small_disk) == [parts.name]
    assert (parts / "000000.npz").read_bytes() == b"finished"
    assert prepare("numbers", IDENTITY, build).verify() == []


def test_a_write_that_fails(home, monkeypatch):
    """The same where nothing can be mounted: the error of a full disk, from the file itself."""

    def no_room(self, piece):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(NpyWriter, "append", no_room)
        with pytest.raises(CacheError, match="No space left on device; make room there"):
            prepare("numbers", IDENTITY, build)
    assert names(home) == []


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGLENS_HOME", "~/there")
    assert store.home() == Path.home() / "there"
    monkeypatch.delenv("LONGLENS_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.home() == tmp_path / "longlens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.home() == tmp_path / ".cache" / "longlens"


def test_a_home_of_nobody(monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", "~nosuchuser/there")
    for use in (store.home, store.prepared_sets, lambda: prepare("numbers", IDENTITY, build)):
        with pytest.raises(
            BadInput, match="LONGLENS_HOME must be a path, got ~nosuchuser/there: there is no such user"
        ):
            use()


def test_pieces_must_fit():
    def mixed(writer):
        writer.append("train", values=np.zeros(3, dtype=np.uint8))
        writer.append("train", values=np.zeros(3))
        return {"sizes": {}}

    with pytest.raises(ValueError, match="a piece of float64"):
        prepare("numbers", IDENTITY, mixed)
    with pytest.raises(ValueError, match="must note the sizes"):
        prepare("numbers", IDENTITY, lambda writer: {})
