"""Prepared sets whose files are damaged: nothing is read from them without a word."""

import json
import shutil
from pathlib import Path

import pytest
from fuzz.cases import Case, fuzz, new_case
from fuzz.damage import Damage, contents, damages, make_beside
from fuzz.originals import META, ONE_STEP, RECORD, WholeSets
from hypothesis import strategies as st
from support.runs import result


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[int, Damage]:
    """Which file of the set, and what is done to it; meta.json half of the times."""
    place = draw(st.one_of(st.just(-1), st.integers(0, 20)))
    return place, draw(damages(to_json=place == -1))


@pytest.mark.parametrize("task", ["files", "listops", "text8"])
@pytest.mark.parametrize("command", ["list", "verify", "show", "train", "prepare"])
@fuzz(45, damage=st.lists(damaged_files(), min_size=1, max_size=2))
def test_a_damaged_set(whole_sets, task, command, damage):
    with new_case("stored sets") as case:
        shutil.copytree(whole_sets.home, case.home, dirs_exist_ok=True)
        beside = make_beside(case.folder / "beside")
        folder = case.home / "sets" / whole_sets.names[task]
        for place, how in damage:
            files = whole_sets.files[task]
            how.apply(folder / (META if place == -1 else files[place % len(files)]), beside)
        others = [beside, *(case.home / "sets" / name for name in whole_sets.names.values() if name != folder.name)]
        before = [contents(other) for other in others]
        CHECKS[command](whole_sets, task, case)
        for other, was in zip(others, before, strict=True):
            assert contents(other) | {RECORD: None} == was | {RECORD: None}, "somebody else's files"


def _list(whole: WholeSets, task: str, case: Case) -> None:
    said = case.longlens("data", "list")
    assert said.code == 0, said
    for other in whole.names.keys() - {task}:
        assert whole.names[other] in said.out, said


def _verify(whole: WholeSets, task: str, case: Case) -> None:
    folder = case.home / "sets" / whole.names[task]
    is_there = (folder / META).exists()  # otherwise it is no set
    is_whole = _checked(contents(folder)) == _checked(contents(whole.home / "sets" / whole.names[task]))
    said = case.longlens("data", "verify", may_fail=True)
    assert said.code == 1 or is_whole or not is_there, said  # any other change of meta.json may be told as well
    for other in whole.names.keys() - {task}:
        assert f"{whole.names[other]}: whole" in said.out, said


def _checked(files: dict[str, bytes | str | None]) -> list[object]:
    """What the checksums of a set are about: not its own checksum, nor other entries of meta.json."""
    said: object = files.get(META)
    try:
        meta = json.loads(said)  # type: ignore[arg-type]
        said = [meta[name] for name in ("recipe", "details", "files")]
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    return [said, {name: content for name, content in files.items() if not name.startswith((META, RECORD))}]


def _show(whole: WholeSets, task: str, case: Case) -> None:
    said = case.longlens("data", "show", task, *whole.flags[task])
    assert said.code == 2 or said.out == whole.shown[task], said


def _train(whole: WholeSets, task: str, case: Case) -> None:
    said = case.longlens("train", task, *whole.flags[task], *ONE_STEP, "run")
    assert said.code == 2 or result(Path("run")) == whole.results[task], said


def _prepare(whole: WholeSets, task: str, case: Case) -> None:
    """By force it is as it was, whatever is in its place."""
    said = case.longlens("data", "prepare", task, *whole.prepare[task], "--force")
    assert said.code == 0, said
    _show(whole, task, case)
    assert case.longlens("data", "verify", whole.names[task]).code == 0


CHECKS = {"list": _list, "verify": _verify, "show": _show, "train": _train, "prepare": _prepare}
