"""``longlens predict``, ``evaluate --data`` and ``explain``: a trained model at work on new sequences."""

import csv
import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from longlens import load_run

LENGTH = 20
COLUMNS = [f"t{i}" for i in range(LENGTH)]


def draw(count, seed):
    """Curves around 40 whose class is the sign of a pulse at positions 6 to 8."""
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], size=count)
    rows = random.normal(40, 2, size=(count, LENGTH))
    rows[:, 5:8] += 12 * signs[:, None]
    return rows.round(3), ["up" if sign > 0 else "down" for sign in signs]


def write_csv(path, rows, labels=None, delimiter=",", names=None):
    with path.open("w", newline="") as file:
        lines = csv.writer(file, delimiter=delimiter)
        header = ["id"] if names else []
        lines.writerow([*header, *COLUMNS, *(["label"] if labels else [])])
        for index, row in enumerate(rows):
            lines.writerow([*([names[index]] if names else []), *row, *([labels[index]] if labels else [])])


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run that has learned its pulse, and the folder of its files; both are only read."""
    from longlens.cli import main

    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").mkdir()
    write_csv(folder / "data" / "train.csv", *draw(120, 0))
    write_csv(folder / "data" / "test.csv", *draw(40, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGLENS_HOME", str(folder / "home"))
        flags = "--mixer las --recipe smoke --steps 60 --lr 1e-2 --threads 1".split()
        main(["train", "files", "--path", str(folder / "data"), *flags, "--folder", str(folder / "run")])
        shutil.rmtree(folder / "home")  # what is left is the folder of the run
    return folder


@pytest.fixture
def new(here):
    """New curves without labels, and the classes that they are of."""
    rows, labels = draw(50, 2)
    write_csv(here / "new.csv", rows)
    return rows, labels


def read(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_all_formats_say_the_same(longlens, here, trained, new):
    rows, labels = new
    for ending in ("jsonl", "csv", "npy"):
        said = longlens("predict", trained / "run", "new.csv", "--out", f"out/{ending}.{ending}")
        assert (said.code, said.err) == (0, "")
        assert "50 rows: " in said.words
        assert f"written to out/{ending}.{ending}" in said.words
    assert "(columns: down, up)" in said.words
    lines, table, array = read(here / "out/jsonl.jsonl"), read(here / "out/csv.csv"), np.load(here / "out/npy.npy")
    run = load_run(trained / "run")
    wanted = run.predict(rows, probabilities=True)
    assert array.shape == (50, 2)
    assert array.dtype == np.float32
    np.testing.assert_allclose(array, wanted, rtol=1e-5)
    assert [line["label"] for line in lines] == run.predict(rows, names=True).tolist()
    assert np.mean([line["label"] == label for line, label in zip(lines, labels, strict=True)]) > 0.9
    assert [line["row"] for line in lines] == list(range(1, 51))
    for index, (line, cells) in enumerate(zip(lines, table, strict=True)):
        assert line["probabilities"] == pytest.approx({"down": wanted[index, 0], "up": wanted[index, 1]}, abs=1e-5)
        assert line["probability"] == max(line["probabilities"].values())
        assert cells == {
            "row": str(line["row"]),
            "label": line["label"],
            "probability": f"{line['probability']:.6f}",
            "probability_down": f"{line['probabilities']['down']:.6f}",
            "probability_up": f"{line['probabilities']['up']:.6f}",
        }


def test_a_short_table_on_the_terminal(longlens, here, trained, new):
    said = longlens("predict", trained / "run", "new.csv", "--batch-size", 7)
    assert (said.code, said.err) == (0, "")
    assert "row label probability" in said.words
    assert "and 40 more rows; --out writes all of them" in said.words
    assert len([line for line in said.out.splitlines() if line.startswith("│")]) == 10
    ups = sum(load_run(trained / "run").predict(new[0], names=True) == "up")
    assert f"'up' {ups} ({2 * ups:.1f} %)" in said.words
    assert f"'down' {50 - ups} ({100 - 2 * ups:.1f} %)" in said.words
    assert longlens("predict", trained / "run", "new.csv", "--checkpoint", "last").code == 0
    assert "checkpoint must be one of" in longlens("predict", trained / "run", "new.csv", "--checkpoint", "7").err


def test_every_format_of_training_can_be_read(longlens, here, trained, new):
    """Also with a label column, which is left alone, with another delimiter, and with a name in each row."""
    rows, labels = new
    write_csv(here / "labeled.csv", rows, labels)
    write_csv(here / "semicolons.csv", rows, delimiter=";")
    write_csv(here / "tabs.tsv", rows, delimiter="\t")
    np.save(here / "new.npy", rows)
    (here / "new.jsonl").write_text("".join(json.dumps({"input": row.tolist()}) + "\n" for row in rows))
    (here / "new.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    names = ["new.csv", "labeled.csv", "semicolons.csv", "tabs.tsv", "new.npy", "new.jsonl", "new.txt"]
    for name in names:
        said = longlens("predict", trained / "run", name, "--out", f"{name}.csv")
        assert (said.code, said.err) == (0, ""), name
        assert (here / f"{name}.csv").read_text() == (here / "new.csv.csv").read_text(), name


def test_parquet_can_be_read(longlens, here, trained, new):
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(new[0], columns=COLUMNS).to_parquet(here / "new.parquet")
    for name in ("new.csv", "new.parquet"):
        said = longlens("predict", trained / "run", name, "--out", f"{name}.csv")
        assert (said.code, said.err) == (0, "")
    assert (here / "new.parquet.csv").read_text() == (here / "new.csv.csv").read_text()


def test_lines_of_stdin(longlens, here, trained, new, monkeypatch):
    text = "".join(json.dumps(row.tolist()) + "\n" for row in new[0])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert longlens("predict", trained / "run", "-", "--out", "a.csv").code == 0
    assert longlens("predict", trained / "run", "new.csv", "--out", "b.csv").code == 0
    assert (here / "a.csv").read_text() == (here / "b.csv").read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 2 x\n"))
    said = longlens("predict", trained / "run", "-")
    assert (said.code, said.out) == (2, "")
    assert "stdin, line 1: a value must be a number" in said.err


BROKEN = {
    "not a number": (["nan"] * LENGTH, "bad.csv, line 2002: "),
    "text": (["x"] * LENGTH, "bad.csv, line 2002: a value must be a number"),
    "empty": ([""] * LENGTH, "bad.csv, line 2002"),
    "a cell too much": (["1"] * (LENGTH + 1), "bad.csv, line 2002 must have 20 cells like the header, got 21"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("ending", ["csv", "jsonl", "npy"])
def test_a_row_that_does_not_fit_is_named_and_nothing_is_written(longlens, here, trained, case, ending):
    """After two thousand that do, so that some were written already."""
    cells, message = BROKEN[case]
    rows = draw(2000, 3)[0]
    write_csv(here / "bad.csv", rows)
    with (here / "bad.csv").open("a") as file:
        file.write(",".join(cells) + "\n")
    (here / f"out.{ending}").write_text("of before")
    before = sorted(path.name for path in here.iterdir())
    said = longlens("predict", trained / "run", "bad.csv", "--out", f"out.{ending}")
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert sorted(path.name for path in here.iterdir()) == before
    assert (here / f"out.{ending}").read_text() == "of before"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("long.jsonl", json.dumps({"input": [1.5] * 21}), "long.jsonl, line 1 must have at most 20 values"),
        ("two.jsonl", json.dumps({"input": [[1, 2]]}), "line 1 must be a sequence of finite numbers, got 2 channels"),
        ("text.jsonl", json.dumps({"input": "abc"}), "line 1 must be a sequence of finite numbers, got the text 'abc'"),
        ("none.jsonl", "", "none.jsonl has no sequences"),
        ("key.jsonl", '{"inputs": [1]}', "key.jsonl, line 1 must be"),
        ("columns.csv", "t0,t1\n1,2\n", "there is no column 't2'"),
        ("a.xls", "", "a.xls must be a file that ends in one of"),
        ("missing.csv", None, "missing.csv"),
    ],
)
def test_what_does_not_fit_is_one_sentence(longlens, here, trained, name, content, message):
    if content is not None:
        (here / name).write_text(content)
    said = longlens("predict", trained / "run", name, "--out", "out.csv")
    assert said.code == 2
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert sorted(path.name for path in here.iterdir()) == ([name] if content is not None else [])


def test_wrong_flags(longlens, here, trained, new):
    for arguments, message in (
        (["--out", "out.xls"], "out must end in .jsonl, .csv or .npy, got out.xls"),
        (["--out", "."], "out must end in"),
        (["--out", "../here/new.csv"], "out must be another file than the input"),
        (["--batch-size", "0"], "--batch-size must be a whole number of at least 1"),
    ):
        said = longlens("predict", trained / "run", "new.csv", *arguments)
        assert (said.code, said.out) == (2, "")
        assert message in said.err
    assert "is not a run" in longlens("predict", here, "new.csv").err
    assert "must be given" in longlens("predict", trained / "run").err


def test_the_data_of_a_language_and_of_pairs(longlens, here, monkeypatch):
    (here / "text8").write_text("the cat sat on the mat and " * 300)
    assert longlens("data", "prepare", "text8", "--stand-in", "--from", here).code == 0
    flags = "--task.stand-in --task.max-length 16 --recipe smoke --steps 2 --threads 1 --folder run".split()
    assert longlens("train", "text8", *flags).code == 0
    (here / "begin.txt").write_text("the ca\n on the\n")
    said = longlens("predict", "run", "begin.txt", "--out", "next.jsonl")
    assert (said.code, said.err) == (0, "")
    lines = read(here / "next.jsonl")
    assert [set(line) for line in lines] == [{"row", "label", "probability"}] * 2
    (here / "begin.txt").write_text("the ca\nThe ca\n")
    said = longlens("predict", "run", "begin.txt")
    assert "begin.txt, line 2 must have symbols of the training set, got 'T' at position 1" in said.err


def test_numbers_that_were_predicted(longlens, here):
    rows = draw(60, 0)[0]
    write_csv(here / "a.csv", rows, rows.mean(axis=1).round(4).tolist())
    assert longlens("train", "files", "--path", "a.csv", *"--recipe smoke --threads 1 --folder run".split()).code == 0
    write_csv(here / "new.csv", rows[:12])
    said = longlens("predict", "run", "new.csv")
    assert said.code == 0
    assert "12 rows: from " in said.words
    for ending in ("csv", "jsonl", "npy"):
        assert longlens("predict", "run", "new.csv", "--out", f"out.{ending}").code == 0
    wanted = load_run("run").predict(rows[:12])
    np.testing.assert_allclose(np.load("out.npy"), wanted)
    np.testing.assert_allclose([line["value"] for line in read(here / "out.jsonl")], wanted)
    np.testing.assert_allclose([float(cells["value"]) for cells in read(here / "out.csv")], wanted)


def test_tables_in_long_form_keep_the_names_of_their_sequences(longlens, here):
    rows, labels = draw(40, 0)

    def write(path, label):
        lines = [
            f"{'id' if not label else 'id;label'};time;a;b",
            *(
                f"beat {index};{f'{labels[index]};' if label else ''}{time};{value};{value / 2}"
                for time in range(LENGTH)
                for index, value in enumerate(rows[:, time])
            ),
        ]
        path.write_text("\n".join(lines) + "\n")

    write(here / "long.csv", label=True)
    flags = "--group-column id --time-column time --recipe smoke --steps 2 --threads 1 --folder run".split()
    assert longlens("train", "files", "--path", "long.csv", *flags).code == 0
    write(here / "new.csv", label=False)
    assert longlens("predict", "run", "new.csv", "--out", "out.jsonl").code == 0
    found = {line["name"]: line["label"] for line in read(here / "out.jsonl")}
    wanted = load_run("run").predict(np.stack([rows, rows / 2], axis=2), names=True)
    assert found == {f"beat {index}": name for index, name in enumerate(wanted)}
    assert "beat 0" in longlens("predict", "run", "new.csv").words


def test_another_labeled_file_is_evaluated(longlens, here, trained):
    rows, labels = draw(64, 5)
    write_csv(here / "other.csv", rows, labels)
    said = longlens("evaluate", trained / "run", "--data", "other.csv")
    assert (said.code, said.err) == (0, "")
    share = np.mean(load_run(trained / "run").predict(rows, names=True) == labels)
    step = load_run(trained / "run").result["best_step"]
    assert f"other.csv (64 samples), step {step}: accuracy {share:.4f}" in said.words
    write_csv(here / "other.csv", rows, ["left", *labels[1:]])
    said = longlens("evaluate", trained / "run", "--data", "other.csv")
    assert said.code == 2
    assert "other.csv, line 2: the label must be one of the classes of training, got 'left'" in said.err
    write_csv(here / "other.csv", rows)
    said = longlens("evaluate", trained / "run", "--data", "other.csv")
    assert (said.code, len(said.err.splitlines())) == (2, 1)


@pytest.mark.slow
def test_a_hundred_thousand_rows_in_bounded_memory(here, trained):
    """A hundred times as many rows take a few MB more; all of them as lists of numbers would be a hundred."""
    rows = draw(1000, 4)[0]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    code = """
import resource, sys
from longlens.cli import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = {}
    for times in (1, 100):
        (here / "many.csv").write_text(",".join(COLUMNS) + "\n" + text * times)
        command = [sys.executable, "-c", code, "predict", trained / "run", "many.csv", "--out", "many.jsonl"]
        done = subprocess.run([*command, "--batch-size", "256"], capture_output=True, text=True, check=True)
        peaks[times] = int(done.stdout.split()[-1]) / 1024
        with (here / "many.jsonl").open() as file:
            assert sum(1 for _ in file) == 1000 * times
    assert peaks[100] - peaks[1] < 40, peaks


def test_what_decided_is_found_in_a_curve(longlens, here, trained, new):
    pytest.importorskip("captum")
    for method in ("gradients", "occlusion"):
        said = longlens("explain", trained / "run", "new.csv", "--row", 3, "--out", "why.png", "--method", method)
        assert (said.code, said.err) == (0, "")
        assert "the model gives " in said.words
        assert "written to why.png" in said.words
        assert (here / "why.png").read_bytes().startswith(b"\x89PNG")
        found = load_run(trained / "run").explain(new[0][2], method=method)
        strongest = np.argsort(-np.abs(found.by_position))[:3] + 1
        assert set(strongest) == {6, 7, 8} if method == "gradients" else strongest[0] in (6, 7, 8)
    said = longlens("explain", trained / "run", "new.csv", "--target", "down")
    assert "the model gives 'down' a probability of" in said.words
    for arguments, message in (
        (["--row", 51], "row must be the number of a sequence in new.csv, got 51: it has fewer"),
        (["--row", 0], "--row must be a whole number of at least 1"),
        (["--target", "left"], "target must be a class of the run, got 'left'"),
        (["--out", "why.gif"], "out must end in .png, .pdf or .svg"),
    ):
        said = longlens("explain", trained / "run", "new.csv", *arguments)
        assert (said.code, said.out) == (2, "")
        assert message in said.err


@pytest.mark.parametrize("name", ["text", "words", "image", "channels"])
def test_every_kind_of_sequence_is_drawn(here, name):
    from longlens.reports.explanation import draw_explanation, say_explanation
    from longlens.training.explain import Explanation

    random = np.random.default_rng(0)
    symbols = values = shape = None
    if name == "text":
        symbols = list("A text of $5 and a\nnew line, <eos> \x07" * 200)
    elif name == "words":
        symbols = ["[MAX", "2", "9", "[MIN", "X", "<eos>"] * 30
    else:
        shape = (8, 8) if name == "image" else None
        values = random.normal(size=(64, 1 if shape else 9))
    size = len(symbols) if values is None else values.shape
    found = Explanation(random.normal(size=size), "a $ class", 1.5, 0.1, 0.8, symbols, values, shape, "gradients")
    for ending in ("png", "svg", "pdf"):
        draw_explanation(found, "las, new.csv, line 3", here / f"why.{ending}")
        assert (here / f"why.{ending}").stat().st_size > 1000
    assert len(say_explanation(found)) == 3


def test_without_captum_nothing_is_explained(longlens, trained, new, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "captum" else real(name, *more)
    )
    said = longlens("explain", trained / "run", "new.csv")
    assert (said.code, said.out) == (2, "")
    assert said.err == "longlens: captum is not installed: pip install 'longlens[explain]'\n"
