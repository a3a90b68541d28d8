"""Progress on a terminal of any width, and elsewhere."""

import io
import re
import sys
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from longlens import progress as module
from longlens.progress import progress

NOTE = "loss 2.3249 · valid bits_per_byte 3.3394 · 29,473 tokens/s"


def shown(width: int, title: str, total: int, unit: str, count: int, note: str = "") -> str:
    """The last line that is drawn."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with progress(title, total, unit, console=console) as done:
        done(count, note)
    lines = [line for line in re.split(r"\x1b\[\??\d*\w|[\r\n]", out.getvalue()) if line]
    assert max(map(len, lines)) <= width, "a line that is too long would be drawn over two"
    return [line for line in lines if title[:5] in line][-1]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_shows_what_matters_at_any_width(width):
    line = shown(width, "las on text8", 2000, "steps", 345, NOTE)
    assert all(part in line for part in ("las on text8", "━", "345/2000", "steps", ":", "loss 2.3249"))
    assert (NOTE in line) == (width >= 120)


def test_downloads_have_megabytes_and_notes_are_no_markup():
    assert "1.0/84.0 MB" in shown(80, "downloading aclImdb_v1.tar.gz", 84_000_000, "bytes", 1_000_000)
    assert "[/red]" in shown(80, "runs", 10, "runs", 3, "[/red]")
    assert "345/?" in shown(80, "downloading x", 0, "files", 345)


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.0)
    with progress("listops", 4000, "samples") as done:
        done(1000, "well")
    with progress("downloading x", 0, "bytes") as done:
        done(1000)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("listops: 1,000 of 4,000 samples · well · 0:0")
    assert second == "downloading x: 1,000 bytes"


def test_a_notebook_without_widgets_has_lines(capsys, monkeypatch, recwarn):
    monkeypatch.setattr(module, "EVERY", 0.0)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with progress("listops", 4000, "samples", console=Console(force_jupyter=True)) as done:
        done(1000)
    said = capsys.readouterr()
    assert said.err.startswith("listops: 1,000 of 4,000 samples")
    assert said.out == ""
    assert not recwarn


def test_a_notebook_with_widgets_has_a_bar(monkeypatch):
    modules = {name: MagicMock() for name in ("ipywidgets", "IPython", "IPython.display")}
    for name, fake in modules.items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(module, "find_spec", lambda name: name == "ipywidgets")
    with progress("las on text8", 10, "steps", console=Console(force_jupyter=True, width=80)) as done:
        done(3, NOTE)
    assert modules["IPython.display"].display.called
    assert modules["ipywidgets"].Output.called
