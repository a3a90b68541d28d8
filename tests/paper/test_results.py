"""RESULTS.md and the table of the README are those of the records."""

import json
import re
import runpy
from pathlib import Path

import pytest

from longlens.paper.index import ARTIFACTS
from longlens.paper.records import Records

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["RESULTS.md", "README.md"])
def test_it_is_made_of_the_records(name):
    written = runpy.run_path(str(ROOT / "tools" / "results.py"))["written"]()
    assert (ROOT / name).read_text() == written[name], "run 'python tools/results.py'"


def test_every_record_can_be_read():
    records = Records(ROOT / "results" / "mini")
    assert records.problems == []
    assert records.found


def test_records_are_small_and_name_no_place():
    for path in (ROOT / "results").rglob("*.json"):
        text = path.read_text()
        assert len(text) < 40_000
        values = json.loads(text)
        values.pop("scores", None)  # of letters and slashes
        assert not re.search(r"(?<![\w.])/\w+/\w", json.dumps(values)), "no absolute path"


def test_every_artifact_has_a_section():
    text = (ROOT / "RESULTS.md").read_text()
    for name in ARTIFACTS:
        assert f"\n## {name}: " in text
        assert f"`longlens reproduce {name}`" in text
