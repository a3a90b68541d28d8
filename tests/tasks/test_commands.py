"""``longlens data`` as a user meets it."""

import os
import subprocess
import sys

import numpy as np
import pytest

from longlens.cli import main
from longlens.tasks.base import list_tasks

SMALL = ["--sizes", "20", "4", "4", "--min-length", "5", "--max-length", "30"]


def run(capsys, *arguments):
    """Exit code, output and errors of a command."""
    code = 0
    try:
        main(["data", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_names_every_task_and_every_set(capsys, home):
    run(capsys, "prepare", "listops", *SMALL)
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert all(name in out for name in list_tasks())
    assert "listops-" in out
    assert str(home) in out


def test_prepare_says_what_there_is(capsys):
    code, out, _ = run(capsys, "prepare", "listops", *SMALL)
    assert code == 0
    assert "20 / 4 / 4 samples (train / valid / test), up to 30 × 18 symbols" in out
    assert "made in" in out
    assert "was there already" in run(capsys, "prepare", "listops", *SMALL)[1]
    assert "made in" in run(capsys, "prepare", "listops", *SMALL, "--force")[1]
    assert "nothing is stored" in run(capsys, "prepare", "atomic-select")[1]


def test_verify_finds_damage(capsys, home):
    assert run(capsys, "verify")[0] == 2
    run(capsys, "prepare", "listops", *SMALL)
    assert run(capsys, "verify")[0] == 0
    assert run(capsys, "verify", "listops")[0] == 0
    code, _, err = run(capsys, "verify", "mnist")
    assert (code, "no prepared set of mnist" in err) == (2, True)
    file = next((home / "sets").glob("*/test.values.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    code, out, _ = run(capsys, "verify")
    assert code == 1
    assert "test.values.npy was changed" in out
    (file.parent / "meta.json").write_text("not json")
    code, out, _ = run(capsys, "verify")
    assert code == 1
    assert "is damaged" in out
    run(capsys, "prepare", "listops", *SMALL, "--force")
    assert run(capsys, "verify")[0] == 0


def test_show_draws_trees(capsys):
    code, out, _ = run(capsys, "show", "listops", *SMALL, "--count", "3", "--split", "valid")
    assert code == 0
    assert out.count("sample") == 3
    assert "\n  " in out
    code, _, err = run(capsys, "show", "listops", *SMALL, "--first", "20")
    assert (code, "first must be at most 19" in err) == (2, True)
    code, _, err = run(capsys, "show", "listops", *SMALL, "--out", "x.png")
    assert (code, "are not pictures" in err) == (2, True)


def test_show_writes_pictures(capsys, tmp_path):
    from PIL import Image

    path = tmp_path / "new" / "sheet.png"
    options = ["--size", "16", "--contour", "5", "--distractors", "1", "--sizes", "20", "4", "4"]
    code, out, _ = run(capsys, "show", "pathfinder", *options, "--out", str(path))
    assert code == 0
    assert "20 samples of pathfinder" in out
    assert Image.open(path).size[0] > 1000


def test_show_every_task_that_needs_no_data(capsys):
    for name in ("atomic-select", "atomic-cummax", "atomic-cumsum"):
        code, out, _ = run(capsys, "show", name, "--max-length", "8")
        assert code == 0
        assert "target" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "lisops"], "did you mean 'listops'?"),
        (["prepair"], "did you mean 'prepare'?"),
        (["prepare", "listops", "--max-args", "1"], "max_args must be a whole number of at least 2, got 1"),
        (["prepare", "listops", "--workers", "0"], "workers must be a whole number of at least 1"),
        (["prepare", "listops", "--from", "there"], "leave out --from"),
        (["prepare", "smnist", "--from", "/nowhere"], "there is no folder or archive /nowhere"),
        (["prepare", "files", "--path", "/nowhere"], "there is no file or folder /nowhere"),
        (["prepare", "listops", "--max-args", str(10**30)], "max_args must be"),
        (["prepare", "pathfinder", "--size", "100000"], "size must be a whole number from 4 to 512, got 100000"),
        (["prepare", "text", "--from", "~nosuchuser"], "there is no such user"),
        (["show", "pathfinder", "--sizes", "3", "2", "2"], "each an even number"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_help_and_listing_do_not_import_torch():
    code = """
import sys
from longlens.cli import main
for arguments in (["data", "list"], ["data", "prepare", "listops", "--help"]):
    try:
        main(arguments)
    except SystemExit:
        pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)


def test_a_damaged_set_does_not_hide_the_others(capsys, home):
    run(capsys, "prepare", "listops", *SMALL)
    run(capsys, "prepare", "listops", *SMALL, "--seed", "1")
    next((home / "sets").glob("*/meta.json")).write_text("{")
    (home / "sets" / "path-x-1.parts").mkdir()
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert "damaged" in out
    assert "20 / 4 / 4" in out
    assert "unfinished" in out


def test_verify_knows_sets_by_their_tasks(capsys, real_data):
    source = real_data("text8")
    run(capsys, "prepare", "text8", "--stand-in", "--from", str(source))
    assert run(capsys, "verify", "text8")[0] == 0
    assert run(capsys, "verify", "text")[0] == 2  # not text8


def test_a_source_that_is_not_there_where_the_set_is(capsys):
    run(capsys, "prepare", "listops", *SMALL)
    code, _, err = run(capsys, "prepare", "listops", *SMALL, "--from", "/nonexistent")
    assert (code, "leave out --from" in err) == (2, True)


def test_a_home_of_nobody(capsys, monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", "~nosuchuser")
    for arguments in (["list"], ["verify"], ["prepare", "listops", *SMALL], ["show", "listops", *SMALL]):
        code, _, err = run(capsys, *arguments)
        assert (code, err.count("\n"), "there is no such user" in err) == (2, 1, True)


@pytest.mark.parametrize("damage", ["labels", "empty", "header", "meta"])
def test_a_damaged_set_is_not_used(capsys, home, damage):
    """Shown, prepared (without --force) or listed: one line, and what to do."""
    run(capsys, "prepare", "listops", *SMALL)
    (folder,) = (path for path in (home / "sets").iterdir() if path.is_dir())
    if damage == "labels":  # of the same shape
        labels = np.load(folder / "train.labels.npy")
        np.save(folder / "train.labels.npy", (labels + 1) % 10)
    elif damage == "meta":
        (folder / "meta.json").write_text("[" * 100_000)
    else:
        file = folder / "train.values.npy"
        file.write_bytes(b"" if damage == "empty" else b"\x93NUMPY" + b"(" * 200)
    for arguments in (["show", "listops", *SMALL], ["prepare", "listops", *SMALL]):
        code, _, err = run(capsys, *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert "is damaged" in err
        assert "--force" in err
    assert run(capsys, "list")[0] == 0
    assert run(capsys, "verify")[0] == 1
    assert run(capsys, "prepare", "listops", *SMALL, "--force")[0] == 0
    assert run(capsys, "show", "listops", *SMALL)[0] == 0


def test_a_task_that_lacks_something_is_told_in_one_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from longlens.tasks.base import Task, register\n\n@register('parity')\nclass Parity(Task):\n    pass\n"
    )
    environment = os.environ | {"LONGLENS_IMPORT": str(tmp_path / "mine.py")}
    done = subprocess.run(
        [sys.executable, "-m", "longlens", "data", "list"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "task 'parity' must say its summary" in done.stderr
    assert done.stderr.count("\n") == 1
