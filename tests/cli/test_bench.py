"""``longlens bench``, ``figures`` and ``demo`` from flags to files."""

import json
from pathlib import Path

import pytest


def flags(**values):
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]


def test_bench_attention_writes_what_it_measured(longlens, here):
    sizes = "--lengths 64 256 --head-dims 16 --heads 2 --rounds 2 --no-flex".split()
    said = longlens("bench", "attention", *sizes, "--out", "bench.json")
    assert said.code == 0, said.err
    assert "las layer" in said.out
    written = json.loads((here / "bench.json").read_text())
    assert {"torch", "processor", "threads"} <= set(written["environment"])
    names = [row["name"] for row in written["rows"] if row["length"] == 256]
    assert names[:4] == ["sdpa", "las", "las formula", "las linear"]
    assert names[4:8] == ["sdpa, chunks of 128", "las, chunks of 128", "sdpa layer", "las layer"]
    assert names[8:] == ["sdpa, one query", "las, one query"]
    assert all(row["forward_backward_s"] > 0 and row["forward_peak_bytes"] > 0 for row in written["rows"])


def test_bench_layers_is_relative_to_the_transformer(longlens, here):
    sizes = "--mixers las-chunk s4d --lengths 64 32 --width 16 --heads 2 --rounds 2".split()
    said = longlens("bench", "layers", *sizes, "--out", "layers.json")
    assert said.code == 0, said.err
    rows = json.loads((here / "layers.json").read_text())["rows"]
    assert {(row["mixer"], row["length"]) for row in rows} == {
        (name, length) for name in ("transformer", "las-chunk", "s4d") for length in (32, 64)
    }
    assert all(row["seconds"] > 0 and row["bytes"] > 0 and row["parameters"] > 0 for row in rows)
    baselines = [line for line in said.out.splitlines() if line.startswith("│ transformer")]
    assert [line.count(" ×1 ") for line in baselines] == [2, 2], "in both tables, at both lengths"


def test_bench_packages_measures_both(longlens, here):
    pytest.importorskip("linformer")
    sizes = "--packages linformer --lengths 64 --width 16 --heads 2 --rounds 2".split()
    said = longlens("bench", "packages", *sizes, "--out", "packages.json")
    assert said.code == 0, said.err
    (row,) = json.loads((here / "packages.json").read_text())["rows"]
    assert row["ours"] > 0
    assert row["theirs"] > 0


@pytest.mark.slow
def test_bench_model_measures_models_and_the_loop(longlens, here):
    sizes = flags(depth=1, width=16, heads=2, length=32, batch=2, rounds=1, steps=3)
    said = longlens("bench", "model", *sizes, "--tasks", "atomic-cumsum", "--out", "bench.json")
    assert said.code == 0, said.err
    written = json.loads((here / "bench.json").read_text())
    names = {row["name"]: row["parameters"] for row in written["speed"]}
    assert names["GPT-2 of transformers"] == names["transformer"] == names["las"]
    assert 0 < written["overhead"][0]["overhead"] < 1


def test_bench_data_writes_what_it_measured(longlens, here):
    sizes = "--tasks atomic-cumsum text --rounds 1 --batch-size 2".split()
    said = longlens("bench", "data", *sizes, "--out", "bench.json")
    assert said.code == 0, said.err
    assert "text: not measured" in said.out
    (row,) = json.loads((here / "bench.json").read_text())["rows"]
    assert row["task"] == "atomic-cumsum"
    assert row["generated_per_second"] > 0
    assert 0 < row["load_ms"] < row["train_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eld.png", "new folder/eld.svg"])
def test_figures_eld_draws_a_picture(longlens, here, name):
    said = longlens("figures", "eld", "--length", 100, "--out", name)
    assert said.code == 0, said.err
    assert (here / name).stat().st_size > 10_000


@pytest.mark.slow
def test_the_demo_compares_with_the_formula_and_tries_a_claim(longlens, here, monkeypatch):
    from longlens import api
    from longlens.cli import demo

    monkeypatch.setattr(api, "_is_only_here", lambda config: True)
    monkeypatch.setattr(demo, "cores", lambda: 1)
    monkeypatch.setattr(demo, "SMALL", demo.SMALL | {"steps": 4, "evaluate_every": 2, "task.sizes": (64, 16, 16)})
    said = longlens("demo", "--out", "there", "--runs", "my_runs", columns=80)
    assert said.code == 0, said.err
    command = said.out[said.out.index("longlens compare") :].partition("\n\n")[0]
    words = command.replace("\\\n", " ").split()[: 5 + 2 * len(demo.SMALL)]
    assert words[:6] == ["longlens", "compare", "atomic-select", "--mixers", "transformer", "las"]
    assert "forward and backward: plain attention" in said.words
    assert "The paper has R² 0.971 with plain attention and 0.783 with LaS" in said.words
    assert (here / "there" / "eld.png").stat().st_size > 10_000
    rows = json.loads((here / "there" / "demo.json").read_text())
    assert [(row["mixer"], row["seed"]) for row in rows] == [(m, s) for m in ("transformer", "las") for s in demo.SEEDS]
    assert len(list(here.glob("my_runs/atomic-select/*/*/result.json"))) == 6
    assert max(map(len, said.out.splitlines())) <= 80


def test_a_demo_whose_runs_fail_says_so():
    from longlens import api
    from longlens.cli import demo
    from longlens.training.config import load_recipe
    from longlens.training.many import Outcome

    config = load_recipe("smoke", "atomic-select").resolve("atomic-select", "las")
    said = demo._beside_the_paper(api.Comparison([Outcome(config, Path(), error="no memory")], choose=False))
    assert said.startswith("Some runs failed")
