"""``longlens data`` as a user meets it."""

import subprocess
import sys

import pytest

from longlens.cli import main
from longlens.tasks.base import create_task, list_tasks, register, task_class
from longlens.tasks.mnist import SequentialMnist

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
    assert str(home) in out.replace("\n", "")


def test_prepare_says_what_there_is(capsys):
    code, out, _ = run(capsys, "prepare", "listops", *SMALL)
    assert code == 0
    assert "listops: 20 / 4 / 4 samples (train / valid / test), up to 30 × 18 symbols" in out
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
    assert (code, "no prepared set whose name begins with mnist" in err) == (2, True)
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
    assert (code, "has samples 0 to 19" in err) == (2, True)
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
        code, out, _ = run(capsys, "show", name, "--length", "8")
        assert code == 0
        assert "target" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "lisops"], "did you mean 'listops'?"),
        (["prepair"], "did you mean 'prepare'?"),
        (["prepare", "listops", "--max-args", "1"], "max_args is 1"),
        (["prepare", "listops", "--workers", "0"], "workers is 0"),
        (["prepare", "listops", "--from", "there"], "leave out --from"),
        (["prepare", "smnist", "--from", "/nowhere"], "there is no folder or archive /nowhere"),
        (["prepare", "files", "--path", "/nowhere"], "there is no file or folder /nowhere"),
        (["show", "pathfinder", "--sizes", "3", "2", "2"], "they must be even"),
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


def test_unknown_tasks_and_options():
    with pytest.raises(ValueError, match="there is no task 'pathfindr'; did you mean 'pathfinder'"):
        create_task("pathfindr")
    with pytest.raises(ValueError, match="there is no task 'zzz'; it can be listops, text"):
        create_task("zzz")
    with pytest.raises(ValueError, match="level is 'words'; it can be chars, bytes"):
        create_task("text", level="words")
    with pytest.raises(ValueError, match="needs the option 'path'"):
        create_task("files")


def test_all_tasks_of_the_design_are_there():
    names = (
        "listops text retrieval image pathfinder path-x smnist pmnist atomic-select atomic-cummax atomic-cumsum "
        "text8 enwik8 wikitext-103 wikitext-2 files"
    )
    assert list_tasks() == names.split()
    for name in list_tasks():
        chosen = task_class(name)
        assert chosen.name == name
        assert chosen.summary
        assert chosen.metric
        assert chosen.head
        assert chosen.origin


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="there is a task 'listops' already"):
        register("listops")(SequentialMnist)
