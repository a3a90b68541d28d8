"""Files are there whole or not at all."""

import json
import os

import pytest

from longlens.errors import BadInput
from longlens.files import check_out, read_json, sha256, write_atomic, write_json


def test_a_file_is_written_whole(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, "text")
    write_atomic(path, b"other")
    assert path.read_bytes() == b"other"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_it_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "usual").write_text("")
    write_atomic(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_a_symbolic_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "link").symlink_to("theirs")
    write_atomic(tmp_path / "link", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "link").read_text() == "ours"
    assert not (tmp_path / "link").is_symlink()


def test_json_that_was_written_is_read(tmp_path):
    values = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    write_json(tmp_path / "a.json", values)
    assert read_json(tmp_path / "a.json") == values == json.loads((tmp_path / "a.json").read_text())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"1" * 5_000, "cannot be read as JSON"),
    ],
    ids=range(5),
)
def test_damaged_json_is_one_sentence(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        read_json(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_json(tmp_path):
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_json(tmp_path)


def test_a_missing_file_is_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "a.json")


def test_a_checksum(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_where_results_go(tmp_path):
    assert check_out(None) is None
    assert check_out(tmp_path / "new" / "folder" / "x.json") == tmp_path / "new" / "folder" / "x.json"
    assert (tmp_path / "new" / "folder").is_dir()
    with pytest.raises(BadInput, match=r"out must be a file, and .* is a folder"):
        check_out(tmp_path)
    with pytest.raises(BadInput, match=r"out must be a file, and /dev/null is a device or a pipe"):
        check_out(type(tmp_path)("/dev/null"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cannot write .*: (Not a directory|File exists)"):
        check_out(tmp_path / "file" / "x.json")


@pytest.mark.parametrize("closed", [".", "x.json"])
def test_neither_the_file_nor_its_folder_may_be_closed(tmp_path, monkeypatch, closed):
    (tmp_path / "x.json").write_text("")
    assert check_out(tmp_path / "x.json")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / closed)  # which is always true for root
    with pytest.raises(BadInput, match=r"cannot write .*x.json: permission denied"):
        check_out(tmp_path / "x.json")
