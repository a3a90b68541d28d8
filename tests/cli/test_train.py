"""``longlens train``, ``compare``, ``sweep`` and ``evaluate`` from flags to what is printed."""

import json

import pytest

from longlens.cli.train import read_grid
from longlens.training.machine import PeakMemory
from longlens.training.run import read_config


def folders(here, *pattern):
    return sorted(path.parent for path in here.glob("/".join(["runs", *pattern, "result.json"])))


@pytest.fixture
def in_process(monkeypatch):
    """Runs of a comparison in this process, one after the other: a process for each takes seconds."""
    monkeypatch.setattr("longlens.api._is_only_here", lambda config: True)


def fits(said, columns):
    lines = [line for line in said.out.splitlines() if not line.startswith(("run folder", "written"))]
    assert max(map(len, lines)) <= columns
    assert "…" not in said.out


@pytest.mark.parametrize("columns", [80, 120])
def test_train_says_the_result_and_the_folder(longlens, here, tiny, columns, monkeypatch):
    monkeypatch.setattr(PeakMemory, "is_first", True)  # in this process, whose memory is known
    said = longlens("train", "atomic-cumsum", *tiny, columns=columns)
    assert said.code == 0, said.err
    fits(said, columns)
    (folder,) = folders(here, "*", "*", "*")
    assert said.out.splitlines()[-1] == f"run folder: {folder.relative_to(here)}"
    result = json.loads((folder / "result.json").read_text())
    assert said.words.startswith("las on atomic-cumsum (max_length=16, sizes=(32, 8, 8)) ")
    assert f"r2: test {result['test']:.3f}, valid {result['valid']:.3f} (model with the best validation)" in said.words
    assert f"test {result['test_last']:.3f} (last model)" in said.words
    assert f"{result['parameters']:,} parameters, 2 steps in {result['seconds']:,.0f} s" in said.words
    memory = f"{result['peak_memory_bytes'] / 2**20:,.0f} MiB"
    assert f"{result['tokens_per_second']:,.0f} tokens/s, {memory}" in said.words
    again = longlens("train", "atomic-cumsum", *tiny, columns=columns)
    assert again.out.splitlines()[-1] == f"run folder: {folder.relative_to(here)} (finished before, not run again)"
    assert again.out.splitlines()[:-1] == said.out.splitlines()[:-1]


def test_every_flag_arrives(longlens, here, tiny):
    flags = "--lr 0.125 --depth 3 --mixer.window 7 --task.max-length 12 --no-prenorm --betas 0.5 0.75 --clip none"
    flags += " --mixer.side past --keep 1 --seed 5"
    said = longlens("train", "atomic-cumsum", "--folder", "run", *tiny, *flags.split())
    assert said.code == 0, said.err
    config = read_config(here / "run")
    assert (config.training.lr, config.training.betas, config.training.clip) == (0.125, (0.5, 0.75), None)
    assert (config.training.seed, config.model.depth, config.model.prenorm) == (5, 3, False)
    assert (config.mixer.options["window"], config.mixer.options["side"]) == (7, "past")
    assert (config.task.max_length, config.recipe) == (12, "smoke")
    assert len(list((here / "run" / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--task.max-length", "12"],
        ["--max-length", "12"],
        ["--task.length", "12"],
        ["--length", "12"],
        ["--task.max_length=12"],
        ["--max_length", "12"],
    ],
    ids=" ".join,
)
def test_an_option_of_a_task_has_several_names(longlens, here, flags):
    fixed = "--recipe smoke --sizes 32 8 8 --steps 1 --threads 1 --folder run".split()
    said = longlens("train", "atomic-cumsum", *fixed, *flags)
    assert said.code == 0, said.err
    assert (
        read_config(here / "run").task.values() | {"max_length": 12, "sizes": (32, 8, 8)}
        == read_config(here / "run").task.values()
    )


def test_files_of_your_own(longlens, here):
    rows = ["label,input"] + [f"{'ab'[n % 2]},{'xy' * (3 + n % 3)}" for n in range(40)]
    (here / "mine.csv").write_text("\n".join(rows))
    for flag in ("--path", "--task.path"):
        said = longlens("train", "files", flag, "mine.csv", *"--recipe smoke --steps 1 --threads 1".split())
        assert said.code == 0, said.err
    assert len(folders(here, "*", "*", "*")) == 1, "the same run"
    said = longlens("compare", "files", "--path", "mine.csv", *"--mixers las --recipe smoke --steps 1".split())
    assert "1 of 1 were finished before" in said.words


@pytest.mark.slow
def test_compare_ranks_and_resumes(longlens, here, tiny):
    flags = [*tiny, "--mixers", "las", "transformer", "--mixer.window", 3, "--jobs", 2, "--out", "new/out.json"]
    said = longlens("compare", "atomic-cumsum", *flags, columns=80)
    assert said.code == 0, said.err
    fits(said, 80)
    assert "is better than" in said.words
    assert "one seed each" in said.words
    assert said.out.splitlines()[-3:] == [
        f"run folders: {here / 'runs' / 'atomic-cumsum'}",
        "a page of them: longlens report runs/atomic-cumsum",
        "written to new/out.json",
    ]
    rows = json.loads((here / "new" / "out.json").read_text())
    assert [row["config"]["mixer"] for row in rows] == ["las", "transformer"]
    assert rows[0]["config"]["mixer.window"] == 3
    assert "mixer.window" not in rows[1]["config"], "an option goes to the mixers that have it"
    assert all(row["error"] is None and row["result"]["steps"] == 2 for row in rows)
    again = longlens("compare", "atomic-cumsum", *flags, columns=120)
    fits(again, 120)
    assert "2 of 2 were finished before; delete a folder to run it again" in again.words


def test_compare_takes_seeds(longlens, here, tiny, in_process):
    said = longlens("compare", "atomic-cumsum", *tiny, *"--mixers las --seeds 0 1".split())
    assert said.code == 0, said.err
    assert "las (2 seeds)" in said.words
    assert [read_config(folder).training.seed for folder in folders(here, "*", "las", "*")].count(1) == 1


@pytest.mark.parametrize("columns", [80, 120])
def test_sweep_chooses_on_validation(longlens, here, tiny, columns, in_process):
    grid = ["--grid", "lr=1e-3,3e-3", "mixer.window=3,5"]
    said = longlens("sweep", "atomic-cumsum", *tiny, *grid, columns=columns)
    assert said.code == 0, said.err
    fits(said, columns)
    assert len(folders(here, "*", "las", "*")) == 4
    assert "┃ lr " in said.out
    assert "window ┃" in said.out
    assert "best on validation: las " in said.words


def test_a_sweep_has_the_options_of_the_mixers_in_its_grid(longlens, here, tiny, in_process):
    grid = ["--grid", "mixer=s4d,dss", "--mixer.state-size", 4]
    said = longlens("sweep", "atomic-cumsum", *tiny, *grid)
    assert said.code == 0, said.err
    found = [read_config(folder).mixer for folder in folders(here, "*", "*", "*")]
    assert sorted((mixer.name, mixer.options["state_size"]) for mixer in found) == [("dss", 4), ("s4d", 4)]


def test_a_run_that_fails_is_reported_and_stops_no_other(longlens, here, tiny, in_process):
    said = longlens("sweep", "atomic-cumsum", *tiny, "--steps", 4, "--log-every", 1, "--grid", "lr=1e-3,1e12")
    assert said.code == 1
    assert "las, seed 0 failed: " in said.words
    assert "│ failed │" in " ".join(said.out.split())
    assert len(folders(here, "*", "las", "*")) == 1


def test_a_run_that_cannot_go_on_is_code_3(longlens, here, tiny):
    said = longlens("train", "atomic-cumsum", *tiny, "--steps", 4, "--log-every", 1, "--lr", "1e12")
    assert said.code == 3
    assert "not finite" in said.err or "is nan" in said.err or "is inf" in said.err
    assert said.err.splitlines()[-1].startswith("longlens: ")


def test_evaluate_says_the_metric(longlens, here, tiny):
    longlens("train", "atomic-cumsum", *tiny, "--folder", "run")
    result = json.loads((here / "run" / "result.json").read_text())
    said = longlens("evaluate", "run")
    assert said.code == 0, said.err
    assert said.words.startswith(
        "las on atomic-cumsum (max_length=16, sizes=(32, 8, 8)), test (8 samples), step 2: r2 "
    )
    assert f"r2 {result['test']:.4f}, loss " in said.words
    assert "valid (8 samples)" in longlens("evaluate", "run", "--split", "valid", "--checkpoint", "last").words
    as_json = longlens("evaluate", "run", "--format", "json")
    (row,) = json.loads(as_json.out)[0]["rows"]
    assert (row["mixer"], row["split"], row["samples"], row["step"], row["metric"]) == ("las", "test", 8, 2, "r2")
    assert row["value"] == pytest.approx(result["test"], abs=1e-6)
    assert "r2" in as_json.err, "sentences go to stderr"
    assert longlens("evaluate", "run", "--out", "e.csv").out == f"{said.out}written to e.csv\n"
    assert (here / "e.csv").read_text().startswith("mixer,task,split,samples,step,metric,value,loss\nlas,")
    said = longlens("evaluate", "run", "--checkpoint", "7")
    assert said.code == 2
    assert said.err.count("\n") == 1


def test_evaluate_refuses_another_config(longlens, here, tiny):
    longlens("train", "atomic-cumsum", *tiny, "--folder", "run")
    path = here / "run" / "config.json"
    config = json.loads(path.read_text())
    config["model"]["width"] *= 2
    path.write_text(json.dumps(config))
    said = longlens("evaluate", "run")
    assert said.code == 2
    assert "is not the config that this run was started with" in said.err


def test_another_process_of_many_prints_nothing(longlens, tiny, monkeypatch):
    """Under torchrun the first one does."""
    longlens("train", "atomic-cumsum", *tiny)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("longlens.api.train_config", lambda config, runtime: None)
    assert longlens("train", "atomic-cumsum", *tiny) == (0, "", "")


def test_a_grid_is_read():
    assert read_grid(("lr=1e-3,3e-4", "mixer.max-rate=0", "betas=[0.9,0.99],[0.9,0.999]", "mixer=las-chunk,s4d")) == {
        "lr": ["1e-3", "3e-4"],
        "mixer.max_rate": ["0"],
        "betas": [["0.9", "0.99"], ["0.9", "0.999"]],
        "mixer": ["las-chunk", "s4d"],
    }


def test_a_big_batch_is_said(longlens, tiny):
    said = longlens("train", "atomic-cumsum", *tiny, "--batch-size", 10_000_000)
    assert said.code == 0, said.err
    assert "a step has all 32 training samples, as batch_size is 10,000,000" in said.err


def test_each_mixer_is_compared_by_the_recipe_it_was_published_with(longlens, here):
    """Flags have the last word, for all of them."""
    small = "--task.sizes 8 4 4 --task.min-length 4 --task.max-length 24 --task.max-depth 3 --task.max-args 4"
    flags = (
        f"{small} --steps 1 --batch-size 2 --depth 1 --width 16 --threads 1 --groups dt.lr=0.5 --out out.json".split()
    )
    said = longlens("compare", "listops", "--mixers", "s5", "--recipe", "published", *flags)
    assert said.code == 0, said.err
    said = longlens("compare", "listops", "--mixers", "s5", "mega", "--recipe", "published", *flags[:-4], *flags[-2:])
    assert said.code == 0, said.err
    s5, mega = (entry["config"] for entry in json.loads((here / "out.json").read_text()))
    assert (s5["training.schedule"], s5["training.weight_decay"], s5["model.norm"]) == ("cosine", 0.04, "batch")
    assert s5["training.groups"] == {"b": {"lr": 0.003, "weight_decay": 0.04}}
    assert (mega["training.schedule"], mega["training.weight_decay"], mega["model.norm"]) == ("linear", 0.01, "layer")
    assert s5["task.max_length"] == mega["task.max_length"] == 24
    assert s5["model.depth"] == mega["model.depth"] == 1
