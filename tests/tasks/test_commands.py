"""``longlens data`` as a user meets it."""

import json
import subprocess
import sys

import pytest

from longlens.cli import main
from longlens.tasks.base import create_task, list_tasks, register, task_class, task_options
from longlens.tasks.mnist import PermutedMnist

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
    """Also where the file of the task has not been imported yet."""
    code = """
from longlens.tasks.base import Task, register
for name in ("listops", "smnist"):
    try:
        register(name)(type("Mine", (Task,), {}))
    except ValueError as error:
        assert f"there is a task {name!r} already" in str(error)
    else:
        raise AssertionError("taken twice")
register("mine")(type("Mine", (Task,), {}))
from longlens.tasks.mnist import SequentialMnist
assert SequentialMnist.name == "smnist"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ValueError, match="there is a task 'smnist' already"):
        register("smnist")(PermutedMnist)
    assert PermutedMnist.name == "pmnist"


def test_options_are_what_their_fields_want():
    task = create_task("listops", max_length=1500.0, seed="3", sizes=[10, 2, 2])
    assert task == create_task("listops", max_length=1500, seed=3, sizes=(10, 2, 2))
    assert create_task("listops", **json.loads(json.dumps(task_options(task)))) == task
    with pytest.raises(
        ValueError, match="min_length is 'many', which is not possible: input should be a valid integer"
    ):
        create_task("listops", min_length="many")
    with pytest.raises(ValueError, match="sizes is 5, which is not possible"):
        create_task("atomic-cumsum", sizes=5)


def test_titles_and_folder_names_say_what_was_changed():
    assert create_task("listops").title == create_task("listops").slug == "listops"
    task = create_task("listops", sizes=(10, 2, 2), release=True)
    assert task.title == "listops (sizes=(10, 2, 2), release)"
    assert task.slug == "listops-release"
    assert create_task("text8", stand_in=True).title == "text8 (stand-in)"


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
