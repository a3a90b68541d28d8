"""Tasks by their names, their options, and what a class must have to be one."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from longlens.data.store import CacheError
from longlens.errors import BadInput
from longlens.options import options_of
from longlens.tasks.base import REGISTRY, StoredTask, Task, create_task, find_task, list_tasks, register
from longlens.tasks.mnist import PermutedMnist


def test_unknown_tasks_and_options():
    with pytest.raises(ValueError, match="unknown task 'pathfindr'; did you mean 'pathfinder'"):
        create_task("pathfindr")
    with pytest.raises(ValueError, match="unknown task 'zzz'; choose from atomic-cumsum"):
        create_task("zzz")
    with pytest.raises(ValueError, match="level must be chars or bytes, got words"):
        create_task("text", level="words")
    with pytest.raises(ValueError, match="needs the option 'path'"):
        create_task("files")


def test_all_tasks_of_the_design_are_there():
    names = (
        "listops text retrieval image pathfinder path-x smnist pmnist atomic-select atomic-cummax atomic-cumsum "
        "text8 enwik8 wikitext-103 wikitext-2 files"
    )
    assert set(list_tasks()) >= set(names.split())
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
says = {"spec": None, "load": None, "summary": "mine", "origin": "here", "head": "classify", "metric": "accuracy"}
for name in ("listops", "smnist"):
    try:
        register(name)(type("Mine", (Task,), says))
    except ValueError as error:
        assert f"there is a task {name!r} already" in str(error)
    else:
        raise AssertionError("taken twice")
register("mine")(type("Mine", (Task,), says))
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
    assert create_task("listops", **json.loads(json.dumps(task.values()))) == task
    with pytest.raises(BadInput, match="min_length must be a whole number of at least 0, got many"):
        create_task("listops", min_length="many")
    with pytest.raises(ValueError, match="sizes must be 3 values, each a whole number of at least 1, got 5"):
        create_task("atomic-cumsum", sizes=5)


def test_titles_and_folder_names_say_what_was_changed():
    assert create_task("listops").title == create_task("listops").slug == "listops"
    task = create_task("listops", sizes=(10, 2, 2), release=True)
    assert task.title == "listops (sizes=(10, 2, 2), release)"
    assert task.slug == "listops-release"
    assert create_task("text8", stand_in=True).title == "text8 (stand-in)"


class Bare(Task):
    summary: ClassVar[str] = "sums"
    origin: ClassVar[str] = "generated"
    head: ClassVar[str] = "classify"
    metric: ClassVar[str] = "accuracy"


class Complete(Bare):
    spec = load = None  # pyright: ignore


@pytest.mark.parametrize("missing", ["summary", "origin", "head", "metric"])
@pytest.mark.parametrize("value", [None, "", 5])
def test_a_class_that_lacks_something_is_refused(missing, value):
    with pytest.raises(BadInput, match=f"task 'parity' must say its {missing}: set {missing}.* in Parity"):
        register("parity")(type("Parity", (Complete,), {missing: value}))
    with pytest.raises(BadInput, match="unknown task 'parity'"):
        find_task("parity")


def test_a_class_that_is_no_task_or_no_dataclass_is_refused(monkeypatch):
    with pytest.raises(BadInput, match=r"task 'parity' must be a class derived from .*Task, got int"):
        register("parity")(int)

    class Parity(Complete):
        width: int = 5

    with pytest.raises(
        BadInput, match=r"an option 'width' only with @dataclass\(frozen=True, kw_only=True\) above Parity"
    ):
        register("parity")(Parity)
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    monkeypatch.setattr(REGISTRY, "homes", dict(REGISTRY.homes))
    register("parity")(dataclass(frozen=True, kw_only=True)(Parity))
    assert create_task("parity", width=7).title == "parity (width=7)"


def test_a_class_without_its_methods_is_refused():
    with pytest.raises(BadInput, match="task 'parity' must define load, spec in Bare"):
        register("parity")(Bare)


def test_every_option_has_a_description_that_stands_alone():
    for name in list_tasks():
        for option in options_of(find_task(name)).values():
            assert option.help[:1].isupper(), (name, option.name)
            assert option.help.endswith("."), (name, option.name)
            assert option.help.split()[0] not in ("Of", "And", "Which"), (name, option.name)


def test_length_has_one_name():
    for name in list_tasks():
        names = options_of(find_task(name)).keys()
        assert not names & {"length", "context"}, name


def test_a_path_or_a_name_prepares_nothing(home):
    for name in list_tasks():
        task = create_task(name, **({"path": str(home.parent)} if name == "files" else {}))
        assert name in task.title
        assert name in task.slug
        if isinstance(task, StoredTask) and name != "files":
            assert task.folder().parent == home / "sets"
            assert not task.is_prepared()
    assert not home.exists()


# Folders in which people have prepared sets: a change of these would make all of them again.
FOLDERS = {
    ("listops", ()): "listops-74ec0939a988",
    ("listops", (("release", True),)): "listops-48c8c6385150",
    ("pathfinder", ()): "pathfinder-d2af4752d7cc",
    ("pathfinder", (("release", True),)): "pathfinder-6f7faa15dc74",
    ("path-x", ()): "path-x-1844fa300766",
    ("smnist", ()): "mnist-cae19871de2d",
    ("image", ()): "image-d7aecfc2a360",
    ("text", ()): "text-chars-4bb8edace0e2",
    ("text", (("level", "bytes"),)): "text-bytes-d29d8f17b501",
    ("retrieval", ()): "retrieval-27c8a85899ed",
    ("text8", ()): "text8-98226d8f7c5f",
    ("text8", (("stand_in", True), ("max_length", 64))): "text8-stand-in-b8e8a40319ce",
    ("wikitext-2", ()): "wikitext-2-557e182535ab",
    ("wikitext-103", ()): "wikitext-103-989a5b1afb91",
}


@pytest.mark.parametrize(("name", "options"), FOLDERS)
def test_sets_stay_where_they_are(name, options):
    assert create_task(name, **dict(options)).folder().name == FOLDERS[name, options]


def test_a_set_that_changed_on_disk_is_neither_trained_on_nor_named(home):
    options = {"sizes": (20, 4, 4), "min_length": 5, "max_length": 30}
    before = create_task("listops", **options).fingerprint()
    assert before == "4576c37c7437a6ddf8da208125f9634303aa066d13a9a23a30e7dd9ef3a57ad5"
    file = create_task("listops", **options).folder() / "train.labels.npy"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([(data[-1] + 1) % 10]))
    for use in (
        lambda task: task.fingerprint(),
        lambda task: task.split("test"),
        lambda task: task.batches("train", 2),
    ):
        with pytest.raises(
            CacheError, match=r"damaged: train.labels.npy: it was changed after it was written; make it"
        ):
            use(create_task("listops", **options))
    file.write_bytes(data)
    assert create_task("listops", **options).fingerprint() == before
