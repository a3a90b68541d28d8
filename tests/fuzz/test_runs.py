"""Folders of runs whose files are damaged: what can be used gives the same figures, and the rest is refused."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from fuzz.cases import Case, Said, call, fuzz, new_case, run_here
from fuzz.damage import OF_FOLDERS, PLACES, Damage, contents, damages, make_beside
from fuzz.originals import HALF, RUN, STEPS, TASK, WholeRuns
from hypothesis import strategies as st
from support.runs import NEVER_THE_SAME, result, tensors

FILES = ["config.json", "identity.json", "environment.json", "metrics.jsonl", ".lock"]
OF_CHECKPOINTS = ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"]
FIGURES = ("steps", "valid", "test", "state")  # columns of list runs; the others are notes


@st.composite
def damaged_files(draw: st.DrawFn, steps: tuple[int, ...], files: list[str]) -> tuple[str, Damage]:
    """A file or a folder of a run, and what is done to it."""
    folders = ["checkpoints", *(f"checkpoints/{step:08d}" for step in steps)]
    place = draw(st.sampled_from([*files, *folders, *(f"{f}/{name}" for f in folders[1:] for name in OF_CHECKPOINTS)]))
    if place in folders:
        return place, Damage(draw(st.sampled_from(OF_FOLDERS)), draw(PLACES))
    return place, draw(damages(to_json=place.endswith(("json", "jsonl"))))


class DamagedRuns:
    """A copy of the runs in which something is damaged."""

    def __init__(self, whole: WholeRuns, kind: str, case: Case, damage: list[tuple[str, Damage]]):
        self.whole = whole
        self.kind = kind
        self.case = case
        self.folder = case.here / "runs"
        shutil.copytree(whole.folder / kind, self.folder)
        self.run = self.folder / whole.name
        self.beside = make_beside(case.folder / "beside")
        for place, how in damage:
            path = self.run / place
            if path.exists() and path.resolve().is_relative_to(self.folder):  # not through a link made just before
                how.apply(path, self.beside)
        self.before = self._others()

    def _others(self) -> dict[str, bytes | str | None]:
        """What is not this run's."""
        sibling = contents(self.folder / self.whole.sibling)
        return contents(self.beside) | {f"sibling {name}": sibling[name] for name in sibling if name != ".lock"}

    def longlens(self, *arguments: object, may_fail: bool = False) -> Said:
        said = self.case.longlens(*arguments, may_fail=may_fail)
        assert self._others().items() >= self.before.items(), f"somebody else's files: {said}"
        return said

    def list_runs(self) -> None:
        """The other run is always there; the figures of this one are right, or it is said to be damaged."""
        said = self.longlens("list", "runs")
        wanted, found = _rows(call(["list", "runs", "--runs", str(self.whole.folder / self.kind)]).out), _rows(said.out)
        assert found[self.whole.sibling.name] == wanted[self.whole.sibling.name], said
        ours = found.get(self.whole.name.name)
        assert ours in (None, wanted[self.whole.name.name]) or ours["state"].startswith(("damaged", "saved", "no ")), (
            said
        )

    def evaluate(self, which: str) -> None:
        """The figures of the checkpoint that it names, or a word: the last may be another one now."""
        said = self.longlens("evaluate", self.run, "--checkpoint", which)
        allowed = [self.whole.said[str(step)] for step in STEPS] if which == "last" else [self.whole.said[which]]
        assert said.code != 0 or said.out in allowed, said

    def train(self) -> None:
        """The result of a run that nobody disturbed, or a word about it; and then it is finished."""
        said = self.longlens("train", TASK, *RUN)
        if said.code != 0:
            return
        assert result(self.run) == result(self.whole.finished) or said.notes, said
        if self.kind == "unfinished":
            ours, theirs = tensors(self.run), tensors(self.whole.finished)
            assert all(ours[name].equal(tensor) for name, tensor in theirs.items()), said
        again = self.longlens("train", TASK, *RUN)
        assert again.code == 0, again
        assert "finished before" in again.out

    def compare(self) -> None:
        """The same results, or a word; one damaged run does not hide the other."""
        with mock.patch("longlens.training.many.launch", run_here):
            flags = [*RUN, "--mixers", "las", "--seeds", "0", "1", "--out", "out.json"]
            said = self.longlens("compare", TASK, *flags, may_fail=True)
        if said.code not in (0, 1):
            return
        assert (said.code == 1) == ("failed: " in said.out), said
        for row in json.loads(Path("out.json").read_text()):
            name = Path(row["folder"]).relative_to(self.folder.resolve())
            found = row["result"] and {key: value for key, value in row["result"].items() if key not in NEVER_THE_SAME}
            assert found == result(self.whole.folder / "finished" / name) or row["error"] or said.notes, said
            assert name == self.whole.name or found, said


def _rows(table: str) -> dict[str, dict[str, str]]:
    """The figures of list runs, by the name of the run's folder."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in table.splitlines():
        if line.startswith("┃"):
            columns = [cell.strip() for cell in line.strip("┃").split("┃")]
        elif line.startswith("│"):
            row = dict(zip(columns, (cell.strip() for cell in line.strip("│").split("│")), strict=True))
            if row["run"]:  # otherwise the row above goes on
                found[row["run"].rpartition("/")[2]] = {name: row[name] for name in FIGURES}
    return found


@pytest.mark.parametrize("command", ["list", "evaluate", "train", "compare"])
@fuzz(
    140,
    damage=st.lists(damaged_files(STEPS, [*FILES, "result.json"]), min_size=1, max_size=2),
    which=st.sampled_from(["best", "last", "3"]),
)
def test_a_finished_run(whole_runs, command, damage, which):
    with new_case("runs") as case:
        damaged = DamagedRuns(whole_runs, "finished", case, damage)
        if command == "list":
            damaged.list_runs()
        elif command == "evaluate":
            damaged.evaluate(which)
        else:
            getattr(damaged, command)()


@pytest.mark.parametrize("command", ["list", "evaluate", "train", "compare"])
@fuzz(120, damage=st.lists(damaged_files(STEPS[:HALF], FILES), min_size=1, max_size=2))
def test_an_unfinished_run(whole_runs, command, damage):
    with new_case("runs") as case:
        damaged = DamagedRuns(whole_runs, "unfinished", case, damage)
        if command == "list":
            damaged.list_runs()
        elif command == "evaluate":
            damaged.evaluate("last")
        else:
            getattr(damaged, command)()


@fuzz(200, name=st.sampled_from(["config.json", "identity.json", "result.json"]), at=PLACES)
def test_a_single_bit(whole_runs, name, at):
    """Many make another config or result that can be read."""
    with new_case("runs") as case:
        damaged = DamagedRuns(whole_runs, "finished", case, [(name, Damage("flip a bit", at))])
        damaged.evaluate("best")
        damaged.list_runs()
