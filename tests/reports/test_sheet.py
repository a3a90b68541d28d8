"""A table at any width, and as Markdown, LaTeX and CSV."""

import csv
import io

import pytest
from rich.console import Console

from longlens.reports.sheet import Column, Sheet

COLUMNS = [
    Column("name"),
    Column("what", wrap=True),
    Column("extra", 2),
    Column("more", 1),
    Column("value", number=True),
]
ROWS = [
    ["a-name-that-is-long", "words that may be wrapped if there is no room", "extra text", "some more", "12,345"],
    ["b", "short", "x", "y", "1"],
]


def printed(sheet, width, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(sheet)
    text = console.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    return text


def words(text):
    return " ".join(text.translate(str.maketrans("│┃", "  ")).split())


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 200])
def test_nothing_is_cut_at_any_width(width):
    text = printed(Sheet("title", COLUMNS, ROWS), width)
    assert "…" not in text
    letters = text.translate(str.maketrans("│┃", "  "))
    for column in (0, 4):
        for row in ROWS:
            assert "".join(row[column].split()) in "".join(letters.split()) or width < 50


def test_columns_are_left_out_by_their_rank():
    shown = {width: printed(Sheet("", COLUMNS, ROWS), width) for width in (60, 66, 80)}
    assert "extra" in shown[80].split("┡")[0]
    assert "not shown" not in shown[80]
    assert "not shown at this width: extra\n" in shown[66]
    assert "not shown at this width: extra, more\n" in shown[60]


def test_words_are_wrapped_before_columns_are_left_out():
    text = printed(Sheet("", COLUMNS, ROWS), 80)
    assert "words that may be wrapped if there is no room" not in text
    assert "words that may" in text


def test_a_title_and_notes():
    text = printed(Sheet("title", [Column("a")], [["1"]], ["a note that is longer than the table"]), 80)
    assert text.startswith("title")
    assert text.endswith("a note that is longer than the table\n")


@pytest.mark.parametrize("text", ["[/red]", "[bold]x", ":smile:", "a\\", "[link=x]", "\x1b[31mred"])
def test_texts_are_no_markup(text):
    shown = printed(Sheet(text, [Column(text)], [[text]], [text]), 80, color_system=None)
    assert shown.count(text.replace("\x1b", "�")) == 4
    assert "\x1b" not in shown


def test_markdown():
    text = Sheet("", [Column("a|b"), Column("n", number=True)], [["x|y", "1"], ["z", "2"]]).to_markdown()
    assert text.splitlines() == ["| a\\|b | n |", "| :-- | --: |", "| x\\|y | 1 |", "| z | 2 |"]


def test_latex():
    text = Sheet(
        "", [Column("a_b"), Column("n", number=True)], [["50.0 % ± 1 & x", "{1}"], ["a\\b^c~d", "×2"]]
    ).to_latex()
    assert text.splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & n \\",
        r"\midrule",
        r"50.0 \% $\pm$ 1 \& x & \{1\} \\",
        r"a\textbackslash{}b\^{}c\textasciitilde{}d & $\times$2 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_csv():
    rows = [['say "x", y', "1"], ["two\nlines", ""]]
    text = Sheet("", [Column("a"), Column("n")], rows).to_csv()
    assert list(csv.reader(io.StringIO(text))) == [["a", "n"], *rows]


def test_an_empty_table():
    assert "name" in printed(Sheet("", COLUMNS), 80)
    assert Sheet("", COLUMNS).to_csv() == "name,what,extra,more,value\n"
