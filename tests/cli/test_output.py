"""Tables for papers and programs: --format and --out, of every command that prints one."""

import csv
import io
import json

import pytest

from longlens.cli import COMMANDS, TABLES, sentence, show
from longlens.cli.output import BESIDE, Output, take_output
from longlens.errors import BadInput
from longlens.reports.sheet import Column, Sheet, write_sheets

HOSTILE = r'a|b & 50% of_x "q", \n *c* <d> #$~^{}'


def sheet():
    rows = [[HOSTILE, "44.2 % ± 1.5 %", "3,012", "12.5 ms ×1.09"], ["las_x\nline", "–", "failed", "−7"]]
    numbers = [Column(name, number=True) for name in ("test", "params", "time")]
    return Sheet("a & b_c", [Column("mixer"), *numbers], rows, ["a note"])


def test_json_has_numbers_as_numbers():
    ((table,), first, second) = (tables := json.loads(write_sheets([sheet()], "json"))), *tables[0]["rows"]
    assert table["title"] == "a & b_c"
    assert first == {"mixer": HOSTILE, "test": 44.2, "test ±": 1.5, "params": 3012, "time": 12.5, "time ×": 1.09}
    assert second == {"mixer": "las_x\nline", "test": None, "params": "failed", "time": -7}


def test_csv_gives_every_text_back():
    assert list(csv.reader(io.StringIO(write_sheets([sheet()], "csv"))))[1][0] == HOSTILE
    other = Sheet("other", [Column("mixer"), Column("new")], [["s4", "1"]])
    rows = list(csv.DictReader(io.StringIO(write_sheets([sheet(), other], "csv"))))
    assert [row["table"] for row in rows] == ["a & b_c", "a & b_c", "other"]
    assert (rows[0]["params"], rows[2]["params"], rows[2]["new"]) == ("3,012", "", "1")


def test_latex_and_markdown_escape():
    latex = write_sheets([sheet()], "latex")
    line = next(line for line in latex.splitlines() if line.startswith("a$|$b"))
    expected = r'a$|$b \& 50\% of\_x "q", \textbackslash{}n *c* $<$d$>$ \#\$\textasciitilde{}\^{}\{\} &'
    assert line.startswith(expected)
    assert latex.startswith("% a & b_c\n\\begin{tabular}{lrrr}")
    markdown = write_sheets([sheet()], "markdown")
    assert r'| a\|b & 50% of_x "q", \\n \*c\* \<d> #$~^{} | 44.2 % ± 1.5 % |' in markdown
    assert len(markdown.splitlines()) == 6, "a title, an empty line, the head, and a line for each row"


@pytest.mark.parametrize("form", ["markdown", "latex", "csv", "json"])
def test_what_is_piped_is_the_table_alone(longlens, form):
    said = longlens("list", "recipes", "listops", "--format", form)
    assert said.code == 0
    assert "recipe show TASK SCALE" in said.err
    assert "recipe show TASK SCALE" not in said.out
    assert said.out.startswith({"markdown": "| task", "latex": "\\begin", "csv": "table,task", "json": "["}[form])
    assert longlens("list", "mixers", "--format", form).code == 0


def test_the_ending_of_a_file_decides(longlens, here):
    said = longlens("list", "mixers", "las", "--out", "new/las.tex")
    assert said.out.endswith("written to new/las.tex\n")
    assert "│" in said.out, "the terminal shows the table as ever"
    assert (here / "new" / "las.tex").read_text().startswith("% las: local and smooth attention\n")
    longlens("list", "mixers", "las", "--out", "las.txt", "--format", "csv")
    assert (here / "las.txt").read_text().startswith("option,default,meaning\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "x.png"], "out must end in .md, .tex, .csv or .json, or --format say what is written, got x.png"),
        (["--out", "x.csv", "--format", "latex"], "--format latex and --out x.csv contradict each other"),
        (["--format", "html"], "--format must be one of terminal, markdown, latex, csv, json, got html"),
    ],
)
def test_contradictions_are_one_sentence(longlens, here, flags, message):
    said = longlens("list", "recipes", *flags)
    assert said.code == 2
    assert message in said.err
    assert not list(here.iterdir())


def test_an_own_file_stays_and_tables_stand_beside_it(here):
    values = {"out": here / "x.json", "format": "csv", "other": 1}
    assert take_output(values, BESIDE) == Output("csv")
    assert values == {"out": here / "x.json", "other": 1}
    assert take_output(values | {"out": here / "x.md"}, BESIDE) == Output("terminal", here / "x.md", "markdown")
    assert take_output({"out": here / "x.csv"}, ()) == Output()
    with pytest.raises(BadInput, match="--format is for what is shown: leave it out with --out, whose ending says"):
        take_output({"out": here / "x.csv", "format": "csv"}, ())


def test_no_file_is_what_none_means(longlens, here):
    said = longlens("list", "recipes", "listops", "--out", "none")
    assert said.code == 0, said.err
    assert not list(here.iterdir())


def test_without_a_table_there_is_nothing_to_write(capsys, here):
    with pytest.raises(BadInput, match="there is no table"):
        show(["a line"], Output("csv"))
    assert capsys.readouterr() == ("", "a line\n")
    show([], Output("csv"))


def test_a_comparison_is_written_in_all_ways(longlens, here, tiny, monkeypatch):
    from longlens import api

    monkeypatch.setattr(api, "_is_only_here", lambda config: True)
    command = ["compare", "atomic-cumsum", "--mixers", "las", "transformer", *tiny]
    said = longlens(*command, "--out", "all.json", "--format", "json")
    assert said.code == 0, said.err
    assert json.loads((here / "all.json").read_text())[0]["result"]["metric"] == "r2", "all results, as ever"
    (table,) = json.loads(said.out)
    assert isinstance(table["rows"][0]["test"], float)
    assert isinstance(table["rows"][0]["params"], int)
    assert longlens(*command, "--out", "table.md").code == 0
    assert (here / "table.md").read_text().startswith("**atomic-cumsum")


def test_every_command_with_a_table_has_the_flags(longlens):
    assert {name for name in COMMANDS if name.startswith(("list ", "bench "))} <= TABLES.keys()
    for name in ("list runs", "bench layers", "reproduce", "predict", "compare listops", "sweep listops"):
        said = longlens(*name.split(), "--help")
        assert "--format {terminal,markdown,latex,csv,json}" in said.words
        assert "--out" in said.words


def test_where_there_is_no_terminal_a_table_is_as_wide_as_its_cells(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    long, columns = ("words " * 50).strip(), [Column("what", wrap=True), Column("more", rank=1)]
    show([Sheet("", columns, [[long, long]]), sentence(long)])
    *table, _, last = capsys.readouterr().out.splitlines()
    assert f"│ {long} │ {long} │" in table
    assert len(last) <= 120, "words may be wrapped"
