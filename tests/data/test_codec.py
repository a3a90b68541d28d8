"""A codec: what a run keeps of its data encodes a raw sequence exactly as the data was encoded."""

import csv
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from longlens.data.codec import Codec, Reader, class_name, line_records
from longlens.data.readers import iter_records
from longlens.data.values import Layout
from longlens.errors import BadInput
from longlens.tasks.base import Spec, create_task


def codec_of(task) -> Codec:
    """From JSON alone, as a run does it."""
    return Codec.make(task.spec, json.loads(json.dumps(task.codec())))


def write_table(path, rows, labels):
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*(f"v{i}" for i in range(max(map(len, rows)))), "label"])
        longest = max(map(len, rows))
        for row, label in zip(rows, labels, strict=True):
            lines.writerow([*row, *[""] * (longest - len(row)), label])


def write_lines(path, inputs, labels):
    path.write_text("".join(json.dumps({"input": i, "label": n}) + "\n" for i, n in zip(inputs, labels, strict=True)))


RANDOM = np.random.default_rng(0)
CURVES = [RANDOM.normal(3, 7, size=int(length)).round(3).tolist() for length in RANDOM.integers(3, 12, size=60)]
CHANNELS = [RANDOM.normal(-2, [1, 50], size=(5, 2)).round(3).tolist() for _ in range(60)]
WHOLE = [RANDOM.integers(-3, 4, size=9).tolist() for _ in range(60)]
TEXTS = ["".join(RANDOM.choice(list("abcü "), size=8)) + "a" for _ in range(60)]
NAMES = ["left", "right", "007"] * 20
NUMBERS = RANDOM.normal(100, 20, size=60).round(3).tolist()


@pytest.mark.parametrize("inputs", [CURVES, CHANNELS, WHOLE, TEXTS], ids=["curves", "channels", "whole", "texts"])
@pytest.mark.parametrize("labels", [NAMES, NUMBERS], ids=["classes", "numbers"])
def test_a_raw_sequence_becomes_what_is_stored(tmp_path, inputs, labels):
    for split, part in (("train", slice(0, 40)), ("valid", slice(40, 50)), ("test", slice(50, 60))):
        write_lines(tmp_path / f"{split}.jsonl", inputs[part], labels[part])
    task = create_task("files", path=str(tmp_path))
    codec, split = codec_of(task), task.split("test")
    samples = split.take(np.arange(len(split)))
    for row, record in enumerate(iter_records(tmp_path / "test.jsonl", Layout(), with_labels=True)):
        wanted = samples.inputs[row, : samples.lengths[row]]
        found = codec.encode(record.sequence, record.place, like_a_split=True)
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype
        assert codec.encode_label(record.label, "") == pytest.approx(samples.targets[row], abs=1e-6)
        if labels is NUMBERS:
            assert codec.decode(samples.targets[row]) == pytest.approx(labels[50 + row], abs=1e-4)
        else:
            chosen = np.eye(3)[samples.targets[row]][None]
            assert codec.decode(chosen) == [labels[50 + row]]


def test_a_cut_sequence_is_cut_again(tmp_path):
    write_table(tmp_path / "a.csv", CURVES, NAMES)
    task = create_task("files", path=str(tmp_path), max_length=4)
    codec = codec_of(task)
    long, whole = np.arange(9.0), codec_of(create_task("files", path=str(tmp_path)))
    np.testing.assert_array_equal(codec.encode(long, "row"), whole.encode(long[:4], "row"))
    assert whole.max_length == max(map(len, CURVES))
    with pytest.raises(BadInput, match=r"row must have at most 11 values, as the longest sequence .* got 12: cut it"):
        whole.encode(np.arange(12.0), "row")


def test_an_expression_is_read_as_listops_is():
    task = create_task("listops")
    codec = codec_of(task)
    wanted = [codec.symbols.index(symbol) for symbol in ("[MAX", "2", "[MIN", "4", "7", "X", "X", "<eos>")]
    assert codec.encode("( [MAX 2 [MIN 4 7 ] ] )", "row").tolist() == wanted
    assert codec.encode(wanted, "row").tolist() == wanted, "token numbers will do"
    assert codec.decode(np.eye(10)[[3]]) == ["3"]
    for wrong, message in (
        ("[MAX 2 11 ]", r"row must have symbols of the training set, got '11' at position 3; it had 0 1 2"),
        ("[MAX <pad> ]", "'<pad>' at position 2"),
        ([3, 18], "row must have tokens from 0 to 17, got 3 to 18"),
        ([3, -1], "got -1 to 3"),
        ([3.5], "row must be a sequence of token numbers from 0 to 17, or a text, got"),
        ([[3]], "row must be a sequence of token numbers from 0 to 17, or a text, got"),
        ("", "row must be a sequence of at least one value"),
        ([], "row must be a sequence of token numbers from 0 to 17, or a text, got an empty one"),
        (["a"], "row must be a sequence of token numbers from 0 to 17, or a text, got"),
        (None, "or a text, got None"),
        (["1", ["2"]], "or a text, got .*2"),
        ([5] * 2001, "row must have at most 2,000 values"),
        (" ".join(["5"] * 2000), "row must have at most 1,999 values"),  # its end is a token
    ):
        with pytest.raises(BadInput, match=message) as caught:
            codec.encode(wrong, "row")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1.0, np.nan], r"row must be a sequence of finite numbers in 2 channels, \(length, 2\), got 1 channels"),
        ([[1, 2, 3]], "got 3 channels"),
        ([[1, 2], [3, np.nan]], r"got \[3.0, nan\] at position 2"),
        ([[1, 2], [np.inf, 3]], r"got \[inf, 3.0\] at position 2"),
        ([[1e300, 2]], "at position 1"),
        ([[1, 2], [3]], "row must be a sequence of finite numbers"),
        (np.zeros((2, 2, 2)), r"got an array of shape \(2, 2, 2\)"),
        ("1 2 3", "got the text '1 2 3'"),
        (np.zeros((0, 2)), "row must be a sequence of at least one value"),
        ([["1", "2"]], "row must be a sequence of finite numbers"),
        (None, "row must be a sequence of finite numbers"),
        (7, "row must be a sequence of finite numbers"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(wrong, message):
    codec = Codec.make(Spec("real", 2, 9, "regress", 1, "r2"), {"form": "real", "mean": [0, 1], "deviation": [1, 2]})
    with pytest.raises(BadInput, match=message) as caught:
        codec.encode(wrong, "row")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 2, 99], "row must have symbols of the training set, got '99' at position 3; it had -3 -2 -1 0 1 2 3"),
        ([1.5], "row must be a sequence of whole numbers, got 1.5"),
        ([1, np.nan], "row must be a sequence of whole numbers, got nan"),
        ([1, np.inf], "row must be a sequence of whole numbers, got inf"),
        ([[1, 2]], "got 2 channels"),
        ("1 2", "got the text"),
    ],
)
def test_symbols_that_are_numbers(tmp_path, wrong, message):
    write_table(tmp_path / "a.csv", WHOLE, NAMES)
    codec = codec_of(create_task("files", path=str(tmp_path)))
    assert codec.encode([-3, 3.0], "row").tolist() == [2, 8]
    assert codec.encode([99], "row", like_a_split=True).tolist() == [1]
    with pytest.raises(BadInput, match=message):
        codec.encode(wrong, "row")


def test_what_was_rare_in_training_may_be_unknown():
    codec = Codec.make(
        Spec("tokens", 5, 8, "classify", 2, "accuracy"),
        {"form": "characters", "symbols": ["<pad>", "<unk>", "<eos>", "a", "b"], "specials": 3, "unknown": 1, "end": 2}
        | {"knows_unknown": True, "cut": True},
    )
    assert codec.encode("abé", "row").tolist() == [3, 4, 1, 2]
    assert codec.encode("a" * 20, "row").tolist() == [3] * 7 + [2]


def test_bytes_come_after_the_special_tokens():
    codec = Codec.make(Spec("tokens", 259, 8, "classify", 2, "accuracy"), {"form": "bytes", "specials": 3, "end": 2})
    assert codec.encode("aé", "row").tolist() == [*(byte + 3 for byte in "aé".encode()), 2]


def test_pixels_are_scaled_and_put_in_order():
    task = create_task("pmnist", size=4)
    codec = codec_of(task)
    pixels = np.arange(16, dtype=np.uint8) * 17
    np.testing.assert_allclose(codec.encode(pixels, "row")[:, 0], (pixels / 255)[task.order], rtol=1e-6)
    np.testing.assert_allclose(codec_of(create_task("image")).encode([122.6] * 1024, "row"), 0, atol=1e-6)
    with pytest.raises(BadInput, match="row must have 16 values, got 15"):
        codec.encode(pixels[:15], "row")


@pytest.mark.parametrize(
    "name", ["listops", "image", "smnist", "pmnist", "pathfinder", "path-x", "atomic-cumsum", "text8", "enwik8"]
)
def test_every_task_that_needs_no_data_has_a_codec(name):
    task = create_task(name)
    codec = codec_of(task)
    assert codec.inputs == task.spec.inputs
    if task.spec.head == "classify":
        assert len(codec.classes) == task.spec.outputs
    if codec.symbols is not None:
        assert len(codec.symbols) == task.spec.size


def test_texts_and_languages_whose_vocabulary_is_in_the_data(monkeypatch):
    """Without the data: its vocabulary is given here."""
    symbols = ["<pad>", "<unk>", "<eos>", "e", "a"]
    for name, classes in (("text", ["negative", "positive"]), ("retrieval", ["neither cites the other", "one cites"])):
        task = create_task(name, max_length=4)
        monkeypatch.setattr(type(task), "vocabulary", lambda self: symbols)
        codec = codec_of(task)
        assert codec.encode("aeéaea", "row").tolist() == [4, 3, 1, 2], "cut, with its end"
        assert codec.classes == classes
    monkeypatch.undo()
    codec = codec_of(create_task("text", level="bytes"))
    assert codec.encode("a", "row").tolist() == [ord("a") + 3, 2]
    task = create_task("wikitext-2")
    monkeypatch.setattr(type(task), "vocabulary", lambda self: ["the", "<unk>", "cat", "<eos>"])
    codec = codec_of(task)
    assert codec.encode("the  dog <eos> cat", "row").tolist() == [0, 1, 3, 2]
    assert codec.decode(np.eye(4)[[2]]) == ["cat"]


def test_labels_that_are_none_are_refused(tmp_path):
    write_table(tmp_path / "a.csv", CURVES, NAMES)
    codec = codec_of(create_task("files", path=str(tmp_path)))
    assert [codec.encode_label(name, "") for name in sorted({"left", "right", "007"})] == [0, 1, 2]
    with pytest.raises(BadInput, match="row: the label must be one of the classes of training, got 'up'; it had 007"):
        codec.encode_label("up", "row")
    write_table(tmp_path / "a.csv", CURVES, NUMBERS)
    with pytest.raises(BadInput, match="row: the label must be a number, got 'up'"):
        codec_of(create_task("files", path=str(tmp_path))).encode_label("up", "row")
    assert [class_name(label) for label in (1, 1.0, 1.5, "1.0", True)] == ["1", "1", "1.5", "1.0", "true"]


def test_a_description_that_is_none_is_refused():
    spec = Spec("real", 1, 9, "regress", 1, "r2")
    for wrong in ({}, {"form": "other"}, {"form": "real", "mean": "x"}, {"form": "real", "colour": 1}):
        with pytest.raises(BadInput, match="of the codec cannot be read"):
            Codec.make(spec, wrong)


def test_lines_are_sequences():
    real = Codec.make(Spec("real", 1, 9, "regress", 1, "r2"), {"form": "real"})
    lines = ["1 2.5\n", "\n", "3,4;5\r\n", "[6, 7]\n", "[[1, 2], [3, 4]]"]
    found = list(line_records(lines, "stdin", real))
    assert [record.sequence.tolist() for record in found] == [[1, 2.5], [3, 4, 5], [6, 7], [[1, 2], [3, 4]]]
    assert [record.place for record in found] == ["stdin, line 1", "stdin, line 3", "stdin, line 4", "stdin, line 5"]
    text = Codec.make(Spec("tokens", 27, 9, "language", 27, "bits_per_byte"), create_task("text8").codec())
    assert [record.sequence for record in line_records([" a b\n"], "stdin", text)] == [" a b"]
    for wrong, message in (
        (["1 x"], "stdin, line 1: a value must be a number"),
        (["1", "[1, nan"], "stdin, line 2 must be a list of numbers, got what cannot be read"),
        (["[" * 100_000], "nested too deeply"),
        (["1 nan"], "stdin, line 1: all numbers must be finite"),
        (["", " "], "stdin has no sequences"),
    ):
        with pytest.raises(BadInput, match=message):
            list(line_records(wrong, "stdin", real))


BYTES = codec_of(create_task("enwik8"))


@given(some.lists(some.one_of(some.binary(max_size=5), some.text(max_size=3).map(str.encode)), max_size=8))
def test_bytes_in_parts_are_the_text_of_all(parts):
    """Whole characters and halves of them, and what is none at all."""
    reader = Reader(BYTES)
    text = "".join(map(reader.read, parts)) + reader.end()
    assert text == b"".join(parts).decode(errors="replace")


def test_a_character_comes_with_its_last_byte():
    reader = Reader(BYTES)
    assert [reader.read([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert reader.read("€".encode()[:2]) == ""
    assert reader.end() == "\ufffd"
