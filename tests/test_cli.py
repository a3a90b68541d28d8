"""The command line as a person uses it: in a process of its own."""

import json
import os
import subprocess
import sys

import pytest


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
        (["bench", "attention", "--lenghts", "3"], "--lengths"),
        (["bench", "attention", "--device", "tpu"], "tpu"),
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
def test_bad_arguments_are_one_message_and_exit_code_2(arguments, message, tmp_path):
    result = longlens(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir()), "nothing half-written"


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
