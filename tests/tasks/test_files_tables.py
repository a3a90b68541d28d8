"""Your own tables and frames as a task: which columns are what, frames in memory, warnings, and curves by class."""

import numpy as np
import pandas as pd
import pytest

from longlens.data.datasets import SPLITS
from longlens.errors import BadInput
from longlens.tasks.base import StoredTask, create_task

RNG = np.random.default_rng(0)


@pytest.fixture
def make(tmp_path):
    """A function that writes a table as CSV and makes a task of it."""

    def made(table, delimiter=",", **options):
        file = tmp_path / "data.csv"
        text = table if isinstance(table, str) else pd.DataFrame(table).to_csv(sep=delimiter, index=False)
        file.write_text(text)
        return create_task("files", path=file, **options)

    return made


def curves(count=60, width=8, **more):
    """A table of real curves that differ by class in all columns and tell nothing alone, and other columns."""
    noise = np.random.default_rng(0).normal(size=(count, width))
    return {**more, **{f"t{i}": noise[:, i] for i in range(width)}, "label": [*"ab"] * (count // 2)}


def rows(task, split="train"):
    samples = task.split(split).take(np.arange(len(task.split(split))))
    return [row[:length].tolist() for row, length in zip(samples.inputs, samples.lengths, strict=True)]


def warnings(task):
    task.prepare()
    return task.prepared.details["warnings"]


# Options


def test_options_at_their_defaults_leave_a_set_as_it_was(make):
    task = make(curves())
    before = {"version", "files", "path", "inputs", "labels", "standardize", "valid_share", "test_share", "seed"}
    assert task.identity().keys() == before
    assert make(curves(), ignore=("t0",)).identity().keys() == before | {"ignore"}


def test_another_choice_of_columns_is_another_set(make):
    table = curves()
    folders = {make(table, **options).folder() for options in ({}, {"ignore": ("t0",)}, {"columns": ("t1", "t0")})}
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("table", "other"),
    [
        ({"label": np.arange(60) + 0.3}, {"label": 1024 * (np.arange(60) + 0.3)}),
        ({f"t{i}": [0.3, 1.3] * 30 for i in range(8)}, {f"t{i}": [1024 * 0.3, 1024 * 1.3] * 30 for i in range(8)}),
        ({"label": ["ant", "cat"] * 30}, {"label": ["healthy", "ill"] * 30}),
        ({"a": [0.5] * 60}, {"b": [0.5] * 60}),
        ({f"t{i}": [1, 2] * 30 for i in range(8)}, {f"t{i}": [3, 4] * 30 for i in range(8)}),
    ],
    ids=["units of labels", "units of inputs", "names of classes", "names of columns", "symbols"],
)
def test_data_of_another_meaning_is_other_data(make, table, other):
    """Though the stored arrays are the same: numbers are scaled, and classes and symbols are places."""
    arrays, found = [], []
    for given in (table, table, other):  # in the same file
        task = make(curves() | given)
        arrays.append(StoredTask.fingerprint(task))
        found.append(task.fingerprint())
    assert len(set(arrays)) == 1
    assert found[0] == found[1] != found[2]


def test_an_id_column_semicolons_and_a_target_are_read(make):
    table = curves(id=range(1000, 1060))
    table["target"] = table.pop("label")
    with pytest.raises(BadInput, match="use --label-column target"):
        make(table, ";").prepare()
    task = make(table, ";", label_column="target", ignore=("id",), standardize=False)
    assert (task.spec.max_length, task.spec.outputs) == (8, 2)
    given = pd.DataFrame(table)[[f"t{i}" for i in range(8)]].to_numpy(np.float32)
    found = {tuple(np.float32(v) for v in np.ravel(row)) for split in SPLITS for row in rows(task, split)}
    assert found == {tuple(row) for row in given}


def long_table(count=20, length=5):
    """A row for each time step, in a wild order; the channel v grows ten times as fast as u."""
    table = pd.DataFrame(
        [
            {"series": f"s{g}", "at": t, "u": g + t / 10, "v": 10 * g + t + 0.5, "label": "xy"[g % 2]}
            for g in range(count)
            for t in range(length)
        ]
    )
    return table.sample(frac=1, random_state=0)


def test_series_in_long_form_are_sequences_of_channels(make):
    task = make(long_table(), group_column="series", time_column="at", standardize=False)
    assert (task.spec.inputs, task.spec.size, task.spec.max_length) == ("real", 2, 5)
    for split in SPLITS:
        samples = task.split(split).take(np.arange(len(task.split(split))))
        for values, target in zip(samples.inputs, samples.targets, strict=True):
            group = round(float(values[0, 0]))
            np.testing.assert_allclose(values, [[group + t / 10, 10 * group + t + 0.5] for t in range(5)], rtol=1e-6)
            assert target == group % 2
    assert task.prepared.details["layout"]["columns"] == ["u", "v"]


def test_channels_come_in_the_order_of_training_in_all_files(tmp_path):
    table = long_table()
    for split in SPLITS:
        columns = ["label", "v", "u", "at", "series"] if split == "test" else list(table.columns)
        table[columns].to_csv(tmp_path / f"{split}.csv", index=False)
    task = create_task("files", path=tmp_path, group_column="series", time_column="at")
    assert sorted(rows(task, "test")) == sorted(rows(task, "train"))


def test_a_channel_that_another_file_has_not_is_told(tmp_path):
    for split, names in zip(SPLITS, ({}, {}, {"v": "w"}), strict=True):
        long_table().rename(columns=names).to_csv(tmp_path / f"{split}.csv", index=False)
    task = create_task("files", path=tmp_path, group_column="series", time_column="at")
    with pytest.raises(BadInput, match=r"test.csv, line 1: there is no column 'v' of the sequences"):
        task.prepare()


def test_columns_come_in_the_order_of_training_in_all_files(tmp_path):
    table = pd.DataFrame(curves())
    for split in SPLITS:
        table[sorted(table.columns, reverse=split == "test")].to_csv(tmp_path / f"{split}.csv", index=False)
    task = create_task("files", path=tmp_path)
    assert rows(task, "test") == rows(task, "train")


def in_two(folder, train, test):
    for split, table in (("train", train), ("test", test)):
        table.to_csv(folder / f"{split}.csv", index=False)
    return create_task("files", path=folder)


def test_another_column_than_in_training_is_told(tmp_path):
    table = pd.DataFrame(curves())
    for test, both in (
        (table.assign(x=0.5)[["x", *table.columns]], "has the column 'x' where train.csv has 't0'; give both the same"),
        (table.drop(columns="t2"), "has the column 't3' where train.csv has 't2'; give both the same columns"),
        (table.assign(t8=0.5), "has the column 't8' which train.csv has not; give both the same columns"),
    ):
        with pytest.raises(BadInput, match=f"test.csv {both}"):
            in_two(tmp_path, table, test).prepare()
    shorter = table.drop(columns="t7")
    assert len(rows(in_two(tmp_path, table, shorter), "test")[0]) == 7, "fewer at its end"


def test_a_column_to_ignore_may_be_in_one_of_the_files(tmp_path):
    table = pd.DataFrame(curves())
    more = pd.DataFrame(curves(id=["q"] * 60))
    for train, test in ((table, more), (more, table)):
        task = create_task("files", path=in_two(tmp_path, train, test).path, ignore=("id",), standardize=False)
        np.testing.assert_allclose(np.squeeze(rows(task, "test")), table.drop(columns="label"), rtol=1e-6)
    task = create_task("files", path=task.path, ignore=("id", "place"))
    with pytest.raises(BadInput, match=r"train.csv, line 1: there is no column 'place' \(ignore\)"):
        task.prepare()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"delimiter": "ab"}, "delimiter must be one character that is in no number, or tab, got ab"),
        ({"delimiter": "."}, "delimiter must be one character that is in no number, or tab, got ."),
        ({"delimiter": ""}, "delimiter must be one character"),
        ({"time_column": "t"}, "time_column is for tables with a row for each time step: give group_column as well"),
        ({"ignore": ("label",)}, "must name different columns, got 'label' twice"),
        ({"columns": ("a",), "ignore": ("a",)}, "must name different columns, got 'a' twice"),
        ({"group_column": "g", "time_column": "g"}, "must name different columns, got 'g' twice"),
        ({"label_column": ""}, "must name different columns, got"),
    ],
)
def test_a_mistake_in_an_option_is_told_at_once(options, sentence):
    with pytest.raises(BadInput, match=sentence):
        create_task("files", path="anywhere", **options)


@pytest.mark.parametrize(("given", "meant"), [("tab", "\t"), ("\\t", "\t"), ("Semicolon", ";"), ("|", "|")])
def test_a_delimiter_may_be_named(given, meant):
    assert create_task("files", path="anywhere", delimiter=given).delimiter == meant


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("a.jsonl", {"ignore": ("id",)}, "ignore has no meaning for .*a.jsonl, which has an object in each line"),
        ("a.inputs.npy", {"label_column": "y"}, "label_column has no meaning for .*a.inputs.npy, which is an array"),
    ],
)
def test_an_option_without_a_meaning_is_refused(tmp_path, name, options, sentence):
    (tmp_path / name).write_text("")
    with pytest.raises(BadInput, match=sentence):
        create_task("files", path=tmp_path, **options).prepare()


# Frames


def same(one, other):
    for split in SPLITS:
        assert rows(one, split) == rows(other, split)
        targets = [task.split(split).take(np.arange(len(task.split(split)))).targets.tolist() for task in (one, other)]
        assert targets[0] == targets[1]


def test_a_frame_is_the_same_as_its_file(make):
    table = curves(id=range(60))
    same(create_task("files", frame=pd.DataFrame(table), ignore=("id",)), make(table, ignore=("id",)))


def test_arrays_are_the_same_as_their_files(tmp_path):
    rng = np.random.default_rng(1)
    inputs, labels = rng.normal(size=(40, 6, 2)), np.array(["x", "y"] * 20)
    np.save(tmp_path / "a.inputs.npy", inputs)
    np.save(tmp_path / "a.labels.npy", labels)
    same(create_task("files", frame=(inputs, labels)), create_task("files", path=tmp_path))


@pytest.mark.parametrize(
    "labels",
    [
        pd.Series(["x", "y"] * 20),
        pd.Series(["x", "y"] * 20, dtype="category"),
        np.array(["x", "y"] * 20, dtype=object),
        pd.Series([0, 1] * 20, index=range(40, 80)),
    ],
    ids=["texts", "categories", "objects", "numbers"],
)
def test_each_row_of_a_frame_beside_its_labels_is_a_sequence(labels):
    """Also where it has as many columns as rows."""
    frame = pd.DataFrame(np.random.default_rng(1).normal(size=(40, 40))).rename(columns="t{}".format)
    task = create_task("files", frame=(frame, labels))
    assert task.spec.inputs == "real"
    same(task, create_task("files", frame=(frame.to_numpy(), np.asarray(labels))))


def test_switches_of_a_frame_beside_its_labels_are_numbers():
    frame = pd.DataFrame({"on": [True, False] * 20, "u": np.arange(40) / 4})
    task = create_task("files", frame=(frame, ["x", "y"] * 20), standardize=False)
    assert {tuple(np.ravel(row)) for row in rows(task)} <= {(1 - n % 2, n / 4) for n in range(40)}


def test_texts_of_a_frame_may_have_any_line_ends():
    texts = ["a\rb", "c\nd", "e\r\nf", 'g,"h"'] * 10
    task = create_task("files", frame=pd.DataFrame({"input": texts, "label": ["x", "y"] * 20}))
    assert {len(row) for row in rows(task)} == {3, 4, 5}


def test_a_frame_has_a_path_by_which_the_task_is_made_again(home):
    frame = pd.DataFrame(curves())
    task = create_task("files", frame=frame)
    again = create_task("files", frame=frame.copy())
    assert task == again
    assert task.folder() == again.folder()
    assert create_task("files", **task.values()) == task
    other = create_task("files", frame=frame.assign(t0=0.5))
    assert other.path != task.path
    frames = sorted(folder.name for folder in (home / "frames").iterdir())
    assert frames == sorted(path.rpartition("/")[2] for path in (task.path, other.path))


@pytest.mark.parametrize(
    "inputs",
    [
        ["ab", "ba", "abc"] * 10,
        [[1, 2], [3], [4, 5, 6]] * 10,
        [np.ones((2, 3)), np.zeros((1, 3)), np.ones((4, 3))] * 10,
        np.array(["ab", "ba", "abc"] * 10),
    ],
    ids=["texts", "lists", "arrays of different lengths", "array of texts"],
)
def test_sequences_of_different_lengths_are_taken(inputs):
    task = create_task("files", frame=(inputs, [0, 1, 1] * 10))
    assert task.spec.max_length == max(map(len, inputs))
    assert sorted(np.concatenate([s.take(np.arange(len(s))).lengths for s in map(task.split, SPLITS)])) == sorted(
        map(len, inputs)
    )


def test_a_frame_may_have_sequences_in_a_column():
    frame = pd.DataFrame({"series": [np.arange(n % 3 + 1) / 2 for n in range(30)], "y": [0, 1] * 15})
    task = create_task("files", frame=frame, input_column="series", label_column="y", standardize=False)
    assert {tuple(np.ravel(row)) for row in rows(task)} == {(0.0,), (0.0, 0.5), (0.0, 0.5, 1.0)}


def test_switches_and_dates_of_a_frame_are_taken():
    frame = pd.DataFrame(
        {
            "g": np.repeat(np.arange(20), 3),
            "t": list(pd.date_range("2026-01-01", periods=3))[::-1] * 20,
            "on": [True, False, True] * 20,
            "u": np.tile([0.0, 1.0, 2.0], 20),
            "label": np.repeat(["a", "b"] * 10, 3),
        }
    )
    task = create_task("files", frame=frame, group_column="g", time_column="t", standardize=False)
    assert rows(task)[0] == [[1.0, 2.0], [0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (5, r"frame must be a pandas DataFrame, or a pair \(inputs, labels\) of arrays or lists, got int"),
        (np.ones((3, 2)), "frame must be a pandas DataFrame, .* got ndarray"),
        ([[1, 2], [3, 4]], "frame must be a pandas DataFrame, .* got list"),  # two sequences without labels
        ((np.ones((3, 2)), [0, 1]), r"one label a sequence, got 3 and \(2,\)"),
        ((["ab", object()], [0, 1]), r"row 1 of frame must be a text or numbers, and a label"),
        (pd.DataFrame({"input": [[1], [2]]}), "frame must have a column 'label', got input"),
    ],
)
def test_what_is_no_frame_is_told(frame, sentence, home):
    with pytest.raises(BadInput, match=sentence):
        create_task("files", frame=frame)
    assert not list(home.glob("frames/*"))


def test_a_frame_and_a_path_are_not_given_together():
    with pytest.raises(BadInput, match="task 'files' needs 'path' or 'frame', got both"):
        create_task("files", frame=(np.ones((3, 2)), [0, 1, 0]), path="here")


def test_what_is_missing_in_a_frame_is_told_with_its_line():
    frame = pd.DataFrame(curves())
    frame.loc[3, "t2"] = np.nan
    with pytest.raises(BadInput, match=r"train.csv, line 5: a value must be a number, and only cells at the end"):
        create_task("files", frame=frame).prepare()


# Warnings


def test_a_good_table_is_no_reason_to_warn(make):
    assert warnings(make(curves())) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("id", [5, 7] * 30),
        ("patient_id", RNG.permutation(60)),
        ("n", range(100, 160)),
        ("n", range(60, 0, -1)),
        ("n", RNG.permutation(1000)[:60]),
    ],
    ids=["called so", "called so with more", "running", "running down", "all different"],
)
def test_a_column_that_looks_like_an_id_is_worth_a_warning(make, name, values):
    (warning,) = warnings(make(curves(**{name: values})))
    assert warning == f"column '{name}' looks like a number of the row, not like a measurement; use --ignore {name}"
    assert warnings(make(curves(**{name: values}), ignore=(name,))) == []


def test_few_rows_are_enough_for_numbers_that_run(make):
    for numbers in (range(12), range(12, 0, -1)):
        (warning,) = warnings(make(curves(12, n=numbers)))
        assert warning.startswith("column 'n' looks like a number of the row")


def test_counts_and_real_numbers_do_not_look_like_ids(make):
    rng = np.random.default_rng(1)
    assert warnings(make(curves(beats=rng.integers(0, 9, 60)))) == []
    assert warnings(make(curves(time=np.sort(rng.normal(size=60))))) == []
    table = {f"t{i}": rng.permutation(1000)[:60] for i in range(8)} | {"label": [*"ab"] * 30}  # all are counts
    assert warnings(make(table, inputs="real")) == []


def test_whole_numbers_that_are_many_are_worth_a_warning(make, tmp_path):
    rng = np.random.default_rng(1)
    values = rng.integers(0, 300, (600, 60))
    table = {f"t{i}": values[:, i] for i in range(60)} | {"label": [*"ab"] * 300}
    (warning,) = warnings(make(table))
    assert warning.startswith("the inputs are read as 300 symbols, as all are whole numbers")
    assert warning.endswith("use --inputs real")
    for inputs in ("real", "tokens"):  # said by the user
        assert warnings(make(table, inputs=inputs)) == []


def test_a_channel_that_never_changes_is_worth_a_warning(make):
    rng = np.random.default_rng(1)
    table = long_table(40).assign(w=0.5)
    task = make(table, group_column="series", time_column="at")
    assert warnings(task) == ["channel 'w' never changes; use --ignore w"]
    inputs = rng.normal(size=(40, 5, 3)) * [1, 0, 1]
    task = create_task("files", frame=(inputs, [0, 1] * 20))
    assert warnings(task) == ["channel 2 never changes; leave it out of the file"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0.5, 1.5] * 30, True),
        ([0.5, 1.5] * 29 + [0.5, 0.5], False),  # 59 of 60 are right
        (np.tile([-1.0, 1.0], 30) * RNG.uniform(1, 2, 60), True),
        (np.tile([-0.3, 0.3], 30) + RNG.normal(size=60), False),
    ],
    ids=["a value for each class", "with an exception", "a threshold", "a tendency"],
)
def test_a_column_that_tells_the_label_is_worth_a_warning(make, values, told):
    found = warnings(make(curves(diagnosis=values)))
    sentence = "column 'diagnosis' alone tells the label, and no other does; if that is not known of new sequences, "
    assert found == ([f"{sentence}use --ignore diagnosis"] if told else [])


def test_a_label_of_several_classes_is_found_in_a_column(make):
    table = curves(code=[3.5, 1.5, 2.5] * 20) | {"label": [*"abc"] * 20}
    assert "column 'code' alone tells the label" in warnings(make(table))[0]


def test_columns_that_all_tell_the_label_are_a_task_that_is_easy(make):
    rng = np.random.default_rng(1)
    table = {f"t{i}": np.tile([-1.0, 1.0], 30) * rng.uniform(1, 2, 60) for i in range(8)} | {"label": [*"ab"] * 30}
    assert warnings(make(table)) == []


def test_few_rows_tell_nothing_of_a_column(make):
    table = curves(28, x=[0.5, 1.5] * 14)
    assert warnings(make(table)) == []


def test_a_channel_of_long_form_that_tells_the_label_is_found(make):
    rng = np.random.default_rng(1)
    table = long_table(40)
    noise = rng.normal(size=(2, len(table)))
    table = table.assign(u=noise[0], v=noise[1], group=[1.5 if label == "x" else 2.5 for label in table["label"]])
    (warning,) = warnings(make(table, group_column="series", time_column="at"))
    assert warning.startswith("channel 'group' alone tells the label")


def test_classes_with_few_samples_are_worth_a_warning(make):
    table = curves() | {"label": [*"ab"] * 28 + [*"cccd"]}
    (warning,) = warnings(make(table))
    assert "some classes have fewer than 5 samples: 'c' has 3, 'd' has 1; add samples" in warning
    table = curves() | {"label": ["a"] * 56 + ["b"] * 4}
    assert warnings(make(table)) == ["class 'b' has 4 samples only; add samples, or leave out the rows"]
    (warning,) = warnings(make(curves() | {"label": [*range(1, 21)] * 3}))
    assert "use --labels numbers if they are quantities" in warning


def test_equal_numbers_to_be_predicted_are_worth_a_warning(make):
    found = warnings(make(curves() | {"label": [0.0] * 59 + [0.5]}))
    equal = "set are all 0, so that its R² is not a number; hold out more sequences, or others by another task.seed"
    assert found == [f"the labels of the valid {equal}", f"the labels of the test {equal}"]


def test_warnings_are_said_once_by_the_first_use(make, capsys):
    table = curves(id=range(60))
    task = make(table)
    assert task.spec.outputs == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("longlens: files (data.csv): column 'id' looks like a number of the row")
    assert create_task("files", path=task.path).spec.outputs == 2
    assert capsys.readouterr().err == ""


# Curves


def test_curves_are_those_of_the_file_by_class(make):
    table = curves()
    found, channels = make(table).curves("train", 0, 4)
    assert list(found) == ["class a", "class b"]
    assert channels == ["channel 1"]
    given = pd.DataFrame(table)
    for name, drawn in found.items():
        assert len(drawn) == 4
        there = given[given["label"] == name[-1]].drop(columns="label").to_numpy()
        for curve in drawn:
            assert np.abs(there - curve[:, 0]).max(axis=1).min() < 1e-5


def test_curves_of_numbers_are_cut_into_three(make):
    found, _ = make(curves() | {"label": np.arange(60) + 0.5}).curves("train", 0, 100)
    assert [len(curves) for curves in found.values()] == [16, 16, 16]
    assert next(iter(found)).startswith("labels from ")


def test_curves_of_long_form_have_channels_with_names(make):
    found, channels = make(long_table(), group_column="series", time_column="at").curves("train", 0, 2)
    assert channels == ["u", "v"]
    assert all(curve.shape == (5, 2) for curves in found.values() for curve in curves)


def test_a_set_that_was_made_before_there_were_layouts_is_used(make):
    task = make(curves())
    for name in ("layout", "warnings"):
        del task.prepared.details[name]
    assert list(task.curves("train", 0, 2)[0]) == ["class a", "class b"]
    assert task.codec()["classes"] == ["a", "b"]


def test_sequences_in_the_cells_of_a_named_column_are_screened(make):
    """A position that tells the label is named by its number: the column holds all of them."""
    noise = np.random.default_rng(0).normal(size=(60, 6))
    noise[:, 2] = np.arange(60) % 2
    table = {"input": [" ".join(f"{x:.3f}" for x in row) for row in noise], "label": [*"ab"] * 30}
    assert warnings(make(table, columns=("input",))) == warnings(make(table))
