"""Every benchmark measures, prints what fits the terminal, and writes what it measured."""

import io
import json
import os

import pytest
from rich.console import Console

from longlens.bench.attention import bench_attention
from longlens.bench.data import _table, bench_data
from longlens.bench.decode import bench_decode
from longlens.bench.layers import bench_layers, growth
from longlens.bench.model import bench_model
from longlens.bench.packages import bench_packages
from longlens.cli import main
from longlens.errors import BadInput
from longlens.mixers.registry import list_mixers
from longlens.options import options_of
from longlens.reports.sheet import Sheet


def shown(printed, width=80):
    """What is printed; no table is cut. Lines of text are never wrapped, so that paths can be copied."""
    console = Console(file=io.StringIO(), width=width)
    for part in printed:
        console.print(part, soft_wrap=isinstance(part, str))
    text = console.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines() if line[0] in "┏┃┡│└")
    assert "…" not in text
    return text


def test_attention(tmp_path):
    out = tmp_path / "new" / "bench.json"
    printed = bench_attention(lengths=(64, 256), head_dims=(16,), heads=2, rounds=1, flex=False, out=out)
    text = shown(printed)
    assert text.splitlines()[-1] == f"written to {out}"
    for row in json.loads(out.read_text())["rows"]:
        assert f" {row['length']} │ {row['name']} " in text
        assert row["forward_backward_s"] > 0
        assert row["forward_peak_bytes"] > 0


@pytest.mark.slow
def test_flex_attention_is_measured_on_a_cpu(tmp_path):
    """Without a backward, which it has on GPUs only."""
    out = tmp_path / "bench.json"
    bench_attention(lengths=(128,), head_dims=(16,), heads=2, rounds=1, groups=("attention",), out=out)
    row = json.loads(out.read_text())["rows"][-1]
    assert (row["name"], row["skipped"], row["forward_backward_s"]) == ("las on flex", None, None)
    assert row["forward_s"] > 0


def test_attention_says_what_is_skipped(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 4096)
    printed = bench_attention(lengths=(1024,), head_dims=(8,), heads=1, groups=("attention",), rounds=1, flex=False)
    assert "las formula at L = 1,024: needs " in shown(printed)


def test_long_sequences(tmp_path, monkeypatch):
    """Small here: windows of the bound and errors below it, and the memory of processes of their own."""
    monkeypatch.setattr("longlens.bench.long.RATES", {"2 of 0.01": (0.01, 0.012)})
    monkeypatch.setattr("longlens.bench.long.ALONE", (3000, 4000))
    out = tmp_path / "long.json"
    text = shown(bench_attention(long=True, lengths=(3000,), rounds=1, tolerance=0.01, out=out))
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert 0 < row["error"] < row["bound"] <= 0.01
    assert f"{row['forward_times']:.1f}× faster" in text
    assert "exact" not in row["windows"]
    assert [alone["length"] for alone in written["alone"]] == [3000, 4000]
    assert all(alone["mib"] > 50 and alone["seconds"] > 0 for alone in written["alone"])


@pytest.mark.parametrize("width", [80, 120])
def test_layers_show_every_length_at_any_width(tmp_path, width):
    lengths = (16, 24, 32, 40, 48, 56)
    out = tmp_path / "layers.json"
    text = shown(bench_layers(mixers=("las", "las-bidirectional"), lengths=lengths, width=8, rounds=1, out=out), width)
    rows = json.loads(out.read_text())["rows"]
    assert {row["mixer"] for row in rows} == {"transformer", "las", "las-bidirectional"}
    assert all(row["seconds"] > 0 and row["bytes"] > 0 and row["parameters"] > 0 for row in rows)
    for row in rows:
        assert f"{1e3 * row['seconds']:,.1f} ms ×" in text
    assert text.count(" ×1 ") >= 2 * len(lengths), "the first line is what the others are relative to"
    assert text.count(" 56 ┃") == 2


def test_decode_measures_every_layer_with_a_step(tmp_path):
    out = tmp_path / "decode.json"
    text = shown(bench_decode(lengths=(24, 8), width=8, heads=2, rounds=1, out=out), 120)
    rows = json.loads(out.read_text())["rows"]
    without = {"bigbird", "hyena", "linformer", "long-conv", "reformer", "reformer-arena", "sgconv", "tnn"}
    both = {"las-bidirectional", "s4-bidirectional", "s4-v2"}
    assert {row["mixer"] for row in rows} == {*list_mixers()} - without - both
    assert [row["length"] for row in rows[:2]] == [8, 24]
    size = {(row["mixer"], row["length"]): row["bytes"] for row in rows}
    assert 4 * 2 * 8 * 24 <= size["transformer", 24] <= 2 * 4 * 2 * 8 * (24 + 24), "keys and values, and room for more"
    assert size["s4d", 8] == size["s4d", 24] == size["s4", 8] == 8 * 8 * 32
    assert size["lssl", 8] == 4 * 8 * 64, "without its matrices, which are the same for all texts"
    assert all(row["seconds"] > 0 and row["parameters"] > 0 for row in rows)
    assert text.count(" ×1 ") >= 4


def test_decode_refuses_a_layer_without_a_step():
    with pytest.raises(BadInput, match="mixers must be layers with a step, and hyena has none: leave it out"):
        bench_decode(mixers=("las", "hyena"))


def test_growth_is_the_largest_of_all_doublings():
    rows = [{"mixer": "las", "length": n, "seconds": s} for n, s in ((2048, 1), (4096, 9), (8192, 10), (16384, 25))]
    assert growth(rows, "las") == 2.5
    assert growth(rows[:2], "las") is None


def test_layers_show_the_growth(monkeypatch):
    def rows(mixers, lengths, *_):
        return [
            {"mixer": m, "length": n, "parameters": 9, "cost": "L", "seconds": n * 1e-3, "bytes": n}
            for m in mixers
            for n in lengths
        ]

    monkeypatch.setattr("longlens.bench.layers._measure", rows)
    text = shown(bench_layers(mixers=("las",), lengths=(1024, 2048, 4096, 8192, 16384)))
    assert text.count("×2.00 │") == 2
    assert "2L: by how much the time grows" in text


def test_packages(tmp_path):
    pytest.importorskip("linformer")
    out = tmp_path / "packages.json"
    text = shown(bench_packages(packages=("linformer",), lengths=(64,), width=16, heads=2, rounds=1, out=out))
    assert "│ linformer " in text
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ours"] > 0
    assert row["theirs"] > 0


def test_packages_that_are_not_installed_are_named(monkeypatch):
    missing = {"nowhere": ("no_such_package", None), "bird": ("transformers.no_such_bird", None)}
    monkeypatch.setattr("longlens.bench.packages.PACKAGES", missing)
    notes = ["nowhere is not installed: pip install nowhere", "bird is not installed: pip install 'longlens[hf]'"]
    assert bench_packages()[1:] == notes


def test_a_package_may_refuse_a_size_without_a_word(monkeypatch):
    def refuse(package, size):
        raise AssertionError

    monkeypatch.setattr("longlens.bench.packages.PACKAGES", {"silent": ("json", refuse)})
    assert bench_packages(lengths=(8,))[1:] == ["silent at L = 8: AssertionError"]


def test_model(tmp_path):
    out = tmp_path / "model.json"
    sizes = {"depth": 1, "width": 16, "heads": 2, "length": 32, "batch": 2, "rounds": 1, "steps": 3}
    text = shown(bench_model(**sizes, mixers=("transformer", "lstm"), tasks=("atomic-cumsum",), out=out))
    written = json.loads(out.read_text())
    assert [row["name"] for row in written["speed"]][:2] == ["transformer", "lstm"]
    assert 0 < written["overhead"][0]["overhead"] < 1
    assert "│ lstm " in text
    assert "│ atomic-cumsum " in text


def test_data_measures_every_task_that_it_can(monkeypatch, tmp_path):
    """Which tasks there are is known to the registry alone."""
    monkeypatch.setattr("longlens.bench.data.list_tasks", lambda: ["atomic-cumsum", "text", "files"])
    out = tmp_path / "data.json"
    text = shown(bench_data(rounds=1, batch_size=2, out=out))
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"] == row["task"] == "atomic-cumsum"
    assert row["generated_per_second"] > 0
    assert row["load_ms"] > 0
    assert "text: not measured: its data is not there: give a folder with --source" in text
    assert "files: not measured: it needs path" in text


def test_data_is_imported_from_a_folder_of_its_name(tmp_path):
    (tmp_path / "source" / "IMDB").mkdir(parents=True)
    text = shown(bench_data(tasks=("text", "image"), source=tmp_path / "source"), width=200)
    assert f"image: not measured: there is no folder cifar-10 in {tmp_path / 'source'}" in text
    assert "text: not measured: " in text
    assert "IMDB" in text


def test_data_leaves_the_cache_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "home"))
    bench_data(tasks=("atomic-select",), rounds=1, batch_size=2)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--lengths"], "lengths must have at least one value, got none"),
        (["attention", "--groups"], "groups must have at least one value, got none"),
        (["attention", "--head-dims", "0"], "--head-dims must be a list, each a whole number of at least 1"),
        (["attention", "--window", "4"], "--window must be an odd number of at least 1, got 4"),
        (["attention", "--out", "."], "out must be a file, and . is a folder"),
        (["layers", "--out", os.devnull], "out must be a file, and /dev/null is a device or a pipe"),
        (["layers", "--mixers"], "mixers must have at least one value, got none"),
        (["layers", "--mixers", "s4e"], "unknown mixer 's4e'; did you mean 's4'"),
        (["layers", "--heads", "3"], "heads must divide the width of the layer, got heads=3 and a width of 128"),
        (["layers", "--rounds", "0"], "--rounds must be a whole number of at least 1, got 0"),
        (["model", "--depth", "0"], "--depth must be a whole number of at least 1, got 0"),
        (["model", "--mixers"], "mixers must have at least one value, got none"),
        (["model", "--tasks", "lisops"], "unknown task 'lisops'; did you mean 'listops'?"),
        (["packages", "--packages", "linform"], "unknown package 'linform'; did you mean 'linformer'?"),
        (["packages", "--packages"], "packages must have at least one value, got none"),
        (["data", "--tasks", "lisops"], "unknown task 'lisops'; did you mean 'listops'?"),
        (["data", "--tasks"], "tasks must have at least one value, got none"),
        (["data", "--source", "nowhere"], "source must be a folder, got nowhere"),
    ],
)
def test_wrong_arguments_are_one_sentence_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"longlens: {message}")
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bench", [bench_attention, bench_data, bench_layers, bench_model, bench_packages])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, bench):
    (tmp_path / "file").write_text("")

    def measured(*_, **__):
        raise AssertionError("it has begun")

    for module in ("attention", "layers", "model", "packages"):
        monkeypatch.setattr(f"longlens.bench.{module}.time_interleaved", measured)
    monkeypatch.setattr("longlens.bench.data._prepare", measured)
    for out in (tmp_path, tmp_path / "file" / "out.json"):
        with pytest.raises(ValueError, match=str(tmp_path)):
            bench(out=out)


@pytest.mark.parametrize("bench", [bench_attention, bench_data, bench_layers, bench_model, bench_packages])
def test_every_flag_is_described_by_a_sentence_of_its_own(bench):
    for option in options_of(bench).values():
        assert option.help[:1].isupper(), option.name
        assert option.help.endswith("."), option.name
    assert options_of(bench)["out"].default is None


def test_tables_can_be_exported():
    (table, *_) = bench_packages(packages=("linformer",), lengths=(8,), width=4, heads=1, rounds=1)
    assert isinstance(table, Sheet)
    assert table.to_markdown().startswith("| package |")


def test_a_stand_in_is_marked():
    row = {"name": "text8", "batch": 2, "length": 512, "load_ms": 0.2, "train_ms": 50, "import_seconds": 1.0}
    text = shown([_table([row | {"stand_in": True}])])
    assert "│ text8* " in text
    assert "*: a stand-in, or a part of the set" in text
