"""Sequences of one's own for the task 'files': CSV, JSONL and .npy files that are right, odd, damaged and hostile."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.cases import Case, fuzz, new_case
from fuzz.damage import damages, json_values, make_beside, wild_texts
from fuzz.lines import flags
from hypothesis import strategies as st

from longlens.training.config import section_options

TRAIN = "--recipe smoke --steps 1 --batch-size 4 --evaluate-every 1 --threads 1 --width 8 --mixer.heads 1".split()
OPTIONS = {name: option for name, option in section_options("task", "files", ()).items() if name != "path"}


def use(case: Case, path: Path, given: list[str], *, train: bool) -> None:
    """Prepare a set, and use what was accepted."""
    said = case.longlens("data", "prepare", "files", "--path", path, *given)
    sets = [folder for folder in case.home.glob("sets/*") if folder.is_dir()]
    assert len(sets) == (said.code == 0), said
    if said.code:
        return
    assert case.longlens("data", "verify").code == 0
    for split in ("train", "test"):
        assert case.longlens("data", "show", "files", "--path", path, "--split", split, *given).code == 0
    if train:
        said = case.longlens("train", "files", "--path", path, *given, *TRAIN)
        assert said.code in (0, 3), said  # 3: numbers that are too large make no finite loss


cells = st.one_of(
    st.sampled_from(["1", "2", "0.5", "-3", "abc", "1 2 3", "0.5 2", "007", "1e5", "x"]),
    st.sampled_from(
        ["", " ", "1e400", "9223372036854775808", "nan", "inf", "1_0", "٣", '"', '"a,b"', "[1, 2]", "\ufeff", "\0"]
    ),
    wild_texts,
)
good_headers = st.sampled_from([["input", "label"], ["label", "input"], ["label", "a", "b"], ["a", "label", "c"]])
headers = st.one_of(
    good_headers,
    good_headers,
    good_headers,
    st.lists(st.sampled_from(["input", "label", "Label", "", "a", "a", "id", "é", "target"]), max_size=4),
)


@st.composite
def csv_files(draw: st.DrawFn) -> str:
    """Mostly right: a few cells are anything."""
    header, usual = draw(headers), draw(st.sampled_from([["1", "2"], ["ab", "ba"], ["0.5", "1.5"], ["1 2", "3 4 5"]]))
    rows = [
        [usual[i % 2] if name != "label" else "xy"[i % 2] for name in header]
        for i in range(draw(st.sampled_from([12, 20, 24, 3, 0])))
    ]
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        if rows and header:
            rows[draw(st.integers(0, len(rows) - 1))][draw(st.integers(0, len(header) - 1))] = draw(cells)
    if rows and draw(st.integers(0, 9)) == 0:
        rows[0] = rows[0][:-1]
    comma = draw(st.sampled_from([",", ",", ",", ",", ",", ";", "\t"]))
    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"]))
    return end.join(comma.join(cells) for cells in [header, *rows]) + end


@fuzz(160, text=csv_files(), given=flags(OPTIONS, small=True, most=1), train=st.integers(0, 3))
def test_csv(text, given, train):
    with new_case("data files") as case:
        Path("set").mkdir()
        Path("set/train.csv").write_text(text, encoding="utf-8", newline="")
        use(case, Path("set"), given, train=train == 0)


@st.composite
def long_files(draw: st.DrawFn) -> str:
    """A row for each time step, in some order; a few cells are anything, and some rows are there twice."""
    comma, groups, length = draw(st.sampled_from([",", ";", "\t"])), draw(st.integers(1, 16)), draw(st.integers(1, 3))
    rows = [[f"g{g}", str(t), str(g + t / 2), str(t), "xy"[g % 2]] for g in range(groups) for t in range(length)]
    rows = draw(st.permutations(rows))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        rows[draw(st.integers(0, len(rows) - 1))][draw(st.integers(0, 4))] = draw(cells)
    rows += draw(st.sampled_from([[], [], [], rows[:1]]))
    header = draw(st.sampled_from([["g", "t", "u", "v", "label"]] * 5 + [["g", "t", "u", "u", "label"], ["g", "t"]]))
    return "\n".join(comma.join(row) for row in [header, *rows]) + "\n"


LONG = [["--group-column", "g", "--time-column", "t"], ["--group-column", "g"], ["--group-column", "t"]]


@fuzz(
    120,
    text=long_files(),
    long=st.sampled_from(LONG[:1] * 4 + LONG[1:]),
    given=flags(OPTIONS, small=True, most=1),
    train=st.integers(0, 3),
)
def test_long_form(text, long, given, train):
    with new_case("data files") as case:
        Path("data.csv").write_text(text, encoding="utf-8", newline="")
        use(case, Path("data.csv"), [*given, *long], train=train == 0)


sequences = st.one_of(
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.floats(-2, 2), max_size=6),
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=4),
    st.text("ab", max_size=6),
)
samples = st.one_of(
    st.tuples(sequences, st.one_of(st.sampled_from(["x", "y"]), st.integers(0, 3), st.floats(-1, 1))),
    st.tuples(st.one_of(json_values, sequences), json_values),
)


@st.composite
def jsonl_files(draw: st.DrawFn) -> list[Any]:
    """Samples of one kind, and perhaps some that are anything."""
    kind, labels = (
        draw(st.sampled_from([[1, 2], [0.5, 1], "ab", [[1, 2], [3, 4]], [2**62]])),
        draw(st.sampled_from([["x", "y"], [0, 1], [0.5, -1], [True, "a"]])),
    )
    found: list[Any] = [{"input": kind, "label": labels[i % 2]} for i in range(draw(st.sampled_from([12, 20, 3])))]
    for sequence, label in draw(st.one_of(st.just([]), st.lists(samples, max_size=2))):
        usual = draw(st.sampled_from(["input", "label", "neither"]))
        sample = {"input": kind if usual == "input" else sequence, "label": labels[0] if usual == "label" else label}
        found.insert(0, sample)
    if draw(st.integers(0, 9)) == 0:
        found.insert(draw(st.integers(0, 3)), draw(json_values))
    return found


@fuzz(160, lines=jsonl_files(), given=flags(OPTIONS, small=True, most=1), train=st.integers(0, 3))
def test_jsonl(lines, given, train):
    with new_case("data files") as case:
        Path("train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        use(case, Path("train.jsonl"), given, train=train == 0)


@st.composite
def arrays(draw: st.DrawFn, shapes: list[tuple[int, ...]]) -> bytes:
    """An array, whose header may say something else."""
    dtype = draw(st.sampled_from(["<i8", "<f4", "<f8", "|u1", "|b1", "<u8", ">i4", "<U2", "|S3", "<f2", "<c8"]))
    array = (
        (np.arange(np.prod(shape := draw(st.sampled_from(shapes))), dtype=np.int64) % 5).astype(dtype).reshape(shape)
    )
    if array.dtype.kind == "f" and array.size and draw(st.integers(0, 3)) == 0:
        array.flat[0] = draw(st.sampled_from([np.nan, np.inf, 3e4, -0.0]))
    file = io.BytesIO()
    np.save(file, np.asfortranarray(array) if draw(st.booleans()) else array)
    data = file.getvalue()
    if draw(st.integers(0, 4)):
        return data
    form = "{{'descr': {!r}, 'fortran_order': {}, 'shape': {}, }}"
    size = draw(
        st.sampled_from(["3", "10**30", str(10**30), "-1", "2.5", "None", "'a'", "True", "(" * 300, "9" * 5000])
    )
    text = form.format(
        draw(st.sampled_from([dtype, "|O", "", "<f99", "|V8", "[('a','<f4')]"])), draw(st.booleans()), f"({size},)"
    )
    text = (
        text
        if draw(st.booleans())
        else draw(st.sampled_from(["{}", "__import__('os')", "[" * 5000, "", "{'descr': 1}"]))
    )
    version = draw(st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00", b""]))
    length = len(text).to_bytes(2 if version[:1] == b"\x01" else 4, "little")
    return b"\x93NUMPY" + version + length + text.encode() + data[128:]


@fuzz(
    160,
    inputs=arrays([*[(8, 3), (8, 3, 2), (8, 3, 1)] * 3, (8,), (0, 3), (8, 0), (2, 2, 2, 2)]),
    labels=arrays([*[(8,)] * 6, (8, 1), (7,), ()]),
    lengths=st.one_of(st.none(), st.none(), arrays([(8,), (3,)])),
    train=st.integers(0, 3),
)
def test_npy(inputs, labels, lengths, train):
    with new_case("data files") as case:
        for name, data in (("inputs", inputs), ("labels", labels), ("lengths", lengths)):
            if data is not None:
                Path(f"train.{name}.npy").write_bytes(data)
        use(case, Path("train.inputs.npy"), [], train=train == 0)


GOOD = {
    "train.csv": "input,label\n" + "ab,x\nba,y\nabab,x\n" * 8,
    "train.jsonl": '{"input": [1, 2, 3], "label": "x"}\n{"input": [3], "label": "y"}\n' * 8,
}


@fuzz(120, name=st.sampled_from([*GOOD, "npy"]), damage=st.lists(damages(), min_size=1, max_size=2))
def test_a_damaged_file(name, damage):
    with new_case("data files") as case:
        path, beside = case.here / "set", make_beside(case.folder / "beside")
        path.mkdir()
        if name == "npy":
            np.save(path / "train.inputs.npy", np.arange(48).reshape(16, 3))
            np.save(path / "train.labels.npy", np.arange(16) % 2)
        else:
            (path / name).write_text(GOOD[name])
        files = sorted(path.iterdir())
        for how in damage:
            how.apply(files[how.at % len(files)], beside)
        use(case, Path("set"), [], train=False)
        assert (beside / "mine.txt").read_text() == "mine"
