"""A run folder is all that is needed to use the model: it can be moved, and its data may be gone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.data import home  # noqa: F401 (a fixture)

from longlens import create_task, load_run, train
from longlens.errors import BadInput
from longlens.training.predict import MOST, answers, softmax
from longlens.training.run import read_task

HOW = {"recipe": "smoke", "steps": 3, "threads": 1}
RANDOM = np.random.default_rng(1)


def write(path, inputs, labels):
    path.parent.mkdir(exist_ok=True)
    lines = ({"input": i, "label": n} for i, n in zip(inputs, labels, strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def curves(count, channels=2):
    """Of several lengths, far from mean 0 and deviation 1."""
    lengths = RANDOM.integers(4, 20, size=count)
    return [RANDOM.normal(50, 9, size=(length, channels)).round(2).tolist() for length in lengths]


@pytest.fixture
def data(tmp_path):
    """Files of a set with names of classes; the test set has its own file."""
    folder = tmp_path / "data"
    for split, count in (("train", 48), ("test", 12)):
        write(folder / f"{split}.jsonl", curves(count), (["walk", "run", "sit down"] * count)[:count])
    return folder


@pytest.fixture
def send(tmp_path, monkeypatch):
    """Move a folder to where its data is not: the files and the cache are deleted."""

    def sent(folder):
        moved = tmp_path / "elsewhere" / "of a friend"
        moved.parent.mkdir()
        shutil.move(folder, moved)
        for name in ("data", "home"):
            shutil.rmtree(tmp_path / name)
        monkeypatch.delenv("LONGLENS_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
        monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
        monkeypatch.chdir(moved.parent)
        return load_run(moved.name)

    return sent


def test_a_folder_that_was_sent_says_the_same(tmp_path, data, send):
    result = train("files", "las", path=str(data), runs=str(tmp_path / "runs"), **HOW)
    rows = curves(7)
    before = result.run.predict(rows, probabilities=True)
    run = send(result.folder)
    np.testing.assert_array_equal(run.predict(rows, probabilities=True), before)
    assert run.codec.names == ["run", "sit down", "walk"]
    assert run.predict(rows, names=True).tolist() == [run.codec.names[i] for i in before.argmax(axis=1)]
    assert run.result == dict(result.values)
    assert not (tmp_path / "nothing").exists()
    assert not (tmp_path / "home").exists()
    with pytest.raises(BadInput, match="there is no file or folder"):
        run.evaluate()


def test_predictions_are_those_of_the_model_on_scaled_numbers(tmp_path, data):
    """A second witness: scaling by hand, and a row at a time."""
    run = train("files", "s4d", path=str(data), runs=str(tmp_path / "runs"), **HOW).run
    lines = (json.loads(line) for line in (data / "train.jsonl").read_text().splitlines())
    every = [np.array(line["input"]) for line in lines]
    train_rows = run.config.task.split("train")  # without those that are held out
    count = len(train_rows)
    assert count < len(every)
    details = run.config.task.prepared.details
    mean, deviation = np.array(details["mean"]), np.array(details["deviation"])
    stored = train_rows.take(np.arange(count))
    values = np.concatenate([row[:n] for row, n in zip(stored.inputs, stored.lengths, strict=True)])
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(values.std(axis=0), 1, atol=1e-5)
    rows, model = curves(9), run.model()
    found = run.predict(rows, probabilities=True, batch_size=4)
    for row, chances in zip(rows, found, strict=True):
        inputs = torch.tensor((np.array(row) - mean) / deviation, dtype=torch.float32)[None]
        with torch.no_grad():
            np.testing.assert_allclose(chances, model(inputs)[0].softmax(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(run.predict(rows), found.argmax(axis=1))
    samples = run.config.task.split("test").take(np.arange(5))
    encoded = [row[:n] for row, n in zip(samples.inputs, samples.lengths, strict=True)]
    raw = [json.loads(line)["input"] for line in (data / "test.jsonl").read_text().splitlines()[:5]]
    np.testing.assert_array_equal(run.predict(encoded, encoded=True), run.predict(raw))


def test_numbers_come_out_as_the_labels_were(tmp_path, send):
    """A model of a constant label of 1000 and one at 0 would not differ otherwise."""
    data = tmp_path / "data"
    inputs = curves(60, channels=1)
    write(data / "a.jsonl", inputs, (1000 + RANDOM.normal(0, 5, size=60)).tolist())
    run = send(train("files", "las", path=str(data), runs=str(tmp_path / "runs"), **HOW).folder)
    found = run.predict(inputs[:5])
    assert found.shape == (5,)
    assert np.abs(found - 1000).max() < 100
    model, scaled = run.model(), [run.codec.encode(row, "") for row in inputs[:5]]
    with torch.no_grad():
        wanted = [model(torch.from_numpy(row)[None])[0].item() for row in scaled]
    codec = run.codec
    np.testing.assert_allclose(found, np.array(wanted) * codec.label_deviation + codec.label_mean, rtol=1e-6)
    for option in ("names", "probabilities"):
        with pytest.raises(BadInput, match=f"{option} must be False for a task whose answers are numbers"):
            run.predict(inputs, **{option: True})


def test_texts_of_ones_own(tmp_path, send):
    data = tmp_path / "data"
    texts = ["".join(RANDOM.choice(list("abc "), size=int(n))) + "a" for n in RANDOM.integers(2, 9, size=60)]
    write(data / "a.jsonl", texts, ["x", "y"] * 30)
    run = send(train("files", "las", path=str(data), runs=str(tmp_path / "runs"), **HOW).folder)
    assert set(run.predict(texts, names=True)) <= {"x", "y"}
    with pytest.raises(BadInput, match=r"inputs\[1\] must have symbols of the training set, got 'z' at position 2"):
        run.predict(["ab", "az"])


def test_expressions_and_the_next_letter(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text8").write_text("the cat sat on the mat and " * 200)
    task = create_task("text8", stand_in=True, max_length=16)
    task.prepare(tmp_path / "data")
    letters = train(task, "las", runs=str(tmp_path / "runs"), **HOW).folder
    expressions = train("listops", "las", runs=str(tmp_path / "runs"), **HOW | {"task.sizes": [64, 16, 16]}).folder
    folder = tmp_path / "both"
    folder.mkdir()
    shutil.move(letters, folder / "letters")
    shutil.move(expressions, folder / "expressions")
    shutil.rmtree(tmp_path / "home")
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "empty"))
    run = load_run(folder / "letters")
    (token,) = run.predict(["the cat sa"])
    assert run.predict(["the cat sa"], names=True).tolist() == [run.codec.symbols[token]]
    assert run.predict([[20, 8, 5]]).shape == (1,)
    run = load_run(folder / "expressions")
    text = "[MAX 2 9 [MIN 4 7 ] 0 ]"
    ids = run.codec.encode(text, "")
    np.testing.assert_array_equal(run.predict([text], probabilities=True), run.predict([ids], probabilities=True))
    assert run.predict([text], names=True).tolist() == run.predict([text]).astype(str).tolist()
    assert not (tmp_path / "empty").exists()


def test_a_run_of_before_needs_its_data(tmp_path, data, send):
    folder = train("files", "las", path=str(data), runs=str(tmp_path / "runs"), **HOW).folder
    rows = curves(3)
    wanted = load_run(folder).predict(rows, probabilities=True)
    (folder / "task.json").unlink()
    np.testing.assert_array_equal(load_run(folder).predict(rows, probabilities=True), wanted)
    run = send(folder)
    with pytest.raises(BadInput, match="there is no file or folder"):
        run.predict(rows)


def test_an_unfinished_run_of_before_gets_what_it_lacks(tiny):
    folder = tiny.unfinished("run")
    text = (folder / "task.json").read_text()
    (folder / "task.json").unlink()
    tiny.train("run")
    assert (folder / "task.json").read_text() == text


def test_an_option_that_is_new_has_its_default(tiny):
    """A run that was made before there was the option is still one, unless something else was changed."""
    from longlens.training.run import read_config, read_identity

    folder = tiny.train("run")
    config, path = read_config(folder), folder / "config.json"
    values = json.loads(path.read_text())
    del values["training"]["train_on_valid"]
    path.write_text(json.dumps(values))
    with pytest.raises(BadInput, match="is not the config that this run was started with"):
        read_config(folder)  # as the digest says that it had the option
    fingerprint = read_identity(folder).fingerprint
    digest = config.digest(fingerprint, without=["training.train_on_valid"])
    (folder / "identity.json").write_text(json.dumps({"fingerprint": fingerprint, "digest": digest}))
    assert read_config(folder) == config
    assert load_run(folder).model() is not None


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"spec": {}, "codec": {}}', "another symbol", "[" * 100_000])
def test_a_damaged_task_is_refused(tiny, damage):
    folder = tiny.train("run")
    path = folder / "task.json"
    text = path.read_text()
    path.write_text(text.replace('"real"', '"unreal"') if damage == "another symbol" else damage)
    with pytest.raises(BadInput, match=r"task.json .*: restore it, or delete it") as caught:
        read_task(folder, load_run(folder).config.task)
    assert "\n" not in str(caught.value)
    path.write_text(text)
    assert load_run(folder).spec == load_run(folder).config.task.spec


def test_a_file_is_evaluated_as_the_split_was(tmp_path, data):
    """The test set has its own file, so that both ways must agree; 'best' is not the last."""
    for labels in ("classes", "numbers"):
        if labels == "numbers":
            for split, count in (("train", 48), ("test", 12)):
                write(data / f"{split}.jsonl", curves(count), RANDOM.normal(7, 3, size=count).tolist())
        run = train("files", "las", path=str(data), runs=str(tmp_path / "runs"), **HOW).run
        wanted, found = run.evaluate(), run.evaluate_file(data / "test.jsonl", batch_size=5)
        assert found.value == pytest.approx(wanted.value, rel=1e-5)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert (found.samples, found.step, found.metric) == (12, wanted.step, wanted.metric)
        assert found.split == "test.jsonl"
    (data / "other.jsonl").write_text('{"input": [[1, 2]], "label": 3}\n{"input": [[1, 2]], "label": "up"}\n')
    with pytest.raises(BadInput, match=r"other.jsonl, line 2: the label must be a number, got 'up'"):
        run.evaluate_file(data / "other.jsonl")


def test_what_has_no_labels_is_not_evaluated_on_a_file(tiny, tmp_path):
    (tmp_path / "a.csv").write_text("a,label\n1,2\n")
    with pytest.raises(BadInput, match="data must be sequences with a label each, and atomic-cumsum has no"):
        load_run(tiny.train("run")).evaluate_file(tmp_path / "a.csv")


def test_rows_are_read_as_they_are_needed_and_come_out_in_order(tiny):
    """Not all of them before the first answer."""
    model = load_run(tiny.train("run")).model()
    read = 0

    def rows():
        nonlocal read
        for index in range(3000):
            read += 1
            yield index, RANDOM.normal(size=(16, 3)).astype(np.float32)

    found = answers(model, rows(), batch_size=8)
    first, _ = next(found)
    assert first == 0
    assert read <= 8 * 64
    assert [tag for tag, _ in found] == list(range(1, 3000))

    read = 0
    long = ((index, np.zeros((MOST // 8, 3), np.float32)) for index in range(8))
    assert next(answers(model, long, batch_size=1000))[0] == 0, "few long ones are enough"
    assert len(list(long)) >= 4


def test_rows_of_other_lengths_do_not_change_a_row(tmp_path, data):
    run = train("files", "mega", path=str(data), runs=str(tmp_path / "runs"), **HOW).run
    rows = curves(20)
    together = run.predict(rows, probabilities=True, batch_size=7)
    alone = np.concatenate([run.predict([row], probabilities=True) for row in rows])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)


def test_rows_of_a_frame_are_those_of_its_file(tmp_path):
    pandas = pytest.importorskip("pandas")
    data = tmp_path / "data"
    data.mkdir()
    columns = {f"v{i}": RANDOM.normal(9, 3, size=60).round(2) for i in range(5)}
    frame = pandas.DataFrame({"id": range(60), **columns, "label": ["x", "y"] * 30})
    frame.to_csv(data / "a.csv", index=False)
    run = train("files", "las", path=str(data), ignore=["id"], runs=str(tmp_path / "runs"), **HOW).run
    rows = frame[list(columns)].to_numpy()
    wanted = run.predict(rows, probabilities=True)
    shuffled = frame[["label", "v3", "v1", "v0", "id", "v4", "v2"]]
    for given in (frame, shuffled, frame[list(columns)]):
        np.testing.assert_array_equal(run.predict(given, probabilities=True), wanted)
    with pytest.raises(BadInput, match="must have the columns that the run was trained on, and 'v3' is not there"):
        run.predict(frame.drop(columns="v3"))


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.assign(v4=frame["v4"].where(frame["v4"] > 9)),
        lambda frame: frame.assign(v2=frame["v2"] > 9, v3=frame["v3"].astype("Float32")),
        lambda frame: frame.assign(input=[" ".join(map(str, row)) for row in frame.to_numpy()])[["input"]],
    ],
    ids=["rows that end early", "switches and other kinds of numbers", "numbers in one cell"],
)
def test_a_frame_is_read_as_its_file_is(tmp_path, change):
    pandas = pytest.importorskip("pandas")
    frame = change(pandas.DataFrame({f"v{i}": RANDOM.normal(9, 3, size=60).round(2) for i in range(5)}))
    task = create_task("files", frame=frame.assign(label=["x", "y"] * 30))
    run = train(task, "las", runs=str(tmp_path / "runs"), **HOW).run
    wanted = [record.sequence for record in run.records(Path(task.path) / "train.csv")]
    found = run.predict(frame, probabilities=True)
    np.testing.assert_allclose(found, run.predict(wanted, probabilities=True), rtol=1e-5)


def test_a_run_of_before_names_were_part_of_the_data_is_refused_and_can_be_used(tmp_path, data, monkeypatch):
    how = {"path": str(data), "folder": str(tmp_path / "run"), **HOW}
    with monkeypatch.context() as before:
        before.delattr("longlens.tasks.files.Files.fingerprint")
        train("files", "las", **how)
    with pytest.raises(BadInput, match="belongs to other data"):
        train("files", "las", **how)
    with pytest.raises(BadInput, match=r"belongs to other data, .*: undo the change, or .* a file with --data FILE"):
        load_run(tmp_path / "run").evaluate()
    assert load_run(tmp_path / "run").predict(curves(2)).shape == (2,)


def test_softmax():
    scores = np.array([[1e4, 1e4 - 1, -1e4], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(softmax(scores), torch.tensor(scores).double().softmax(-1), rtol=1e-12)
