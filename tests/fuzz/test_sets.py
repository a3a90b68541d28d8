"""Prepared sets whose files are damaged: nothing is read from them without a word."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from fuzz.cases import Said, _call, fuzz, new_case
from fuzz.damage import Damage, contents, damages, make_beside
from hypothesis import strategies as st
from support.runs import result

TRAIN = "--recipe smoke --steps 1 --batch-size 4 --evaluate-every 1 --threads 1 --folder run".split()
META = "meta.json"


class Sets:
    """A cache folder with sets of three kinds, and what the commands say of each."""

    def __init__(self, folder: Path):
        self.home = folder / "home"
        csv = "input,label\n" + "".join(f"{'ab' * (i % 4 + 1)},{'xy'[i % 2]}\n" for i in range(24))
        (folder / "letters").mkdir()
        (folder / "letters" / "train.csv").write_text(csv)
        (folder / "text8").write_text("the quick brown fox jumps over the lazy dog " * 20)
        listops = "--sizes 16 4 4 --min-length 4 --max-length 24 --max-depth 3 --max-args 3".split()
        self.flags = {
            "files": ["--path", str(folder / "letters")],
            "listops": listops,
            "text8": ["--stand-in", "--max-length", "16"],
        }
        more = {"listops": ["--workers", "1"], "text8": ["--from", str(folder)]}
        self.shown, self.results = {}, {}
        self.folder = folder
        with mock.patch.dict("os.environ", LONGLENS_HOME=str(self.home)):
            for task, flags in self.flags.items():
                said = _call(["data", "prepare", task, *flags, *more.get(task, [])])
                assert said.code == 0, said
                self.shown[task] = _call(["data", "show", task, *flags]).out
                assert _call(["train", task, *flags, *TRAIN[:-1], str(folder / f"run-{task}")]).code == 0
                self.results[task] = result(folder / f"run-{task}")
        self.names = {task: next((self.home / "sets").glob(f"{task}-*/{META}")).parent.name for task in self.flags}
        self.files = {
            task: sorted(path.name for path in (self.home / "sets" / name).iterdir())
            for task, name in self.names.items()
        }


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Sets:
    return Sets(tmp_path_factory.mktemp("sets"))


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[int, Damage]:
    """Which file of the set, and what is done to it; meta.json half of the times."""
    place = draw(st.one_of(st.just(-1), st.integers(0, 20)))
    return place, draw(damages(to_json=place == -1))


@pytest.mark.parametrize("task", ["files", "listops", "text8"])
@pytest.mark.parametrize("command", ["list", "verify", "show", "train", "prepare"])
@fuzz("stored sets", 45, damage=st.lists(damaged_files(), min_size=1, max_size=2))
def test_a_damaged_set(sets, task, command, damage):
    with new_case("stored sets") as case:
        shutil.copytree(sets.home, case.home, dirs_exist_ok=True)
        beside = make_beside(case.folder / "beside")
        folder = case.home / "sets" / sets.names[task]
        whole = contents(folder)
        for place, how in damage:
            how.apply(folder / (META if place == -1 else sets.files[task][place % len(sets.files[task])]), beside)
        is_whole = _without_notes(contents(folder)) == _without_notes(whole)
        others = contents(beside), {name: contents(case.home / "sets" / name) for name in sets.names.values()}
        CHECKS[command](sets, task, case, is_whole)
        assert contents(beside) == others[0], "somebody else's files"
        for name, before in others[1].items():
            assert name == sets.names[task] or contents(case.home / "sets" / name) == before


def _without_notes(files: dict[str, bytes | str | None]) -> list[object]:
    """What the checksums of a set are about: not its own checksum, nor other entries of meta.json."""
    said: object = files.get(META)
    try:
        meta = json.loads(files[META])  # type: ignore[arg-type]
        said = [meta[name] for name in ("recipe", "details", "files")]
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    return [said, {name: content for name, content in files.items() if name not in (META, ".verified.json")}]


def _list(sets: Sets, task: str, case, is_whole: bool) -> None:
    said = case.longlens("data", "list")
    assert said.code == 0, said
    for other in sets.names.keys() - {task}:
        assert sets.names[other] in said.out, said


def _verify(sets: Sets, task: str, case, is_whole: bool) -> None:
    said = case.longlens("data", "verify", may_fail=True)
    there = (case.home / "sets" / sets.names[task] / META).exists()  # otherwise it is no set
    assert said.code == (1 if there and not is_whole else 0), said
    for other in sets.names.keys() - {task}:
        assert f"{sets.names[other]}: whole" in said.out, said


def _show(sets: Sets, task: str, case, is_whole: bool) -> None:
    said = case.longlens("data", "show", task, *sets.flags[task])
    assert said.code == 2 or said.out == sets.shown[task], said


def _train(sets: Sets, task: str, case, is_whole: bool) -> None:
    said = case.longlens("train", task, *sets.flags[task], *TRAIN)
    assert said.code == 2 or result(Path("run")) == sets.results[task], said


def _prepare(sets: Sets, task: str, case, is_whole: bool) -> None:
    """By force it is as it was, whatever is in its place."""
    more = {"listops": ["--workers", "1"], "text8": ["--from", sets.folder]}.get(task, [])
    said: Said = case.longlens("data", "prepare", task, *sets.flags[task], *more, "--force")
    assert said.code == 0, said
    _show(sets, task, case, True)
    assert case.longlens("data", "verify", sets.names[task]).code == 0


CHECKS = {"list": _list, "verify": _verify, "show": _show, "train": _train, "prepare": _prepare}
