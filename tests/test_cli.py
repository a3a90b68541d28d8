"""The command line as a person uses it: in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from longlens.cli import main


def longlens(*arguments, **options):
    command = [sys.executable, "-m", "longlens", *arguments]
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom longlens.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "bench" in result.stdout


def test_import_is_lazy_and_brings_nothing_but_torch():
    code = (
        "import sys, longlens\nassert 'torch' not in sys.modules\n"
        "longlens.las_attention, longlens.LaSAttention\n"
        "assert not {'matplotlib', 'rich', 'tyro'} & set(sys.modules)\n"
        "assert 'las_attention' in dir(longlens)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_there():
    import longlens

    for name in longlens.__all__:
        assert getattr(longlens, name) is not None
    with pytest.raises(AttributeError, match="module 'longlens' has no attribute 'nothing'"):
        _ = longlens.nothing


def test_version():
    assert longlens("--version").stdout == f"longlens {__import__('longlens').__version__}\n"


def test_bench_attention_writes_what_it_measured(tmp_path):
    out = tmp_path / "bench.json"
    result = longlens(
        "bench", "attention", "--lengths", "64", "256", "--head-dims", "16", "--heads", "2", "--rounds", "2",
        "--no-flex", "--out", str(out),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "las layer" in result.stdout
    written = json.loads(out.read_text())
    assert {"torch", "processor", "threads"} <= set(written["environment"])
    names = [row["name"] for row in written["rows"] if row["length"] == 256]
    assert names[:4] == ["sdpa", "las", "las formula", "las linear"]
    assert names[4:] == ["sdpa, chunks of 128", "las, chunks of 128", "sdpa layer", "las layer"]
    assert all(row["forward_backward_s"] > 0 and row["forward_peak_bytes"] > 0 for row in written["rows"])


def test_bench_layers_is_relative_to_the_transformer(tmp_path):
    out = tmp_path / "layers.json"
    result = longlens(
        "bench", "layers", "--mixers", "las-chunk", "s4d", "--lengths", "64", "32", "--width", "16", "--heads", "2",
        "--rounds", "2", "--out", str(out),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {(row["mixer"], row["length"]) for row in rows} == {
        (name, length) for name in ("transformer", "las-chunk", "s4d") for length in (32, 64)
    }
    assert all(row["seconds"] > 0 and row["bytes"] > 0 and row["parameters"] > 0 for row in rows)
    baselines = [line for line in result.stdout.splitlines() if line.startswith("│ transformer")]
    assert [line.count(" ×1 ") for line in baselines] == [2, 2], "in both tables, at both lengths"


def test_bench_packages_measures_both(tmp_path):
    pytest.importorskip("linformer")
    out = tmp_path / "packages.json"
    result = longlens(
        "bench", "packages", "--packages", "linformer", "--lengths", "64", "--width", "16", "--heads", "2",
        "--rounds", "2", "--out", str(out),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ours"] > 0
    assert row["theirs"] > 0


def test_figures_eld_draws_a_picture(tmp_path):
    for name in ("eld.png", "new folder/eld.svg"):
        result = longlens("figures", "eld", "--length", "100", "--out", str(tmp_path / name))
        assert result.returncode == 0, result.stderr
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "attention", "--window", "4"], "longlens: window must be an odd number"),
        (["bench", "attention", "--heads", "0"], "longlens: num_heads must be an integer of at least 1, got 0"),
        (["bench", "attention", "--rounds", "0"], "longlens: rounds must be at least 1, got 0"),
        (["bench", "attention", "--lengths", "0"], "longlens: lengths must be at least 1, got 0"),
        (
            ["bench", "attention", "--out", "no/such/folder/x.json"],
            "longlens: out must be a file in a folder",
        ),
        (["bench", "attention", "--lenghts", "3"], "Unrecognized options: --lenghts, 3; perhaps you meant --lengths?"),
        (["bench", "attention", "--device", "tpu"], "tpu"),
        (["bench", "model", "--depth", "0"], "longlens: depth must be at least 1, got 0"),
        (["train", "lisops"], "longlens: 'longlens train' knows no 'lisops'; did you mean 'listops'?"),
        (["train", "listops", "--mixer", "lass"], "longlens: there is no mixer 'lass'; did you mean 'las' or 'lssl'?"),
        (["compare", "listops", "--mixers", "las", "trasformer"], "did you mean 'transformer' or 'reformer'?"),
        (["compare", "listops", "--mixers"], "longlens: there is nothing to run"),
        (["train", "listops", "--recipe", "min"], "longlens: there is no recipe 'min'; did you mean 'mini'?"),
        (["train", "listops", "--recipe", "my.toml"], "longlens: my.toml is not a file"),
        (["train", "listops", "--recipe"], "--recipe"),
        (["train", "atomic-cumsum", "--lrr", "3"], "longlens: Unrecognized options: --lrr, 3; perhaps you meant --lr?"),
        (["train", "atomic-cumsum", "--lr", "fast"], "longlens: Error parsing --lr: could not convert string to float"),
        (["train", "atomic-cumsum", "--depth", "0"], "longlens: model.depth is 0: input should be greater than or"),
        (
            ["train", "atomic-cumsum", "--steps", "5", "--epochs", "1"],
            "longlens: epochs is 1.0 and steps is 5; give one",
        ),
        (["train", "atomic-cumsum", "--mixer.window", "4"], "longlens: window must be an odd number of at least 1"),
        (["train", "atomic-cumsum", "--mixer.heads", "7"], "longlens: heads must be at least 1 and divide the width"),
        (["train", "atomic-cumsum", "--task.length", "0"], "longlens: length is 0"),
        (["train", "files"], "--task.path"),
        (["train", "files", "--task.path", "nowhere"], "nowhere"),
        (["train", "text8", "--mixer", "las-bidirectional"], "needs a causal mixer, and 'las-bidirectional' is not"),
        (["train", "text8", "--mixer.side", "centered"], "window=3 looks 1 ahead: choose side='past'"),
        (["train", "text8", "--norm", "batch"], "a language task cannot have norm='batch', which mixes positions"),
        (["sweep", "atomic-cumsum", "--grid", "lr"], "longlens: grid has 'lr'; it must be a field and its values"),
        (["sweep", "atomic-cumsum", "--grid", "lrr=1"], "longlens: there is no field 'lrr'; did you mean 'lr'"),
        (["sweep", "atomic-cumsum", "--grid", "mixer=a,b"], "longlens: there is no mixer 'a'"),
        (["sweep", "atomic-cumsum", "--jobs", "0"], "longlens: jobs is 0; it must be at least 1"),
        (["sweep", "atomic-cumsum", "--grid", "seed=0,1"], "longlens: grid names the seed: give --seeds instead"),
        (["compare", "atomic-cumsum", "--mixer.heads", "7"], "longlens: heads must be at least 1 and divide the width"),
        (["train", "--recipe", "smoke", "listops"], "longlens: 'longlens train' must be followed by one of listops,"),
        (["evaluate", "nowhere"], "longlens: nowhere is not a run: it has no config.json"),
        (["list", "runs"], "longlens: there is no run in runs"),
        (["list", "mixer"], "longlens: 'longlens list' knows no 'mixer'; did you mean 'mixers'?"),
        (["list", "mixers", "--traits", "--length", "3"], "longlens: length must be at least 16, got 3"),
        (["bench", "layers", "--mixers", "s4e"], "longlens: there is no mixer 's4e'; did you mean 's4'"),
        (["bench", "layers", "--lengths", "0"], "longlens: lengths must be at least 1, got (0,)"),
        (
            ["bench", "packages", "--packages", "linform"],
            "longlens: 'linform' is not compared; did you mean 'linformer'?",
        ),
        (["figures", "kernels", "--mixers", "las"], "longlens: mixer 'las' has no kernel to draw; those that have"),
        (["figures", "eld", "--length", "1"], "longlens: length must be at least 2, got 1"),
        (["figures", "eld", "--out", "eld.txt"], "longlens: out must end in .png, .pdf or .svg, got eld.txt"),
        (["figures", "eld", "--out", "[/x].txt"], "longlens: out must end in .png, .pdf or .svg, got [/x].txt"),
        (["bench", "attention", "--out", "."], "longlens: out must be a file in a folder that exists, got ."),
        (["bench", "attention", "--groups"], "longlens: groups must name at least one of attention, chunk, layer"),
        (["figures", "eld", "--length", "1000000000000"], "longlens: not enough memory for these sizes"),
        (["bnech"], "bnech"),
        (["bench"], "attention"),
    ],
)
def test_bad_arguments_are_one_message_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in said
    assert len(said.splitlines()) == 1, "one line"
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_a_bad_argument_is_no_traceback_in_a_shell(tmp_path):
    result = longlens("train", "listops", "--mixer", "lass", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "longlens: there is no mixer 'lass'; did you mean 'las' or 'lssl'?\n"


def test_list_shows_every_mixer():
    from longlens import list_mixers

    result = longlens("list", "mixers")
    assert result.returncode == 0, result.stderr
    for name in list_mixers():
        assert name in result.stdout


def test_list_shows_the_traits_of_every_mixer():
    from longlens import list_mixers

    result = longlens("list", "mixers", "--traits", "--length", "16", "--width", "16")
    assert result.returncode == 0, result.stderr
    for name in list_mixers():
        assert result.stdout.count(f"│ {name} ") == 2


def test_help_shows_the_defaults_of_the_recipe(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[model]\nwidth = 48\n[mixer]\nheads = 6\n[training]\nsteps = 7\nlr = 0.0123\n")
    result = longlens("train", "listops", "--recipe", str(recipe), "--help")
    assert result.returncode == 0, result.stderr
    for flag, default in (("--width", 48), ("--mixer.heads", 6), ("--steps", 7), ("--lr", 0.0123)):
        said = " ".join(result.stdout.replace("│", " ").split()).split(f" {flag} ", 1)[1]
        assert f"(default: {default})" in said[:300]


def test_bench_model_measures_models_and_the_loop(tmp_path):
    out = tmp_path / "bench.json"
    sizes = {"depth": 1, "width": 16, "heads": 2, "length": 32, "batch": 2, "rounds": 1, "steps": 3}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    result = longlens("bench", "model", *flags, "--tasks", "atomic-cumsum", "--out", str(out))
    assert result.returncode == 0, result.stderr
    written = json.loads(out.read_text())
    names = {row["name"]: row["parameters"] for row in written["speed"]}
    assert names["GPT-2 of transformers"] == names["transformer"] == names["las"]
    assert 0 < written["overhead"][0]["overhead"] < 1


def test_bench_data_writes_what_it_measured(tmp_path):
    out = tmp_path / "bench.json"
    result = longlens(
        "bench", "data", "--tasks", "atomic-cumsum", "text", "--rounds", "1", "--batch-size", "2", "--out", out
    )
    assert result.returncode == 0, result.stderr
    assert "text: not measured" in result.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert row["task"] == "atomic-cumsum"
    assert row["generated_per_second"] > 0
    assert 0 < row["load_ms"] < row["train_ms"]
    result = longlens("bench", "data", "--tasks", "lisops")
    assert result.returncode == 2
    assert "did you mean 'listops'" in result.stderr
