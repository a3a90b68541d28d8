"""Wide tables are cut where the terminal is narrow, and nothing of them is lost."""

import io

import pytest
from rich.console import Console

from longlens.bench.measure import SplitSheet
from longlens.reports.sheet import Column


def sheet(columns=6):
    names = [Column("layer"), *(Column(f"column {i}", 1, number=True) for i in range(columns))]
    rows = [[name, *(f"{name}-{i} ms" for i in range(columns))] for name in ("las", "transformer")]
    return SplitSheet("times", names, rows, ["[a note]"])


def shown(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_cell_is_shown_whole_at_any_width(width):
    text = shown(sheet(), width)
    assert max(map(len, text.splitlines())) <= width
    for i in range(6):
        for part in (f"column {i} ┃", f"las-{i} ms │", f"transformer-{i} ms │"):
            assert text.count(part) == 1
    assert "…" not in text
    assert text.count("[a note]") == 1, "once, below the last"


def test_one_table_where_it_fits():
    assert shown(sheet(), 200).count("layer") == 1
    assert shown(sheet(), 200).startswith("times ")
    assert "1 of" not in shown(sheet(), 200)


def test_as_few_tables_as_fit_of_about_equal_width():
    text = shown(sheet(4), 75)  # three columns would fit, which leaves one alone
    assert "times (1 of 2)" in text
    assert [line.count("column") for line in text.splitlines() if "column" in line] == [2, 2]


def test_a_terminal_that_is_too_narrow_for_a_column_shows_one_at_a_time():
    assert shown(sheet(3), 20).count("times (") == 3


def test_a_table_of_names_alone():
    assert "transformer" in shown(SplitSheet("names", [Column("layer")], [["las"], ["transformer"]]), 40)
