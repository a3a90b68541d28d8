"""The scripts in examples/ run, from an empty folder to what they promise."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def heartbeats(tmp_path, monkeypatch):
    pytest.importorskip("captum")
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("longlens.api._is_only_here", lambda config: True)  # a process for each run takes seconds
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("heartbeats", ROOT / "examples" / "heartbeats.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_parts_of_the_pattern_are_needed(heartbeats):
    """A quarter is at risk; each part alone says little, and both together all."""
    rows, labels = heartbeats.recordings(2000, seed=0)
    risk = np.array([label == "risk" for label in labels])
    spike, inverted = rows[:, 18:23].max(axis=1) > 0.6, rows[:, 128 + 22 : 128 + 27].mean(axis=1) < 0
    assert risk.mean() == pytest.approx(0.25, abs=0.03)
    for part in (spike, inverted):
        assert 0.4 < risk[part].mean() < 0.6
    assert (risk == (spike & inverted)).mean() > 0.85


def test_heartbeats_from_a_table_to_a_picture(heartbeats, capsys):
    more = "--recipe smoke --steps 12 --evaluate-every 6 --threads 1".split()
    heartbeats.example(rows=40, mixers=["las", "s4d"], folds=2, jobs=1, more=more)
    said = capsys.readouterr().out
    for words in ("las (2 folds)", "commonest class", "over 2 folds", "guessing", "30 rows: ", "written to why.png"):
        assert words in said
    with Path("labels.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["row"] for row in found] == [str(number) for number in range(1, 31)]
    assert {row["label"] for row in found} <= {"normal", "risk"}
    assert Path("why.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(Path("runs").glob("files-beats.csv/*/*/result.json"))) == 4
