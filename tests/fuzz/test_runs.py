"""Folders of runs whose files are damaged: what can be used gives the same figures, and the rest is refused."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from fuzz.cases import Said, _call, fuzz, new_case, run_here
from fuzz.damage import OF_FOLDERS, PLACES, Damage, contents, damages, make_beside
from hypothesis import strategies as st
from support.runs import NEVER_THE_SAME, checkpoints, result, tensors

TASK = "atomic-cumsum"
FLAGS = [
    *"--recipe smoke --task.max-length 8 --task.sizes 24 8 8 --batch-size 8 --steps 4 --evaluate-every 2".split(),
    *"--checkpoint-every 1 --keep 100 --log-every 1".split(),
]
FILES = ["config.json", "identity.json", "environment.json", "metrics.jsonl", "result.json", ".lock"]
OF_CHECKPOINTS = ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"]
STEPS = (1, 2, 3, 4)
HALF = 2  # the step after which the unfinished run was killed
NO_FIGURES = ("environment.json", "metrics.jsonl", ".lock")  # nothing of a result is in them


class Runs:
    """A finished and an unfinished run of seed 0, and a finished one of seed 1."""

    def __init__(self, folder: Path):
        self.folder = folder
        for seed in (0, 1):
            assert _call(["train", TASK, *FLAGS, "--seed", str(seed), "--runs", str(folder / "finished")]).code == 0
        (self.name, self.sibling) = sorted(
            (path.parent for path in folder.glob("finished/*/*/*/config.json")),
            key=lambda path: json.loads((path / "config.json").read_text())["training"]["seed"],
        )
        self.name, self.sibling = (path.relative_to(folder / "finished") for path in (self.name, self.sibling))
        shutil.copytree(folder / "finished", folder / "unfinished")
        unfinished = folder / "unfinished" / self.name
        (unfinished / "result.json").unlink()
        for step in checkpoints(unfinished):
            if step > HALF:
                shutil.rmtree(unfinished / "checkpoints" / f"{step:08d}")
        self.whole = folder / "finished" / self.name
        self.said = {}
        for which in ("best", "last", "3"):
            said = _call(["evaluate", str(self.whole), "--checkpoint", which])
            assert said.code == 0, said
            self.said[which] = said.out


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@st.composite
def damaged_files(draw: st.DrawFn, steps: tuple[int, ...], files: list[str]) -> tuple[str, Damage]:
    """A file of a run, and what is done to it."""
    places = [*files, *(f"checkpoints/{step:08d}/{name}" for step in steps for name in OF_CHECKPOINTS)]
    places += ["checkpoints", *(f"checkpoints/{step:08d}" for step in steps)]
    place = draw(st.sampled_from(places))
    if Path(place).suffix or Path(place).name in ("SHA256SUMS", ".lock"):
        return place, draw(damages(to_json=place.endswith(("json", "jsonl"))))
    return place, Damage(draw(st.sampled_from(OF_FOLDERS)), draw(PLACES))


class Damaged:
    """A copy of the runs in which something is damaged."""

    def __init__(self, runs: Runs, kind: str, case, damage: list[tuple[str, Damage]]):
        self.runs = runs
        self.kind = kind
        self.case = case
        self.folder = case.here / "runs"
        shutil.copytree(runs.folder / kind, self.folder)
        self.run = self.folder / runs.name
        self.beside = make_beside(case.folder / "beside")
        for place, how in damage:
            path = self.run / place
            if path.exists() and path.resolve().is_relative_to(self.folder):  # not if a folder above it is damaged
                how.apply(path, self.beside)
        self.others = contents(self.beside), contents(self.folder / runs.sibling)

    def longlens(self, *arguments: object, may_fail: bool = False) -> Said:
        said = self.case.longlens(*arguments, may_fail=may_fail)
        beside, sibling = self.others
        assert contents(self.beside).items() >= beside.items(), f"somebody else's files: {said}"
        found = contents(self.folder / self.runs.sibling)
        assert {n: c for n, c in found.items() if n != ".lock"} == {n: c for n, c in sibling.items() if n != ".lock"}
        return said

    def list_runs(self) -> None:
        """The other run is always there; the figures of this one are right, or it is said to be damaged."""
        said = self.longlens("list", "runs")
        whole = _rows(_call(["list", "runs", "--runs", str(self.runs.folder / "finished")]).out)
        found = _rows(said.out)
        assert found[self.runs.sibling.name] == whole[self.runs.sibling.name], said
        ours = found.get(self.runs.name.name)
        assert ours in (None, whole[self.runs.name.name]) or ours["state"].startswith(("damaged", "saved", "no ")), said

    def evaluate(self, which: str) -> None:
        said = self.longlens("evaluate", self.run, "--checkpoint", which)
        assert said.code != 0 or said.out == self.runs.said[which], said

    def check_result(self, said: Said) -> None:
        """The result of an undamaged run, or a word about it."""
        assert result(self.run) == result(self.runs.whole) or said.notes, said


def _rows(table: str) -> dict[str, dict[str, str]]:
    """The figures of list runs, by the name of the run's folder."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in table.splitlines():
        if line.startswith("┃"):
            columns = [cell.strip() for cell in line.strip("┃").split("┃")]
        elif line.startswith("│") and line.strip("│ "):
            row = dict(zip(columns, (cell.strip() for cell in line.strip("│").split("│")), strict=True))
            if row["run"]:
                figures = {name: row[name] for name in ("steps", "valid", "test", "state")}
                found[row["run"].rpartition("/")[2]] = figures
    return found


def _train(damaged: Damaged) -> None:
    said = damaged.longlens("train", TASK, *FLAGS)
    if said.code == 0:
        damaged.check_result(said)
        if damaged.kind == "unfinished":
            ours, theirs = tensors(damaged.run), tensors(damaged.runs.whole)
            assert all(ours[name].equal(tensor) for name, tensor in theirs.items()), said
        again = damaged.longlens("train", TASK, *FLAGS)
        assert again.code == 0, again
        assert "finished before" in again.out


@pytest.mark.parametrize("command", ["list", "evaluate", "train", "compare"])
@fuzz(
    "runs",
    140,
    damage=st.lists(damaged_files(STEPS, FILES), min_size=1, max_size=2),
    which=st.sampled_from(["best", "last", "3"]),
)
def test_a_finished_run(runs, command, damage, which):
    with new_case("runs") as case:
        damaged = Damaged(runs, "finished", case, damage)
        if command == "list":
            damaged.list_runs()
        elif command == "evaluate":
            damaged.evaluate(which)
        elif command == "train":
            _train(damaged)
        else:
            _compare(damaged)


def _compare(damaged: Damaged) -> None:
    with mock.patch("longlens.training.many.launch", run_here):
        said = damaged.longlens(
            "compare", TASK, *FLAGS, "--mixers", "las", "--seeds", "0", "1", "--out", "out.json", may_fail=True
        )
    if said.code not in (0, 1):
        return
    assert (said.code == 1) == ("failed: " in said.out), said
    wanted = {
        str(folder): result(damaged.runs.folder / "finished" / folder)
        for folder in (damaged.runs.name, damaged.runs.sibling)
    }
    for row in json.loads(Path("out.json").read_text()):
        name = str(Path(row["folder"]).relative_to(damaged.folder.resolve()))
        found = row["result"] and {key: value for key, value in row["result"].items() if key not in NEVER_THE_SAME}
        assert found == wanted[name] or row["error"] or said.notes, said
        assert name == str(damaged.runs.name) or found, "one damaged run does not hide the others"


@pytest.mark.parametrize("command", ["list", "evaluate", "train", "compare"])
@fuzz("runs", 100, damage=st.lists(damaged_files((1, 2), FILES[:4]), min_size=1, max_size=2))
def test_an_unfinished_run(runs, command, damage):
    with new_case("runs") as case:
        damaged = Damaged(runs, "unfinished", case, damage)
        if command == "list":
            assert runs.sibling.name in _rows(damaged.longlens("list", "runs").out)
        elif command == "evaluate":
            damaged.longlens("evaluate", damaged.run, "--checkpoint", "last")
        elif command == "train":
            _train(damaged)
        else:
            _compare(damaged)
