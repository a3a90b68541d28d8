"""Sequences one at a time, with and without labels: each format, columns of tables, and a sentence for each mistake."""

import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from longlens.data.readers import Layout, iter_records, read_records
from longlens.data.tables import Table, make_plan
from longlens.errors import BadInput

LONG = "g;t;u;v;label\nA;1;1;2;x\nB;0;5;6;y\nA;0;0.5;1;x\n"


@pytest.fixture
def read(tmp_path):
    """A function that writes a text into a file and reads it: (sequence, label, group) of each record."""

    def reading(text, name="data.csv", *, with_labels=True, **layout):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8", newline="")
        found = iter_records(file, Layout(**layout), with_labels=with_labels)
        return [(r.sequence if isinstance(r.sequence, str) else r.sequence.tolist(), r.label, r.group) for r in found]

    return reading


def sequences(found):
    return [sequence for sequence, _, _ in found]


# Layouts


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout("y", "x", ("id", "b c"), ("u", "v"), ";", "g", "t", "numbers"),
        Layout(delimiter="\t", cells="texts"),
    ],
)
def test_a_layout_comes_back_from_json(layout):
    assert Layout.from_json(layout.to_json()) == layout


def test_a_layout_has_only_what_is_not_as_usual_in_json():
    assert Layout().to_json() == {}
    assert Layout(ignore=("id",)).to_json() == {"ignore": ["id"]}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"ignor": []}, "a layout has no option 'ignor'; did you mean 'ignore'"),
        ({"columns": 5}, "columns must be a list, each a text, got 5"),
        ({"cells": "words"}, "cells must be one of auto, numbers, texts, got words"),
    ],
)
def test_what_is_no_layout_is_told(values, sentence):
    with pytest.raises(BadInput, match=sentence):
        Layout.from_json(values)


# Tables


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("given", [None, "same"])
def test_the_delimiter_is_found(read, delimiter, given):
    text = "a,b,label\n1,2,x\n3,,y\n".replace(",", delimiter)
    assert read(text, delimiter=given and delimiter) == [([1, 2], "x", None), ([3], "y", None)]


def test_a_delimiter_that_is_not_found_can_be_given(read):
    assert read("a|b|label\n1|2|x\n", delimiter="|") == [([1, 2], "x", None)]


def test_commas_and_semicolons_in_texts_are_no_delimiters(read):
    assert sequences(read('input;label\n"a;b,c";x\n')) == ["a;b,c"]
    assert sequences(read('input,label\n"a;b;c,d",x\nb;c;d,y\n')) == ["a;b;c,d", "b;c;d"]


def test_the_delimiter_is_the_one_that_gives_the_columns_that_there_must_be(read):
    assert read("v (m;s;kg;A),label\n1,x\n") == [([1], "x", None)]
    assert read("v (m,s,kg,A);label\n1;x\n") == [([1], "x", None)]


def test_a_tsv_file_has_tabs_even_where_there_are_more_commas(read):
    assert sequences(read("input\tlabel\na,b,c\tx\n", "data.tsv")) == ["a,b,c"]


def test_without_labels_the_commonest_delimiter_is_the_one(read):
    assert sequences(read("a (x, y);b;c\n1;2;3\n", with_labels=False)) == [[1, 2, 3]]


def test_columns_can_be_chosen_ordered_and_ignored(read):
    text = "id,b,a,target\nq1,1,2,x\n"
    assert read(text, label_column="target", ignore=("id",)) == [([1, 2], "x", None)]
    assert read(text, label_column="target", columns=("a", "b")) == [([2, 1], "x", None)]


def test_a_column_of_whole_sequences_can_have_another_name(read):
    assert read("text,label\n1 2,x\n3,y\n", input_column="text") == [([1, 2], "x", None), ([3], "y", None)]


@pytest.mark.parametrize("name", ["data.csv", "data.jsonl"])
def test_labels_that_are_not_wanted_may_be_wrong_or_missing(read, name):
    texts = {
        "data.csv": ["input,label\nab,\nba,nan\n", "input\nab\nba\n"],
        "data.jsonl": [
            '{"input": "ab", "label": null}\n{"input": "ba", "label": []}\n',
            '{"input": "ab"}\n{"input": "ba"}\n',
        ],
    }
    for text in texts[name]:
        assert read(text, name, with_labels=False) == [("ab", None, None), ("ba", None, None)]


def test_what_is_ignored_may_be_missing_where_labels_are(read):
    assert sequences(read("a,b\n1,2\n", with_labels=False, ignore=("id",))) == [[1, 2]]


def test_arrays_need_no_labels_where_none_are_wanted(tmp_path):
    np.save(tmp_path / "new.npy", np.arange(12.0).reshape(2, 3, 2))
    found = list(iter_records(tmp_path / "new.npy", Layout(), with_labels=False))
    assert [record.sequence.tolist() for record in found] == np.arange(12.0).reshape(2, 3, 2).tolist()
    assert [record.label for record in found] == [None, None]
    np.save(tmp_path / "a.inputs.npy", np.ones((2, 3)))
    np.save(tmp_path / "a.lengths.npy", np.array([1, 3]))
    assert [len(r.sequence) for r in iter_records(tmp_path / "a.inputs.npy", Layout(), with_labels=False)] == [1, 3]
    with pytest.raises(BadInput, match=r"new.npy needs a .labels.npy file beside it"):
        list(iter_records(tmp_path / "new.npy", Layout(), with_labels=True))
    with pytest.raises(BadInput, match=r"missing.npy is not a file that can be read"):
        list(iter_records(tmp_path / "missing.npy", Layout(), with_labels=False))


def test_what_was_found_in_a_table_holds_for_others(read, tmp_path):
    read("b,a,label\n1,2,x\n")
    layout = read_records(tmp_path / "data.csv").layout
    assert layout == Layout(columns=("b", "a"))
    assert sequences(read("a,extra,b\n2,9,1\n", with_labels=False, columns=layout.columns)) == [[1, 2]]
    read("input,label\n1 2,x\n7,y\n")
    layout = read_records(tmp_path / "data.csv").layout
    assert layout == Layout(cells="numbers")
    assert sequences(read("input\n7\n", with_labels=False, cells=layout.cells)) == [[7]]
    assert sequences(read("input\n7\n", with_labels=False)) == ["7"]  # what a file of one row says by itself


# Long form


def test_rows_of_a_group_are_a_sequence_sorted_by_time(read):
    found = read(LONG, group_column="g", time_column="t")
    assert sorted(found, key=lambda record: record[2]) == [
        ([[0.5, 1.0], [1.0, 2.0]], "x", "A"),
        ([[5, 6]], "y", "B"),
    ]


def test_without_a_time_the_rows_keep_their_order(read):
    found = read(LONG, group_column="g", ignore=("t",))
    assert ([[1.0, 2.0], [0.5, 1.0]], "x", "A") in found


def test_dates_are_times(read):
    text = "g,t,u,label\n1,2026-01-10,1,x\n1,2026-01-09T23:00:00,2,x\n1,2026-01-09 22:00,3,x\n"
    assert read(text, group_column="g", time_column="t") == [([3, 2, 1], "x", "1")]


def test_dates_of_different_zones_are_compared_as_moments(read):
    text = "g,t,u,label\n1,2026-01-10T12:00:00+05:00,1,x\n1,2026-01-10T11:00:00Z,2,x\n"
    assert sequences(read(text, group_column="g", time_column="t")) == [[1, 2]]


def test_channels_are_those_columns_that_are_left(read):
    assert ([[1], [2]], "y", "B") not in read(LONG, group_column="g", time_column="t", columns=("v",))
    found = read(LONG, group_column="g", time_column="t", columns=("v", "u"))
    assert ([[6, 5]], "y", "B") in found
    assert ([6], None, "B") in read(LONG, with_labels=False, group_column="g", time_column="t", columns=("v",))


def test_a_random_table_in_any_order_of_rows_is_the_table_in_order(read):
    rng = np.random.default_rng(0)
    rows = [f"g{g},{t},{rng.normal():.3f},{rng.normal():.3f},{g % 2}" for g in range(7) for t in range(g + 2)]
    header = "g,t,u,v,label"
    options = {"group_column": "g", "time_column": "t"}
    ordered = read("\n".join([header, *rows]), **options)
    assert [group for _, _, group in ordered] == [f"g{g}" for g in range(7)]
    shuffled = read("\n".join([header, *rng.permutation(rows)]), **options)
    assert sorted(shuffled, key=lambda record: record[2]) == ordered


# Streaming


def test_a_record_is_there_before_the_next_line_is_read(tmp_path):
    for name, text in {
        "a.csv": "a,b,label\n1,2,x\n3,4,y\nno,5,x\n",
        "a.jsonl": '{"input": [1, 2], "label": 0}\n{"input": [3, 4], "label": 0}\n{\n',
    }.items():
        (tmp_path / name).write_text(text)
        records = iter_records(tmp_path / name, Layout(), with_labels=True)
        assert [next(records).sequence.tolist() for _ in range(2)] == [[1, 2], [3, 4]]
        with pytest.raises(BadInput, match=rf"{name}, line [34]"):
            next(records)


@pytest.mark.parametrize("form", ["wide", "one cell", "long", "jsonl", "npy"])
def test_memory_does_not_grow_with_the_file(tmp_path, form):
    """The file has several megabytes; a few hundred kilobytes are used."""
    values = " ".join(["0.25"] * 100)
    file, layout = tmp_path / "a.csv", Layout()
    if form == "wide":
        file.write_text(",".join(f"t{i}" for i in range(100)) + "\n" + (values.replace(" ", ",") + "\n") * 6_000)
    elif form == "one cell":
        file.write_text("input\n" + (values + "\n") * 6_000)
    elif form == "long":
        layout = Layout(group_column="g", time_column="t")
        rows = (f"{g},{t},0.25{'0' * 80}\n" for g in range(300) for t in range(100))
        file.write_text("g,t,x\n" + "".join(rows))
    elif form == "jsonl":
        file = tmp_path / "a.jsonl"
        file.write_text(('{"input": [' + values.replace(" ", ", ") + "]}\n") * 6_000)
    else:
        file = tmp_path / "a.npy"
        np.save(file, np.zeros((6_000, 100)))
    assert file.stat().st_size > 2_500_000
    next(iter_records(file, layout, with_labels=False))  # what is made once, such as the types of options
    tracemalloc.start()
    try:
        count = sum(1 for _ in iter_records(file, layout, with_labels=False))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == (300 if form == "long" else 6_000)
    assert peak < 700_000


@pytest.mark.parametrize("named", [False, True])
def test_a_header_of_many_columns_is_looked_at_a_few_times(named):
    """Not once for each column."""

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__
        compared = 0

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

    header = ["label", *(Name(f"t{i}") for i in range(500))]
    layout = Layout(columns=tuple(map(str, header[1:])) if named else ())
    plan = make_plan(Table(Path("a.csv"), "a.csv", header, lambda: iter(())), layout, with_labels=True)
    assert plan.inputs == list(range(1, 501))
    assert Name.compared < 5000


# Mistakes


@pytest.mark.parametrize(
    ("text", "layout", "sentence"),
    [
        ("a,target\n1,x\n", {}, "got a, target; if 'target' is meant, use --label-column target"),
        ("a,Label\n1,x\n", {}, "got a, Label; if 'Label' is meant, use --label-column Label"),
        ("a;Class\n1;x\n", {}, "got a, Class; if 'Class' is meant, use --label-column Class"),
        ("a,b\n1,x\n", {}, "one column must be 'label', and one may be 'input', got a, b$"),
        ("a,label\n1,x\n", {"label_column": "y"}, "one column must be 'y', .* if 'label' is meant, use --label-column"),
        ("a,label\n1,x\n", {"ignore": ("id",)}, "line 1: there is no column 'id' \\(ignore\\); choose from a"),
        ("abc,label\n1,x\n", {"columns": ("abd",)}, "no column 'abd' of the sequences; did you mean 'abc'"),
        ("a,label\n1,x\n", {"group_column": "g"}, "there is no column 'g' \\(group_column\\)"),
        ("g,a,label\n1,1,x\n", {"group_column": "g", "time_column": "t"}, "no column 't' \\(time_column\\)"),
        ("id,a,label\nq,1,x\n", {}, "line 2: a value must be a number, .* got 'q'; --ignore id leaves out its column"),
        ("a b,c,label\nq,1,x\n", {}, "--ignore 'a b' leaves out its column"),
        (
            "a;b;label\n1;2;x\n1;0,5;y\n",
            {},
            "line 3: a value must be a number, .* got '0,5'; write decimals with a point",
        ),
        (
            "a;b;label\n1;2;x\n1,2,y\n",
            {},
            "line 3 must have 3 cells like the header, got 1; it has commas between them",
        ),
        (
            "a,b,label\n1,2,x\n1\t2\ty\n",
            {},
            "got 1; it has tabs between them, and the header commas: use one delimiter",
        ),
        ("a,b,label\n1,2,x\n", {"ignore": ("a", "b")}, "all columns but 'label' are the sequence; each needs a name"),
        ("g,label\n1,x\n", {"group_column": "g"}, "all other columns are channels; each needs a name"),
        ('a;label\n"1;x\n', {}, "line 2: unexpected end of data; check the semicolons and quotes there"),
    ],
)
def test_a_mistake_in_the_columns_is_told(read, text, layout, sentence):
    with pytest.raises(BadInput, match=sentence) as caught:
        read(text, **layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("A;0;", "A;1;", "group 'A': its times must be different, got 1 twice"),
        ("A;0;", "A;1.0;", "group 'A': its times must be different, got 1.0 twice"),
        ("A;0;", "A;soon;", "line 4: the time must be a number or a date such as .*, got soon"),
        ("A;0;", "A;;", "line 4: the time must be a number or a date"),
        ("A;0;", "A;nan;", "line 4: the time must be a number or a date such as .*, got nan"),
        ("A;0;", "A;2026-01-31;", "group 'A': its times must be all numbers or all dates, got both"),
        ("1;x\n", "1;y\n", "line 4: the label must be the same in all rows of the group 'A', got y after x"),
        ("5;6;y", "5;6;", "line 3: the label must be a finite number or a text, and not empty"),
        ("B;0", " ;0", "line 3: the group is empty; it must name the sequence"),
        ("5;6", "5;", "line 3: 'v' must be a finite number in each row, got ''"),
        ("5;6", "nan;6", "line 3: 'u' must be a finite number in each row, got nan"),
        ("5;6", "5;1e39", r"line 3: 'v' must be a finite number in each row, got 1e39"),
        ("5;6", "5;0,5", "line 3: 'v' must be a finite number in each row, got 0,5; write decimals with a point"),
        ("5;6", "1;9223372036854775808", "group 'B': .*whole numbers must fit into int64|group 'B': all numbers must"),
        ("A;1;1;2;x\nB;0;5;6;y\nA;0;0.5;1;x\n", "", "data.csv has no sequences"),
    ],
)
def test_a_mistake_in_long_form_is_told_with_its_place(read, old, new, sentence):
    assert old in LONG
    with pytest.raises(BadInput, match=sentence) as caught:
        read(LONG.replace(old, new), group_column="g", time_column="t")
    assert "\n" not in str(caught.value)


def test_a_missing_column_of_whole_sequences_is_told_where_training_had_one(read):
    with pytest.raises(BadInput, match="line 1: one column must be 'input', got text"):
        read("text\nabc\n", with_labels=False, cells="texts")


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("a,b,label\n1,nan,x\n", "a.csv", "line 2: all numbers must be finite"),
        ("input,label\n,x\n", "a.csv", "line 2: the sequence is empty"),
        ("input,label\n", "a.csv", "has no sequences"),
        ('{"input": [1], "label": 1}\n{"input": "a", "label": 1}\n', "a.jsonl", "line 2 has texts, but .*line 1 has"),
        ('{"input": "\\ud800", "label": 1}\n', "a.jsonl", "is not a text in UTF-8"),
        ("?", "a.xlsx", "a.xlsx must be a file that ends in one of"),
    ],
)
def test_what_is_wrong_with_sequences_is_told_with_and_without_labels(read, text, name, sentence, with_labels):
    with pytest.raises(BadInput, match=sentence):
        read(text, name, with_labels=with_labels)


# Parquet and Arrow


def test_what_needs_pyarrow_says_so(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.arrow", "a.feather"):
        with pytest.raises(BadInput, match=rf"{name} can only be read with pyarrow: pip install pyarrow$"):
            read("", name)


@pytest.fixture(params=["parquet", "arrow", "feather", "stream.arrow"])
def write_table(request, tmp_path):
    """A function that writes columns into a file of Parquet or Arrow."""
    arrow = pytest.importorskip("pyarrow")

    def write(columns):
        table, file = arrow.table(columns), tmp_path / f"data.{request.param}"
        if request.param == "parquet":
            from pyarrow import parquet

            parquet.write_table(table, file)
        else:
            new = arrow.ipc.new_stream if request.param.startswith("stream") else arrow.ipc.new_file
            with new(str(file), table.schema) as writer:
                writer.write_table(table)
        return file

    return write


def test_arrow_tables_are_read_as_texts_are(write_table):
    file = write_table(
        {
            "id": ["q", "r"],
            "a": [0.5, 1.5],
            "b": [1, None],
            "label": ["x", "y"],
            "__index_level_0__": [7, 8],
        }
    )
    found = list(iter_records(file, Layout(ignore=("id",)), with_labels=True))
    assert [(record.sequence.tolist(), record.label) for record in found] == [([0.5, 1.0], "x"), ([1.5], "y")]
    assert found[1].place.endswith(", row 1")
    with pytest.raises(BadInput, match=r"row 0: a value must be a number, .* got 'q'; --ignore id"):
        list(iter_records(file, Layout(), with_labels=True))


def test_arrow_tables_have_lists_and_long_forms(write_table):
    file = write_table({"input": [[1.5, 2.0], [3.0]], "label": [True, False]})
    assert [r.sequence.tolist() for r in iter_records(file, Layout(), with_labels=True)] == [[1.5, 2.0], [3.0]]
    assert read_records(file).labels.tolist() == ["true", "false"]
    from datetime import datetime

    times = [datetime(2026, 1, 2), datetime(2026, 1, 1)]
    file = write_table({"g": [1, 1], "t": times, "u": [1, 2], "label": [0, 0]})
    layout = Layout(group_column="g", time_column="t")
    assert [r.sequence.tolist() for r in iter_records(file, layout, with_labels=True)] == [[2, 1]]


def test_a_value_that_python_has_not_is_told(write_table):
    arrow = pytest.importorskip("pyarrow")
    times = arrow.array([2**55, 1], arrow.timestamp("ms"))  # far after the year 9999
    file = write_table({"g": [1, 1], "t": times, "u": [1, 2], "label": [0, 0]})
    with pytest.raises(BadInput, match=r"a value after row 0 cannot be read: .*; correct it"):
        list(iter_records(file, Layout(group_column="g", time_column="t"), with_labels=True))


def test_an_arrow_file_that_is_damaged_is_told(write_table):
    file = write_table({"a": [1, 2], "b": [3, 4], "label": [0, 1]})
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(BadInput, match=r"is not a whole .\w+ file: .*; write it again") as caught:
        list(iter_records(file, Layout(), with_labels=True))
    assert "\n" not in str(caught.value)
