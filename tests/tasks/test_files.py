"""Your own files as a task: each format, each promise of the documentation, and a sentence for each mistake."""

import csv
import json
import os
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from longlens.data.datasets import SPLITS
from longlens.errors import BadInput
from longlens.tasks.base import create_task


@pytest.fixture
def make(tmp_path):
    """A function that writes files (texts, bytes or arrays, by name) into the folder of a task."""

    def made(files, **options):
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            if isinstance(content, np.ndarray):
                np.save(folder / name, content)
            else:
                (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return create_task("files", path=str(folder), **options)

    return made


def in_three(suffix, content):
    return {f"{split}.{suffix}": content for split in SPLITS}


def jsonl(inputs, labels):
    rows = zip(inputs, labels, strict=True)
    return "".join(json.dumps({"input": given, "label": label}) + "\n" for given, label in rows)


def arrays(inputs, labels, lengths=None):
    parts = {"inputs": inputs, "labels": labels} | ({} if lengths is None else {"lengths": lengths})
    return {f"{split}.{part}.npy": np.asarray(array) for split in SPLITS for part, array in parts.items()}


def rows(task, split="train"):
    """The samples without their padding."""
    samples = task.split(split).take(np.arange(len(task.split(split))))
    return [row[:length].tolist() for row, length in zip(samples.inputs, samples.lengths, strict=True)]


def decoded(task, split="train"):
    """The samples as symbols of the vocabulary."""
    return [[task.prepared.details["symbols"][token] for token in row] for row in rows(task, split)]


def targets(task, split="train"):
    return task.split(split).take(np.arange(len(task.split(split)))).targets


def classes(task, split="train"):
    """The names of the classes of all samples."""
    return [task.prepared.details["classes"][target] for target in targets(task, split)]


# Formats


@pytest.mark.parametrize(
    "content",
    [
        "input,label\nab,x\nba,y\nabc,x\n",
        "input,label\r\nab,x\r\nba,y\r\nabc,x\r\n",
        "\ufefflabel,id,input\nx,1,ab\ny,2,ba\nx,3,abc",
        ' label , input\n"x","ab"\n\n y ,ba\nx,abc\n\n',
    ],
    ids=["plain", "crlf", "bom, another order, and more columns", "spaces, quotes and blank lines"],
)
def test_a_csv_file_has_texts_in_its_column_input(make, content):
    task = make(in_three("csv", content))
    assert decoded(task) == [["a", "b"], ["b", "a"], ["a", "b", "c"]]
    assert classes(task) == ["x", "y", "x"]
    assert task.prepared.details["symbols"] == ["<pad>", "<unk>", "a", "b", "c"]
    assert (task.spec.inputs, task.spec.size, task.spec.max_length) == ("tokens", 5, 3)
    assert (task.spec.head, task.spec.outputs, task.spec.metric) == ("classify", 2, "accuracy")


def test_quoted_texts_keep_their_commas_quotes_and_line_breaks(make):
    texts = ['a, "b"', "c\nd", "e\r\nf", "ß→🙂"]
    content = "input,label\n" + "".join(
        f'"{text.replace(chr(34), chr(34) * 2)}",{i % 2}\n' for i, text in enumerate(texts)
    )
    assert decoded(make(in_three("csv", content))) == [list(text) for text in texts]


def test_a_text_may_be_longer_than_the_limit_of_the_csv_module(make):
    limit = csv.field_size_limit(131072)
    try:
        assert make(in_three("csv", f"input,label\n{'a' * 200_000},0\nb,1\n")).spec.max_length == 200_000
    finally:
        csv.field_size_limit(limit)


@pytest.mark.parametrize("inputs", ["auto", "tokens"])
def test_whole_numbers_with_spaces_between_them_are_tokens(make, inputs):
    task = make(in_three("csv", "input,label\n3 10  7,0\n-7,1\n7 3,1\n"), inputs=inputs)
    assert decoded(task) == [["3", "10", "7"], ["-7"], ["7", "3"]]
    assert task.prepared.details["symbols"] == ["<pad>", "<unk>", "-7", "3", "7", "10"]


def test_digits_without_spaces_are_a_text(make):
    assert decoded(make(in_three("csv", "input,label\n0110,0\n10,1\n"))) == [list("0110"), list("10")]


def test_texts_may_have_numbers_among_them(make):
    task = make(in_three("csv", "input,label\n1 2,0\na b,1\nno,1\n"))
    assert decoded(task) == [list("1 2"), list("a b"), list("no")]


def test_empty_cells_at_the_end_make_a_sequence_shorter(make):
    task = make(in_three("csv", "a,label,b,c\n1.5,0,2,-3\n4,1,5, \n6,1,,\n"), standardize=False)
    assert rows(task) == [[[1.5], [2.0], [-3.0]], [[4.0], [5.0]], [[6.0]]]
    assert classes(task) == ["0", "1", "1"]


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_jsonl_file_has_texts(make, start, end):
    content = start + jsonl(["ab", "ßa, \n"], ["x", "y"]).replace("\n", end)
    assert decoded(make(in_three("jsonl", content))) == [["a", "b"], ["ß", "a", ",", " ", "\n"]]


def test_a_jsonl_file_has_lists_of_numbers(make):
    assert decoded(make(in_three("jsonl", jsonl([[5, 2], [2]], [0, 1])))) == [["5", "2"], ["2"]]


def test_a_jsonl_file_has_channels(make):
    inputs = [[[1, 2.5], [3, 4]], [[5, 6]]]
    task = make(in_three("jsonl", jsonl(inputs, [0, 1])), standardize=False)
    assert rows(task) == inputs
    assert (task.spec.inputs, task.spec.size) == ("real", 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_arrays_have_lengths_if_they_differ(make, dtype):
    inputs = np.arange(24, dtype=dtype).reshape(2, 4, 3)
    inputs[0, 2:] = np.nan  # padding does not count
    task = make(arrays(inputs, [0, 1], [2, 4]), standardize=False)
    assert rows(task) == [inputs[0, :2].tolist(), inputs[1].tolist()]
    assert (task.spec.size, task.spec.max_length) == (3, 4)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16, bool])
def test_arrays_of_whole_numbers_are_tokens_of_equal_length(make, dtype):
    inputs = np.array([[0, 1, 1], [1, 0, 0]], dtype=dtype)
    for shaped in (inputs, inputs[..., None]):
        assert decoded(make(arrays(shaped, [0, 1]))) == [["0", "1", "1"], ["1", "0", "0"]]


@pytest.mark.parametrize("labels", [["x", "y", "x"], [b"x", b"y", b"x"]])
def test_labels_in_arrays_may_be_texts(make, labels):
    assert classes(make(arrays(np.eye(3), np.array(labels)))) == ["x", "y", "x"]


def test_splits_may_have_different_formats(make):
    task = make({
        "train.csv": "input,label\n1 2,7\n3 1,8\n",
        "valid.jsonl": jsonl([[3]], [8.0]),
        "test.inputs.npy": np.array([[2, 2]]),
        "test.labels.npy": np.array([7]),
    })  # fmt: skip
    assert [decoded(task, split) for split in SPLITS] == [[["1", "2"], ["3", "1"]], [["3"]], [["2", "2"]]]
    assert [classes(task, split) for split in SPLITS] == [["7", "8"], ["8"], ["7"]]


def test_other_and_hidden_files_are_left_alone(make):
    task = make(in_three("jsonl", jsonl(["a", "b"], [0, 1])) | {"notes.txt": "?", "._train.jsonl": b"\x00\xff"})
    assert decoded(task) == [["a"], ["b"]]


# Inputs


def test_values_that_training_has_not_are_unknown(make):
    files = {"train.jsonl": jsonl(["abd", "ba"], [0, 1]), "test.jsonl": jsonl(["acz", "eb"], [0, 1])}
    task = make({**files, "valid.jsonl": files["test.jsonl"]})
    assert task.prepared.details["symbols"] == ["<pad>", "<unk>", "a", "b", "d"]
    assert rows(task, "test") == [[2, 1, 1], [1, 3]]


def test_many_unknown_numbers_are_worth_a_warning(make):
    few, many = jsonl([[1, 2], [2]], [0, 1]), jsonl([[1, 2], [3]], [0, 1])
    assert "33%" in make({"train.jsonl": few, "valid.jsonl": few, "test.jsonl": many}).prepared.details["warning"]
    assert "warning" not in make(in_three("jsonl", few)).prepared.details


def test_whole_numbers_written_with_a_point_are_real_unless_they_are_said_to_be_tokens(make):
    files = in_three("jsonl", jsonl([[1.0, 2.0], [2.0]], [0, 1]))
    assert make(files).spec.inputs == "real"
    assert decoded(make(files, inputs="tokens")) == [["1", "2"], ["2"]]


def test_one_fraction_in_any_split_makes_all_inputs_real(make):
    whole, one = jsonl([[1, 2], [2]], [0, 1]), jsonl([[1, 2.5], [2]], [0, 1])
    task = make({"train.jsonl": whole, "valid.jsonl": whole, "test.jsonl": one}, standardize=False)
    assert rows(task) == [[[1.0], [2.0]], [[2.0]]]


def test_whole_numbers_may_be_said_to_be_real(make):
    task = make(in_three("jsonl", jsonl([[1, 2], [4]], [0, 1])), inputs="real", standardize=False)
    assert rows(task) == [[[1.0], [2.0]], [[4.0]]]


def test_real_inputs_are_standardized_over_the_training_set_channel_by_channel(make):
    values = np.random.default_rng(0).normal(5, [1, 30, 0], (8, 6, 3)) * [1, 1, 0] + [0, 0, 0.1]
    lengths = np.array([6, 1, 3, 6, 2, 5, 4, 6])
    files = arrays(values, np.arange(8) % 2, lengths)
    files["test.inputs.npy"] = values + 100
    task = make(files)
    seen = np.concatenate([row[:length] for row, length in zip(values, lengths, strict=True)])
    mean, deviation = seen.mean(axis=0), [*seen.std(axis=0)[:2], 1]  # a constant channel is only shifted
    for split, there in (("train", values), ("test", values + 100)):
        for row, given, length in zip(rows(task, split), there, lengths, strict=True):
            np.testing.assert_allclose(row, ((given - mean) / deviation)[:length], rtol=1e-5, atol=1e-6)


def test_a_constant_channel_is_not_blown_up_by_rounding(make):
    files = arrays(np.full((2, 5), 0.1), [0, 1]) | {"test.inputs.npy": np.full((2, 5), 0.2)}
    np.testing.assert_allclose(rows(make(files), "test"), np.full((2, 5, 1), 0.1), rtol=1e-6)


def test_held_out_samples_do_not_count_for_standardizing(make):
    values = np.random.default_rng(0).normal(size=(40, 3))
    task = make({"all.inputs.npy": values, "all.labels.npy": values[:, 0]}, valid_share=0.4, test_share=0.4)
    assert len(task.split("train")) == 8
    np.testing.assert_allclose(np.mean(rows(task)), 0, atol=1e-6)
    np.testing.assert_allclose(np.std(rows(task)), 1, atol=1e-6)
    np.testing.assert_allclose([targets(task).mean(), targets(task).std()], [0, 1], atol=1e-6)


def test_longer_sequences_are_cut(make):
    files = in_three("jsonl", jsonl(["abcde", "ab"], [0, 1]))
    task = make(files, max_length=3)
    assert task.spec.max_length == 3
    assert decoded(task) == [["a", "b", "c"], ["a", "b"]]
    assert make(files, max_length=9).spec.max_length == 5
    assert task.codec()["cut"]
    assert not make(files, max_length=9).codec()["cut"], "a model of 5 refuses what is longer, as without the option"
    assert make(files).folder() == task.folder()  # sequences are stored whole


# Labels


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 9, 10], ["9", "10"]),
        ([1.0, 2.0, 1], ["1", "2"]),
        ([1, "1", 2], ["1", "2"]),
        (["007", "7", "08"], ["7", "007", "08"]),
        (["1_0", "10", "é"], ["10", "1_0", "é"]),
        ([True, False, True], ["false", "true"]),
        ([True, 1, 0], ["0", "1", "true"]),
        ([2**70, 2**70 + 1, 2**63], [str(2**63), str(2**70), str(2**70 + 1)]),
        (["a", 3, "b"], ["3", "a", "b"]),
        (["-1", "+1", " 1 "], ["-1", "1"]),
    ],
)
def test_labels_are_classes_in_order_by_default(make, labels, names):
    task = make(in_three("jsonl", jsonl("abc", labels)))
    assert task.prepared.details["classes"] == names
    assert targets(task).dtype == np.int64
    spoken = [str(label).lower() if isinstance(label, bool) else str(label) for label in labels]
    assert [name.strip(" +").removesuffix(".0") for name in spoken] == classes(task)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "npy"])
def test_labels_with_a_fraction_are_to_be_predicted(make, suffix):
    labels = [1, 2.5, 7, 3]
    table = "input,label\n" + "".join(f"{i},{label}\n" for i, label in zip("abcd", labels, strict=True))
    files = arrays(np.arange(8).reshape(4, 2), labels) if suffix == "npy" else None
    files = files or in_three(suffix, table if suffix == "csv" else jsonl("abcd", labels))
    task = make(files, standardize=False)
    assert targets(task).dtype == np.float32
    assert targets(task).tolist() == labels
    assert (task.spec.head, task.spec.outputs, task.spec.metric) == ("regress", 1, "r2")
    task = make(files)
    np.testing.assert_allclose(targets(task), (np.array(labels) - np.mean(labels)) / np.std(labels), rtol=1e-6)
    details = task.prepared.details
    np.testing.assert_allclose([details["label_mean"], details["label_deviation"]], [np.mean(labels), np.std(labels)])


def test_the_kind_of_labels_can_be_said(make):
    whole, fractions = jsonl("abc", [10, 20, 10]), jsonl("abc", [0.5, 1.5, 0.5])
    assert make(in_three("jsonl", whole), labels="numbers", standardize=False).spec.head == "regress"
    assert classes(make(in_three("jsonl", fractions), labels="classes")) == ["0.5", "1.5", "0.5"]


def test_numbers_to_be_predicted_need_not_be_in_training(make):
    files = {f"{split}.jsonl": jsonl("ab", [i + 0.5, i + 1]) for i, split in enumerate(SPLITS)}
    assert targets(make(files, standardize=False), "test").tolist() == [2.5, 3]


# Splits


def single(count, labels=(0, 1)):
    return jsonl([[i] for i in range(count)], [labels[i % len(labels)] for i in range(count)])


def numbered(count, name="mine.inputs.npy"):
    """Samples whose inputs are their numbers, as real ones, so that none is unknown."""
    return {name: np.arange(count, dtype=float)[:, None], name.replace("inputs", "labels"): np.arange(count) % 2}


def drawn(task):
    """The numbers of the samples in each split."""
    return {split: [int(row[0][0]) for row in rows(task, split)] for split in SPLITS}


def test_a_single_file_of_any_name_is_cut_into_three(make):
    made = drawn(make(numbered(50), standardize=False, valid_share=0.2))
    assert [len(made[split]) for split in SPLITS] == [35, 10, 5]
    assert sorted(chain(*made.values())) == list(range(50))
    assert made["train"] == sorted(made["train"])


def test_labels_stay_with_their_sequences(make):
    task = make({"mine.csv": "input,label\n" + "".join(f"{'ab'[i % 2]}{i},{i % 2}\n" for i in range(50))})
    for split in SPLITS:
        for letters, label in zip(decoded(task, split), targets(task, split), strict=True):
            assert letters[0] == "ab"[label]


@pytest.mark.parametrize(
    ("given", "sizes"), [(("train", "test"), (18, 2, 7)), (("train", "valid"), (18, 7, 2)), (("train",), (16, 2, 2))]
)
def test_what_is_missing_is_held_out_of_the_training_set(make, given, sizes):
    files = {}
    for split in given:
        files |= numbered(20 if split == "train" else 7, f"{split}.inputs.npy")
    made = drawn(make(files, standardize=False))
    assert tuple(len(made[split]) for split in SPLITS) == sizes
    from_train = [made[split] for split in SPLITS if split == "train" or split not in given]
    assert sorted(chain(*from_train)) == list(range(20))


def test_the_seed_decides_what_is_held_out(make):
    task = make(numbered(50), standardize=False)
    first = drawn(task)
    task.prepare(force=True)
    assert drawn(task) == first
    other = drawn(create_task("files", path=task.path, standardize=False, seed=1))
    assert all(set(first[split]) != set(other[split]) for split in SPLITS)


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_of_each_class_stays_in_training(make, seed):
    labels = [*"aaaaaaaaaaaaaa", "rare", "b", "b", "c", "d", "d"]
    task = make({"mine.jsonl": jsonl(["s"] * 20, labels)}, seed=seed, valid_share=0.3, test_share=0.3)
    assert set(classes(task)) == set(labels)
    assert Counter(chain(*(classes(task, split) for split in SPLITS))) == Counter(labels)


def test_one_file_can_be_the_path(make):
    folder = make(in_three("jsonl", single(20)))
    task = create_task("files", path=os.path.join(folder.path, "valid.jsonl"))
    assert sum(len(task.split(split)) for split in SPLITS) == 20
    assert task.title == "files (valid.jsonl)"


def test_a_path_object_and_the_home_folder_can_be_the_path(make, tmp_path, monkeypatch):
    make(in_three("jsonl", single(4)))
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "data", "~/data"):
        task = create_task("files", path=path)
        assert len(task.split("train")) == 4
        assert task.title == "files (data)"


@pytest.mark.parametrize("changed", ["mine.inputs.npy", "mine.labels.npy", "mine.lengths.npy"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_changed_file_makes_a_new_set(make, tmp_path, changed, alone):
    labels = np.arange(20) % 2
    files = {"mine.inputs.npy": np.ones((20, 3)), "mine.labels.npy": labels, "mine.lengths.npy": labels + 1}
    path = os.path.join(make(files).path, "mine.inputs.npy" if alone else "")
    before, unchanged = (create_task("files", path=path).folder() for _ in range(2))
    assert before == unchanged
    os.utime(tmp_path / "data" / changed, ns=(1, 1))
    assert create_task("files", path=path).folder() != before


def test_a_prepared_set_is_read_from_the_cache(make):
    task = make(in_three("jsonl", single(4)))
    assert not task.is_prepared()
    task.prepare()
    assert create_task("files", path=task.path).is_prepared()
    assert not create_task("files", path=task.path, seed=1).is_prepared()


def test_batches_are_padded_with_zeros_and_know_their_lengths(make):
    for inputs in (["abc", "a", "bc", "cabca", "b"], [[[1.5, 2], [3, 4]], [[5, 6]], [[7, 8]], [[9, 8]] * 3, [[1, 0]]]):
        task = make(in_three("jsonl", jsonl(inputs, [0, 1, 0, 1, 1])))
        batches = list(task.batches("train", 2))
        assert [len(batch) for batch in batches] == [2, 2, 1]
        for batch, given in zip(batches, (inputs[:2], inputs[2:4], inputs[4:]), strict=True):
            assert batch.lengths.tolist() == [len(sequence) for sequence in given]
            assert batch.inputs.shape[:2] == (len(given), max(map(len, given)))
            assert (batch.inputs[~batch.mask] == 0).all()
            assert batch.inputs.dtype == (torch.int64 if batch.inputs.ndim == 2 else torch.float32)
            assert batch.inputs.ndim == 3 or (batch.inputs[batch.mask] >= 2).all()
        assert [target for batch in batches for target in batch.targets.tolist()] == [0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("inputs", "labels", "shown"),
    [
        (["abz", "ba"], ["x", "y"], "abz\n= x"),
        ([[10, 2], [3]], ["x", "y"], "10 2\n= x"),
        ([[0.5, 2], [3]], [1, 2.5], "[0.5 2. ]\n= 1.0"),
        ([[[0.5, 2]], [[3, 4]]], [1, 2], "[[0.5 2. ]]\n= 1"),
    ],
)
def test_a_sample_can_be_read(make, inputs, labels, shown):
    task = make(in_three("jsonl", jsonl(inputs, labels)), standardize=False)
    assert task.render(task.split("train").take(np.arange(2)), 0) == shown


# Mistakes


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", r"train.csv, line 1: one column must be 'label', and one may be 'input', got \(none\)"),
        ("input;lable\na;0\n", "one column must be 'label', and one may be 'input', got input, lable"),
        ("label,input,label\n0,a,0\n", "the columns must have different names, got 'label' twice"),
        ("label,a,a,c\n0,1,2,3\n", "line 1: the columns must have different names, got 'a' twice"),
        ("input,label,id,id\na,0,1,2\n", "line 1: the columns must have different names, got 'id' twice"),
        ("input,label\n", "train.csv has no sequences"),
        ("label\n0\n1\n", "line 1: without 'input', all columns but 'label' are the sequence"),
        (",x,label\n0,5,1\n1,6,0\n", "each needs a name"),
        ("input,label\na,0\nb,1,2\n", "line 3 must have 2 cells like the header, got 3"),
        ("input,label\na,0\n,1\n", "line 3: the sequence is empty"),
        ("a,b,label\n1,2,0\n,,1\n", "line 3: the sequence is empty"),
        (
            "a,b,label\n1,2,0\n,3,1\n",
            "line 3: a value must be a number, and only cells at the end may be empty, got an empty one before others",
        ),
        ("a,b,label\n1,2,0\n1,x,1\n", "line 3: a value must be a number, .* got 'x'"),
        ("a,b,label\n1,2,0\n1,nan,1\n", "line 3: all numbers must be finite and fit into float32 or int64, got nan"),
        ("a,b,label\n1,2,0\n1,1e39,1\n", r"line 3: all numbers must be finite .* got 1e\+39"),
        (f"a,b,label\n1,2,0\n1,{2**70},1\n", "line 3: the input must be .*a list of numbers of 64 bits"),
        (f"a,b,label\n1,2,0\n-1,{2**63},1\n", "line 3: whole numbers must fit into int64, got 9223372036854775808"),
        (
            f"a,b,label\n1,2,0\n{2**63},3,1\n",
            "line 3: whole numbers must fit into int64, got 9223372036854775808",
        ),
        (f"input,label\n1 2,0\n-1 {2**63},1\n", "line 3: whole numbers must fit into int64, got 9223372036854775808"),
        (f"input,label\na,0\nb,{'9' * 5000}\n", "line 3: the label must be a finite number or a text, .* got inf"),
        ("input,label\n1 2,0\n3 4,1\n5 n/a,1\n", "line 4: a value must be a number, .* got 'n/a'"),
        (
            'input,label\n"[1, 2]",0\n"[3]",1\n',
            r"line 2: the input '\[1, 2\]' has commas or brackets; write numbers as",
        ),
        ('input,label\n"0,5 1,5",0\n"3,5",1\n', "line 2: the input '0,5 1,5' has commas or brackets"),
        ('input,label\na,0\n"b,1\n', "line 3: unexpected end of data; check the commas and quotes"),
        ("input,label\na,0\nb, \n", "line 3: the label must be a finite number or a text, and not empty, got ''"),
        ("input,label\na,0\nb,nan\n", "line 3: the label must be a finite number or a text, .* got nan"),
        ("input,label\na,0.5\nb,N/A\n", "numbers such as 0.5 and texts such as 'N/A'; correct them, or use labels="),
        ("input,label\na,0\nb,0\n", "all labels in .* are 0; there must be two different ones"),
        ("input,label\nä,0\n".encode("latin-1"), "train.csv is not a text in UTF-8"),
    ],
)
def test_a_mistake_in_a_csv_file_is_told_with_its_line(make, content, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(in_three("csv", content)).prepare()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r'line 2 must be \{"input": …, "label": …\}, got what cannot be read: '),
        ("[1, 2]", r'line 2 must be \{"input": …, "label": …\}, got \[1, 2\]'),
        ('{"input": "a"}', r"line 2 must be .* got \{.input.: .a.\}"),
        ('{"input": [1], "label": null}', "line 2: the label must be a finite number or a text, .* got None"),
        ('{"input": [1], "label": [1]}', r"line 2: the label must be .* got \[1\]"),
        ('{"input": [1], "label": ""}', "line 2: the label must be .* got ''"),
        ('{"input": [1], "label": NaN}', "line 2: the label must be .* got nan"),
        ('{"input": [1], "label": 1e400}', "line 2: the label must be .* got inf"),
        ('{"input": null, "label": 1}', "line 2: the input must be a text, a list of numbers .* got None"),
        ('{"input": 5, "label": 1}', "line 2: the input must be .* got 5"),
        ('{"input": [1, null], "label": 1}', r"line 2: the input must be .* got \[1, None\]"),
        ('{"input": ["a", "b"], "label": 1}', "line 2: the input must be .* got "),
        (
            '{"input": [[1, 2], [3]], "label": 1}',
            r"line 2: the input must be .* of one size, got \[\[1, 2\], \[3\]\]",
        ),
        ('{"input": [[], []], "label": 1}', r"line 2: the input must be .* got \[\[\], \[\]\]"),
        ('{"input": [], "label": 1}', "line 2: the sequence is empty"),
        ('{"input": [1, Infinity], "label": 1}', "line 2: all numbers must be finite .* got inf"),
        ('{"input": [-1, 9223372036854775808], "label": 1}', "line 2: whole numbers must fit into int64, got 92233"),
        ('{"input": [[-1, 9223372036854775808]], "label": 1}', "line 2: whole numbers must fit into int64, got 92233"),
        ('{"input": [1], "label": ' + "9" * 5000 + "}", "line 2 must be .* got what cannot be read: Exceeds the limit"),
        ('{"input": [1], "label": "\\ud800"}', "line 2 must be .* got what cannot be read: .*surrogates"),
        ("[" * 100_000 + "]" * 100_000, "line 2 must be .* got something that is nested too deeply"),
        ('{"input": ' + "[" * 900 + "]" * 900 + ', "label": 1}', "line 2(: the input)? must be "),
        ('{"input": "text", "label": 1}', "line 2 has texts, but .*train.jsonl, line 1 has numbers; use one kind"),
        ('{"input": [[1, 2]], "label": 1}', "line 2 has numbers in 2 channels, but .*line 1 has numbers; use one kind"),
    ],
)
def test_a_mistake_in_a_jsonl_file_is_told_with_its_line(make, line, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(in_three("jsonl", f'{{"input": [1, 2], "label": 0}}\n{line}\n')).prepare()


def test_half_a_character_is_told(make):
    with pytest.raises(ValueError, match=r"train.jsonl is not a text in UTF-8: .*surrogates"):
        make(in_three("jsonl", '{"input": "\\ud800", "label": 0}\n')).prepare()


ONES = np.ones((2, 3))


@pytest.mark.parametrize(
    ("inputs", "labels", "lengths", "sentence"),
    [
        (np.ones(2), [0, 1], None, r"train.inputs.npy must be numbers \(N, L\) or \(N, L, C\), got float64 \(2,\)"),
        (ONES * 1j, [0, 1], None, r"must be numbers .* got complex128 \(2, 3\)"),
        (ONES.astype(str), [0, 1], None, r"must be numbers .* got <U32 \(2, 3\)"),
        (
            np.array([[{}]], dtype=object),
            [0],
            None,
            "train.inputs.npy is not a plain array: it is not a .npy file of plain values",
        ),
        (np.ones((2, 0)), [0, 1], None, "train.inputs.npy, row 0: the sequence is empty"),
        (np.ones((0, 3)), np.ones(0), None, "train.inputs.npy has no sequences"),
        (np.ones((2, 3, 0)), [0, 1], None, "row 0: the input must be a text, a list of numbers"),
        (ONES * [[1], [np.nan]], [0, 1], None, "row 1: all numbers must be finite .* got nan; leave out padding"),
        (np.full((2, 3), 2**63, np.uint64), [0, 1], None, "row 0: all numbers must be .* got 9223372036854775808;"),
        (ONES, [0, 1, 2], None, r"train.labels.npy beside .* must be numbers or texts \(2,\), got int64 \(3,\)"),
        (ONES, [[0], [1]], None, r"must be numbers or texts \(2,\), got int64 \(2, 1\)"),
        (ONES, [0, 1j], None, "must be numbers or texts .* got complex128"),
        (ONES, [0, np.nan], None, "row 1: the label must be .* got nan"),
        (
            ONES,
            np.array([0, None]),
            None,
            "train.labels.npy is not a plain array: it is not a .npy file of plain values",
        ),
        (ONES, [0, 1], [3, 4], "train.lengths.npy beside .* must be 2 whole numbers from 1 to 3"),
        (ONES, [0, 1], [0, 3], "must be 2 whole numbers from 1 to 3"),
        (ONES, [0, 1], [2.5, 3], "must be 2 whole numbers from 1 to 3"),
        (ONES, [0, 1], [3], "must be 2 whole numbers from 1 to 3"),
    ],
)
def test_a_mistake_in_arrays_is_told(make, inputs, labels, lengths, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(arrays(inputs, labels, lengths)).prepare()


GOOD, NUMBERS = jsonl("ab", [0, 1]), jsonl([[1], [2]], [0, 1])


@pytest.mark.parametrize(
    ("files", "options", "sentence"),
    [
        ({}, {}, "data has no .csv, .tsv, .jsonl, .inputs.npy, .parquet, .arrow or .feather file"),
        ({"notes.txt": ""}, {}, "data has no .csv, .tsv, .jsonl, .inputs.npy, .parquet, .arrow or .feather file"),
        ({"train.jsonl": GOOD, "dev.jsonl": GOOD}, {}, "has the files dev.jsonl, train.jsonl; name them train, valid"),
        (
            {"valid.jsonl": GOOD, "test.jsonl": GOOD},
            {},
            "has the files test.jsonl, valid.jsonl; name them train, valid",
        ),
        ({"train.jsonl": GOOD, "train.csv": ""}, {}, "train.csv, train.jsonl, two of which are for the same split"),
        ({"train.inputs.npy": ONES}, {}, "train.inputs.npy needs train.labels.npy beside it"),
        ({"train.inputs.npy": b"?"}, {}, "train.inputs.npy is not a plain array"),
        ({"a.jsonl": GOOD}, {}, "data has too few sequences, 2 of 2 classes, to hold out a valid set of 10%"),
        ({"a.jsonl": single(10, range(9))}, {}, "too few sequences, 10 of 9 classes, to hold out a test set of 10%"),
        (
            {"a.jsonl": single(4, [0.5, 1])},
            {"test_share": 0.1, "valid_share": 0.3},
            "too few sequences, 4, to hold out",
        ),
        (
            in_three("jsonl", GOOD) | {"test.jsonl": NUMBERS},
            {},
            "test.jsonl has numbers as inputs, but train.jsonl texts",
        ),
        (in_three("jsonl", GOOD) | {"test.jsonl": jsonl("a", [7])}, {}, "has no label 7, but another split has; add"),
        (in_three("jsonl", GOOD), {"inputs": "real"}, "are texts, not real numbers; use inputs='tokens'"),
        (
            in_three("jsonl", jsonl([[0.5], [1]], [0, 1])),
            {"inputs": "tokens"},
            "are not all whole numbers in one channel",
        ),
        (arrays(np.ones((2, 3, 2), int), [0, 1]), {"inputs": "tokens"}, "are not all whole numbers in one channel"),
        (in_three("jsonl", jsonl("ab", ["x", 1])), {"labels": "numbers"}, "the label 'x' in .* is not a number"),
    ],
)
def test_a_mistake_in_a_folder_is_told(make, files, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(files, **options).prepare()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inputs": "reals"}, "inputs must be one of auto, tokens, real, got reals"),
        ({"labels": "class"}, "labels must be one of auto, classes, numbers, got class"),
        ({"max_length": 0}, "max_length must be a whole number from 1 to 16,777,216 or none, got 0"),
        ({"valid_share": 0.0}, "valid_share must be a number between 0 and 1, got 0.0"),
        ({"path": "~nosuchuser/x"}, "path must be a path, got ~nosuchuser/x: there is no such user"),
        (
            {"valid_share": 0.5, "test_share": 0.5},
            "valid_share and test_share must be below 1 together, got 0.5 and 0.5",
        ),
    ],
)
def test_a_mistake_in_an_option_is_told_at_once(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_task("files", **{"path": "anywhere"} | options)


def npy(header: bytes, content: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


PLAIN = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s,)}"


@pytest.mark.parametrize(
    "header",
    [
        PLAIN % ("9" * 31),
        PLAIN % ("9" * 4000 + "," + "9" * 4000),
        PLAIN % ("9" * 5000),
        PLAIN % "2, -1",
        PLAIN % "2, True",
        PLAIN % "1, 1" + " " * 60_000,
        PLAIN.replace("<f8", "V0") % "1000000000000000000",
        PLAIN.replace("<f8", "O") % "1",
        "(" * 5000,
        "{'descr': ",
        "",
        "5",
    ],
)
def test_npy_files_that_lie(make, header):
    files = {"a.inputs.npy": npy(header.encode(), bytes(8)), "a.labels.npy": np.zeros(1)}
    with pytest.raises(BadInput, match=r"a.inputs.npy is not a plain array: .*; write it with np.save") as caught:
        make(files).prepare()
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x93NUM", b"\x93NUMPY\x09\x00" + bytes(200), bytes(1000)])
def test_files_that_are_no_npy_files(make, content):
    with pytest.raises(BadInput, match=r"a.inputs.npy is not a plain array"):
        make({"a.inputs.npy": content, "a.labels.npy": np.zeros(1)}).prepare()


def test_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "train.csv")
    with pytest.raises(BadInput, match=r"train.csv; path must be one with sequences"):
        create_task("files", path=tmp_path / "train.csv").prepare()
    with pytest.raises(BadInput, match=r"has no .csv, .tsv, .jsonl, .inputs.npy, .parquet, .arrow or .feather file"):
        create_task("files", path=tmp_path).prepare()
    np.save(tmp_path / "a.inputs.npy", np.zeros((1, 1)))
    os.mkfifo(tmp_path / "a.labels.npy")
    with pytest.raises(BadInput, match=r"a.labels.npy is not a file that can be read"):
        create_task("files", path=tmp_path).prepare()


def test_a_missing_path_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file or folder .*nowhere; path must be"):
        create_task("files", path=tmp_path / "nowhere").prepare()


def test_there_is_nothing_to_import(make):
    with pytest.raises(ValueError, match="the task 'files' reads its own --path"):
        make(in_three("jsonl", GOOD)).prepare("elsewhere")


# Folds


def test_folds_take_the_scale_and_the_vocabulary_from_their_training_part(make):
    """One sample has values, and another a symbol, that no other has: where it is tested on, nobody has seen them."""
    numbers = np.random.default_rng(0).normal(size=(40, 6))
    numbers[7] = 1000.5
    for fold in range(4):
        task = make({"train.jsonl": jsonl(numbers.tolist(), [0, 1] * 20)}, folds=4, fold=fold)
        parts = {split: np.array(rows(task, split))[..., 0] for split in SPLITS}
        assert parts["train"].mean() == pytest.approx(0, abs=1e-6)
        assert parts["train"].std() == pytest.approx(1, abs=1e-6)
        held_out = max(part.max() for part in (parts["valid"], parts["test"]))
        assert (held_out > 100) != (parts["train"].max() > 4), "far beyond the scale, unless it was trained on"
        assert (len(parts["train"]), len(parts["valid"]), len(parts["test"])) == (26, 4, 10)
    texts = ["abab"] * 39 + ["abz"]
    tested = 0
    for fold in range(4):
        task = make({"train.jsonl": jsonl(texts, [0, 1] * 20)}, folds=4, fold=fold)
        held_out = [row for split in ("valid", "test") for row in decoded(task, split)]
        assert ("z" in task.vocabulary()) != (["a", "b", "<unk>"] in held_out)
        tested += ["a", "b", "<unk>"] in decoded(task, "test")
    assert tested == 1


def test_all_folds_together_have_every_sample_once(make):
    inputs = [[float(number) + 0.5] * 3 for number in range(30)]
    found = []
    for fold in range(3):
        task = make({"train.jsonl": jsonl(inputs, ["a", "b", "a"] * 10)}, folds=3, fold=fold, standardize=False)
        found += [row[0][0] for row in rows(task, "test")]
    assert sorted(found) == [row[0] for row in inputs]


def test_what_does_not_go_with_folds_is_a_sentence(make):
    files = {"train.jsonl": jsonl([[0.5]] * 30, [0, 1] * 15)}
    with pytest.raises(BadInput, match="fold must be from 0 to one less than folds, got 3 of 3"):
        make(files, folds=3, fold=3)
    with pytest.raises(BadInput, match="fold must be from 0 to one less than folds, got 1 of no folds"):
        make(files, fold=1)
    with pytest.raises(BadInput, match="test_share must be left out, as one of 3 folds is the test set"):
        make(files, folds=3, test_share=0.3)
    with pytest.raises(BadInput, match="folds must be a whole number of at least 2"):
        make(files, folds=1)
    task = make(files | {"test.jsonl": jsonl([[0.5]], [0])}, folds=3)
    with pytest.raises(BadInput, match=r"folds cut all samples of one file, and .* has a test file: join the files"):
        task.prepare()


def test_without_folds_a_set_is_the_one_that_was_stored_before_there_were_any(make):
    task = make({"train.jsonl": jsonl([[0.5]] * 30, [0, 1] * 15)})
    assert not task.identity().keys() & {"folds", "fold"}
    assert task.title == "files (data)"


def test_what_looks_wrong_is_said_once_for_all_folds(make, capsys):
    constant = [[1.5, float(number)] for number in range(30)]
    for fold in range(3):
        task = make({"train.jsonl": jsonl([[row] for row in constant], [0, 1] * 15)}, folds=3, fold=fold)
        assert task.spec.outputs == 2
    said = capsys.readouterr().err
    assert said.count("\n") == len(task.prepared.details["warnings"]) > 0
