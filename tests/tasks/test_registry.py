"""Tasks by name, and their options."""

import json
import subprocess
import sys

import pytest

from longlens.tasks.base import create_task, find_task, list_tasks, register
from longlens.tasks.images import PermutedMnist


def test_unknown_tasks_and_options():
    with pytest.raises(ValueError, match="unknown task 'pathfindr'; did you mean 'pathfinder'"):
        create_task("pathfindr")
    with pytest.raises(ValueError, match="unknown task 'zzz'; choose from atomic-cumsum, atomic-cummax"):
        create_task("zzz")
    with pytest.raises(ValueError, match="level must be chars or bytes, got words"):
        create_task("text", level="words")
    with pytest.raises(ValueError, match="task 'files' needs the option 'path'"):
        create_task("files")
    with pytest.raises(ValueError, match="task 'listops' has no option 'max_lenght'; did you mean 'max_length'"):
        create_task("listops", max_lenght=30)


def test_all_tasks_of_the_design_are_there():
    names = (
        "listops text retrieval image pathfinder path-x smnist pmnist atomic-select atomic-cummax atomic-cumsum "
        "text8 enwik8 wikitext-103 wikitext-2 files"
    )
    assert sorted(list_tasks()) == sorted(names.split())
    for name in list_tasks():
        chosen = find_task(name)
        assert chosen.name == name
        assert chosen.summary
        assert chosen.metric
        assert chosen.head
        assert chosen.origin


def test_a_name_is_given_once():
    """Also where the file of the task has not been imported yet."""
    code = """
from longlens.tasks.base import Task, register
about = {"summary": "mine", "origin": "generated", "head": "classify", "metric": "accuracy", "spec": None, "load": None}
for name in ("listops", "smnist"):
    try:
        register(name)(type("Mine", (Task,), about))
    except ValueError as error:
        assert f"there is a task {name!r} already" in str(error)
    else:
        raise AssertionError("taken twice")
register("mine")(type("Mine", (Task,), about))
from longlens.tasks.images import SequentialMnist
assert SequentialMnist.name == "smnist"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ValueError, match="there is a task 'smnist' already"):
        register("smnist")(PermutedMnist)
    assert PermutedMnist.name == "pmnist"


def test_options_are_what_their_fields_want():
    task = create_task("listops", max_length=1500.0, seed="3", sizes=[10, 2, 2])
    assert task == create_task("listops", max_length=1500, seed=3, sizes=(10, 2, 2))
    assert create_task("listops", **json.loads(json.dumps(task.values()))) == task
    with pytest.raises(ValueError, match=r"min_length must be a whole number .*, got many"):
        create_task("listops", min_length="many")
    with pytest.raises(ValueError, match=r"sizes must be 3 values, .*, got 5"):
        create_task("atomic-cumsum", sizes=5)


def test_options_keep_their_old_names():
    assert create_task("atomic-cumsum", length=8) == create_task("atomic-cumsum", max_length=8)
    assert create_task("text8", context=8) == create_task("text8", max_length=8)
    with pytest.raises(ValueError, match="'max_length' once, got it and its old name 'length'"):
        create_task("atomic-cumsum", length=8, max_length=8)


def test_titles_and_folder_names_say_what_was_changed():
    assert create_task("text").title == create_task("text").slug == "text"
    assert create_task("listops").title == "listops (generated)"  # wherever its results are shown
    assert create_task("path-x", size=64).title == "path-x (generated, size=64)"
    assert create_task("listops").slug == "listops"
    task = create_task("listops", sizes=(10, 2, 2), release=True)
    assert task.title == "listops (sizes=(10, 2, 2), release)"
    assert task.slug == "listops-release"
    assert create_task("text8", stand_in=True).title == "text8 (stand-in)"
