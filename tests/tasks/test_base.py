"""What a class must have to be a task, what its options are called, and where its data is."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from longlens.data.datasets import Samples
from longlens.data.store import CacheError
from longlens.errors import BadInput
from longlens.options import options_of
from longlens.tasks.base import REGISTRY, StoredTask, Task, create_task, find_task, list_tasks, register


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
    with pytest.raises(BadInput, match=r"an option 'width' only with @dataclass\(frozen=True, kw_only=True\)"):
        register("parity")(dataclass(frozen=True)(type("Parity", (Complete,), dict(vars(Parity)))))
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
    ("pathfinder", ()): "pathfinder-bd65eef208e1",
    ("pathfinder", (("release", True),)): "pathfinder-6f7faa15dc74",
    ("path-x", ()): "path-x-c794883b8290",
    ("smnist", ()): "mnist-cae19871de2d",
    ("image", ()): "image-d7aecfc2a360",
    ("text", ()): "text-chars-fd260f8633b2",
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


def own(drawn=None):
    members = {"name": "own", "spec": None, "load": None, "picture": lambda *_: drawn}
    return type("Own", (Bare,), members)()


TOKENS = Samples(np.arange(40)[None].repeat(2, axis=0), np.array([5, 40]), np.array([1, 0]))
PAIR = Samples(np.arange(80).reshape(2, 2, 20), np.array([[2, 3], [1, 1]]), np.array([1, 0]))
CURVE = Samples(np.arange(36, dtype=np.float32).reshape(1, 12, 3) / 8, np.array([12]), np.float32([0.5]))


@pytest.mark.parametrize(
    ("samples", "row", "shown"),
    [
        (TOKENS, 0, "[0 1 2 3 4]\ntarget 1"),
        (TOKENS, 1, f"[ {' '.join(map(str, [*range(16), '...', *range(24, 40)]))}]\ntarget 0"),
        (PAIR, 0, "[0 1]\n[20 21 22]\ntarget 1"),
        (CURVE, 0, "[[0. 0.125 0.25 ] [0.375 0.5 0.625] ... [3.75 3.875 4. ] [4.125 4.25 4.375]]\ntarget 0.5"),
    ],
    ids=["tokens", "many", "pair", "channels"],
)
def test_a_sample_is_shown_on_a_line_and_its_target_on_another(samples, row, shown):
    assert own().render(samples, row) == shown
    assert own(np.ones((2, 2))).render(samples, row) == shown.splitlines()[-1]
