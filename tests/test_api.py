"""Training in Python: ``longlens.train``, ``compare``, ``sweep`` and ``load_run``."""

import copy
import csv
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from support.data import home  # noqa: F401 (a fixture)
from torch import nn

import longlens.mixers
from longlens import Comparison, Result, compare, create_task, load_run, sweep, train
from longlens.errors import BadInput, Interrupted, RunError
from longlens.mixers.registry import REGISTRY
from longlens.tasks.atomic import CumSum

LISTOPS = {"task.sizes": [64, 16, 16], "steps": 2, "threads": 1}
TINY = {"recipe": "smoke", "task.max_length": 16, "task.sizes": [32, 8, 8], "steps": 2, "threads": 1}


class RunningMean(nn.Module):
    """The mean of all tokens so far.

    Args:
        d_model: Width of the layer.
        scale: Factor of the result.
    """

    def __init__(self, d_model: int, *, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x, *, mask=None):
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.linear(self.scale * x.cumsum(dim=1) / count[:, None])


class NoMask(nn.Module):
    """A layer that cannot be told about padding."""

    def __init__(self, d_model: int):
        super().__init__()

    def forward(self, x):
        return x


class Stopping(RunningMean):
    """Someone presses Ctrl-C in its third call."""

    calls = 0

    def forward(self, x, *, mask=None):
        Stopping.calls += 1
        if Stopping.calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(x, mask=mask)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, in which runs are made."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def same_registry(monkeypatch):
    """Names that a test adds are gone after it."""
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    monkeypatch.setattr(REGISTRY, "homes", dict(REGISTRY.homes))


@pytest.fixture
def in_process(monkeypatch):
    """Runs of a comparison one after the other: a process for each takes seconds."""
    monkeypatch.setattr("longlens.api._is_only_here", lambda config: True)


def test_train_gives_the_result(here, capsys):
    result = train("atomic-cumsum", "las", lr=0.125, depth=1, window=3, **TINY)
    assert isinstance(result, Result)
    assert result.folder == Path("runs/atomic-cumsum/las") / result.folder.name
    assert result.folder.is_dir()
    assert not result.was_there
    assert (result.steps, result.metric, result.mixer, result.seed) == (2, "r2", "las", 0)
    assert all(np.isfinite([result.test, result.test_last, result.valid, result.seconds, result.tokens_per_second]))
    assert (result.config.training.lr, result.config.model.depth, result.config.mixer.options["window"]) == (
        0.125,
        1,
        3,
    )
    assert result.config.task.max_length == 16
    assert repr(result).startswith("Result(las on atomic-cumsum (max_length=16, sizes=(32, 8, 8)): r2 ")
    with pytest.raises(AttributeError, match="a result has no 'tset'; it has task, mixer"):
        _ = result.tset
    with pytest.raises(FrozenInstanceError):
        result.folder = here
    assert capsys.readouterr().out == "", "nothing is printed"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_a_result_can_be_copied(again):
    result = train("atomic-cumsum", **TINY)
    assert again(result) == result
    assert again(result).test == result.test


def test_a_finished_run_is_not_run_again(monkeypatch):
    first = train("atomic-cumsum", **TINY)
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    again = train("atomic-cumsum", **TINY)
    assert again.was_there
    assert again.values == first.values
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before


def test_it_is_the_run_of_the_command():
    from longlens.cli import main

    result = train("atomic-cumsum", "las", lr=0.125, **TINY)
    main("train atomic-cumsum --lr 0.125 --recipe smoke --max-length 16 --sizes 32 8 8 --steps 2 --threads 1".split())
    assert [path.name for path in Path("runs/atomic-cumsum/las").iterdir()] == [result.folder.name]


def test_a_task_may_be_an_object():
    task = create_task("atomic-cumsum", max_length=16, sizes=(32, 8, 8))
    result = train(task, recipe="smoke", steps=2, threads=1)
    assert result.config.task is task
    assert result.folder == train("atomic-cumsum", **TINY).folder


def test_numbers_of_numpy_and_paths_are_fine(here):
    result = train(
        "atomic-cumsum", **TINY | {"lr": np.logspace(-3, -2, 3)[1], "seed": np.int64(3), "runs": here / "mine"}
    )
    assert result.folder.is_relative_to(here / "mine")
    assert result.config.training.seed == 3
    assert type(result.config.training.lr) is float


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: train("lisops"), "unknown task 'lisops'; did you mean 'listops'"),
        (lambda: train("listops", "lass"), "unknown mixer 'lass'"),
        (lambda: train(5), "task must be a text, got 5"),
        (lambda: train("listops", 5), "mixer must be a name or a class, got 5"),
        (lambda: compare("listops", [None]), "mixer must be a name or a class, got None"),
        (lambda: train("listops", lerning_rate=1), "there is no option 'lerning_rate'"),
        (lambda: train("listops", recpe="smoke"), "there is no option 'recpe'; did you mean 'recipe'"),
        (lambda: train("listops", runz="here"), "there is no option 'runz'; did you mean 'runs'"),
        (lambda: compare("listops", sedes=[1]), "there is no option 'sedes'; did you mean 'seeds'"),
        (lambda: compare("listops", seeds=0), r"seeds must be a list .*, as in seeds=\[0, 1, 2\], got 0"),
        (lambda: sweep("listops", grid={"lr": [1]}, seeds=3), r"seeds must be a list .*, got 3"),
        (lambda: compare("listops", "lass"), "unknown mixer 'lass'"),
        (lambda: train("listops", lr=True), "lr must be a number above 0, got True"),
        (lambda: train("listops", threads=0), "threads must be a whole number of at least 1 or none, got 0"),
        (lambda: train("listops", recipe="min"), "unknown recipe; did you mean 'mini'"),
        (lambda: train("listops", recipe="nowhere.toml"), "cannot read the file"),
        (lambda: train("listops", folder=""), "folder must be a path or none, got ''"),
        (lambda: train("text8", "las-bidirectional"), "needs a causal mixer"),
        (lambda: compare("listops", []), "mixers must name at least one mixer"),
        (lambda: train("listops", recipe=Path("nowhere.toml")), "cannot read the file"),
        (lambda: train("listops", recipe=None), "recipe must be a text, got None"),
        (lambda: compare("listops", ["las"], jobs=0), "jobs must be "),
        (lambda: compare("listops", ["las"], jobs="two"), "jobs must be a whole number of at least 1, got two"),
        (lambda: compare("listops", ["las"], engine="Ray"), "engine must be local or ray, got Ray"),
        (lambda: sweep("listops", grid={}), "grid must name at least one field"),
        (lambda: sweep("listops", grid={"lr": []}), "grid must name at least one field"),
        (lambda: sweep("listops", grid={"lr": 1e-3}), r"grid must give lr a list, as in .*, got 0.001"),
        (lambda: sweep("listops", grid={"mixer": "las"}), r"grid must give mixer a list, as in .*, got las"),
        (
            lambda: sweep("listops", grid={"lrr": [1]}),
            "grid names 'lrr', and there is no such field; did you mean 'lr'",
        ),
        (lambda: sweep("listops", grid={"seed": [1]}), "grid names the seed"),
        (lambda: load_run("nowhere"), "nowhere is not a run"),
        (lambda: load_run(""), "is not a run"),
    ],
)
def test_bad_input_is_a_value_error_and_writes_nothing(call, message, here):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, BadInput)
    assert "\n" not in str(caught.value)
    assert not list(here.iterdir())


def test_a_run_that_cannot_go_on_is_an_exception():
    with pytest.raises(RunError, match="try a smaller lr"):
        train("atomic-cumsum", **TINY | {"lr": 1e12, "steps": 5, "log_every": 1})


def test_a_layer_may_be_a_class():
    result = train("atomic-cumsum", RunningMean, scale=0.5, **TINY)
    assert result.mixer == "running-mean"
    assert result.config.mixer.options == {"scale": 0.5}
    assert isinstance(result.run.model().blocks[0].mixer, RunningMean)
    assert train("atomic-cumsum", RunningMean, scale=0.5, **TINY).was_there
    assert not train("atomic-cumsum", RunningMean, scale=0.25, **TINY).was_there


@pytest.fixture
def cell(monkeypatch):
    """Runs a cell of a notebook, which defines the class ``Mine``, and returns it."""
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)

    def call(options=""):
        text = """
class Mine(nn.Module):
    def __init__(self, d_model: int{}):
        super().__init__()

    def forward(self, x, *, mask=None):
        return x
"""
        exec(text.format(options), vars(module) | {"nn": nn}, vars(module))
        return module.Mine

    return call


def test_a_cell_that_is_run_again_trains_nothing_again(cell):
    first = train("atomic-cumsum", cell(), **TINY)
    again = train("atomic-cumsum", cell(), **TINY)
    assert (again.folder, again.was_there) == (first.folder, True)


def test_a_cell_that_defines_a_class_again_may_give_it_other_options(cell):
    train("atomic-cumsum", cell(), **TINY)
    changed = train("atomic-cumsum", cell(", power: int = 2"), power=3, **TINY)
    assert changed.config.mixer.options == {"power": 3}
    with pytest.raises(BadInput, match="power must be a whole number, got many"):
        sys.modules["notebook"].Mine(16, power="many")


def test_a_layer_of_ours_may_be_a_class_too():
    from longlens.mixers import S4D

    assert train("atomic-cumsum", S4D, **TINY).mixer == "s4d"


def test_a_class_without_what_a_layer_needs_is_refused():
    with pytest.raises(BadInput, match="forward must accept a mask"):
        train("atomic-cumsum", NoMask, **TINY)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("LaSAttention", "las"),
        ("S4", "s4"),
        ("S4D", "s4d"),
        ("MegaAttention", "mega"),
        ("CausalAttention", "transformer"),
    ],
)
def test_a_class_of_several_names_stands_for_its_own_defaults(layer, name):
    from longlens.api import _mixer_name

    assert _mixer_name(getattr(longlens.mixers, layer)) == name


@pytest.mark.parametrize("layer", sorted({longlens.mixers.find_mixer(n).layer_name for n in longlens.list_mixers()}))
def test_no_class_stands_for_a_name_that_means_something_else(layer):
    """By its class, a layer is what its signature says; where no name means that, a name is asked for."""
    from longlens.api import _mixer_name
    from longlens.mixers.registry import layer_options
    from longlens.options import REQUIRED

    kind = getattr(longlens.mixers, layer)
    names = [name for name in longlens.list_mixers() if longlens.mixers.find_mixer(name).layer_name == layer]
    own = {o.name: o.default for o in layer_options(kind, layer).values() if o.default is not REQUIRED}
    meant = {}
    for name in names:
        mixer = longlens.mixers.choose_mixer(name)
        values = {**mixer.options, **mixer.preset.fixed}
        meant[name] = {option: values[option] for option in own}
    fitting = [name for name in names if len(names) == 1 or meant[name] == own]
    if len(fitting) == 1:
        assert _mixer_name(kind) == fitting[0]
    else:
        with pytest.raises(BadInput, match="which has several: choose from "):
            _mixer_name(kind)


def test_a_class_of_a_function_is_refused():
    class Local(RunningMean):
        pass

    with pytest.raises(BadInput, match="got Local of a function: move it out of it"):
        train("atomic-cumsum", Local, **TINY)


def test_compare_in_this_process(in_process, capsys):
    table = compare("atomic-cumsum", ["las", "transformer", RunningMean], seeds=range(2), window=3, **TINY)
    assert isinstance(table, Comparison)
    assert capsys.readouterr().out == ""
    assert not table.failed
    assert [(row["mixer"], row["seed"]) for row in table.rows] == [
        (name, seed) for name in ("las", "transformer", "running-mean") for seed in (0, 1)
    ]
    assert table.rows[0]["mixer.window"] == 3
    assert {"lr", "model.width", "folder", "test", "valid", "parameters", "error"} <= table.rows[0].keys()
    assert " is better than " in table.verdict or " are equal" in table.verdict
    frame = table.to_pandas()
    assert len(frame) == 6
    assert list(frame.groupby("mixer")["test"].mean().index) == ["las", "running-mean", "transformer"]
    lines = table.to_markdown().splitlines()
    assert lines[0].startswith("| mixer | test |")
    assert len(lines) == 2 + 3
    assert "las (2 seeds)" in lines[2]
    assert table.to_latex().startswith(r"\begin{tabular}{l")
    assert table.to_latex().count(r"$\pm$") >= 3
    cells = list(csv.reader(io.StringIO(table.to_csv())))
    assert cells[0][:2] == ["mixer", "test"]
    assert len(cells) == 4
    assert table.verdict in str(table)
    assert table._repr_markdown_() == str(table)
    again = compare("atomic-cumsum", ["las", "transformer", RunningMean], seeds=range(2), window=3, **TINY)
    assert all(outcome.was_there for outcome in again.outcomes)
    assert again.to_csv() == table.to_csv()
    (alone,) = compare("atomic-cumsum", "las", seeds=[1], window=3, **TINY).outcomes
    assert alone.was_there


@pytest.mark.slow
def test_compare_in_processes(capfd):
    table = compare("atomic-cumsum", ["las", "transformer"], jobs=2, **TINY)
    assert not table.failed
    assert len(table.rows) == 2
    assert capfd.readouterr().out == "", "nothing is printed, by the runs neither"
    assert train("atomic-cumsum", "transformer", **TINY).was_there


@pytest.mark.slow
def test_compare_works_where_layers_of_the_main_file_are(tmp_path):
    """As in a notebook: no other process can import them, so that all runs are in this one."""
    (tmp_path / "main.py").write_text(
        """
from torch import nn
from longlens import compare, train

class Mine(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x, *, mask=None):
        return self.linear(x)

if __name__ == "__main__":
    small = {"recipe": "smoke", "task.max_length": 16, "task.sizes": [32, 8, 8], "steps": 2, "threads": 1}
    assert train("atomic-cumsum", Mine, **small).mixer == "mine"
    table = compare("atomic-cumsum", [Mine, "las"], **small)
    assert not table.failed and len(table.rows) == 2 and table.outcomes[0].was_there
    try:
        compare("atomic-cumsum", [Mine, "las"], jobs=2, **small)
    except ValueError as error:
        assert "runs in this process only: put it into a module" in str(error)
    else:
        raise AssertionError("accepted")
"""
    )
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_compare_works_where_layers_and_tasks_of_a_module_are(tmp_path):
    """Other processes import the module, also from another folder, though no LONGLENS_IMPORT names it."""
    (tmp_path / "mine.py").write_text(
        """
from torch import nn
from longlens.mixers.registry import register
from longlens.tasks.atomic import CumSum
from longlens.tasks.base import register as register_task

class Mine(nn.Module):
    def __init__(self, d_model: int, twice: bool = False):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x, *, mask=None):
        return self.linear(x)

@register("named")
class Named(Mine):
    pass

@register_task("my-sums")
class MySums(CumSum):
    pass

class Unnamed(CumSum):
    pass
"""
    )
    (tmp_path / "main.py").write_text(
        """
from longlens import compare
from longlens.mixers.registry import register
from longlens.mixers import LaSAttention
from longlens.tasks.base import register as register_task
from mine import Mine, Unnamed
register("mine-twice", fixed={"twice": True})(Mine)
register("las-far", tolerance=1e-2)(LaSAttention)
register_task("late-sums")(Unnamed)

small = {"recipe": "smoke", "task.max_length": 16, "task.sizes": [32, 8, 8], "steps": 2, "threads": 1}
for task, mixers in (("my-sums", [Mine, "named"]), ("late-sums", ["las-far"])):
    table = compare(task, mixers, **small)
    assert not table.failed, table.failed
"""
    )
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "mine.py").write_text("raise RuntimeError('another module of this name')")
    command = [sys.executable, tmp_path / "main.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Unnamed(CumSum):
    """A task that no other process could find by its name, which is that of its base."""


def test_a_task_of_a_class_without_a_name_runs_in_this_process():
    small = {key: value for key, value in TINY.items() if not key.startswith("task.")}
    task = Unnamed(max_length=16, sizes=(32, 8, 8))
    (outcome,) = compare(task, ["las"], **small).outcomes
    assert outcome.error is None
    assert type(outcome.config.task) is Unnamed
    with pytest.raises(BadInput, match="runs in this process only: put it into a module, with a name"):
        compare(task, ["las"], jobs=2, **small)


@pytest.mark.slow
def test_a_module_that_starts_runs_when_it_is_imported_starts_no_more(tmp_path):
    (tmp_path / "mine.py").write_text(
        """
from torch import nn
from longlens import compare

class Mine(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()

    def forward(self, x, *, mask=None):
        return x

table = compare("atomic-cumsum", [Mine], recipe="smoke", steps=2, threads=1)
assert "starts runs when it is imported" in table.failed[0].error, table.failed
"""
    )
    command = [sys.executable, "-c", "import mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_training_leaves_the_callers_random_numbers():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    train("atomic-cumsum", **TINY)
    assert torch.equal(torch.rand(3), wanted)


def test_a_run_that_fails_stops_no_other(in_process):
    table = sweep("atomic-cumsum", grid={"lr": [1e-3, 1e12]}, **TINY | {"steps": 5, "log_every": 1})
    (failed,) = table.failed
    assert failed.config.training.lr == 1e12
    assert "try a smaller lr" in failed.error
    assert failed.folder.parent == table.outcomes[0].folder.parent
    assert [row["error"] is None for row in table.rows] == [True, False]
    assert "failed" in table.to_markdown()


def test_a_run_whose_folder_is_damaged_hides_no_other(in_process):
    (damaged,) = compare("atomic-cumsum", ["las"], **TINY).outcomes
    (damaged.folder / "result.json").write_text("{}")
    table = compare("atomic-cumsum", ["las", "s4d"], **TINY)
    assert [row["error"] is None for row in table.rows] == [False, True]
    assert "result.json is not as it was written" in table.rows[0]["error"]
    assert table.failed[0].folder == damaged.folder
    with pytest.raises(BadInput, match="folder is for a single run"):
        compare("atomic-cumsum", ["las", "s4d"], folder="one", **TINY)


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
@pytest.mark.parametrize("function", [train, compare])
def test_logs_that_cannot_be_written_are_refused_before_anything_is(function, package, here, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    options = TINY | {package: "project" if package == "wandb" else True}
    with pytest.raises(BadInput, match=rf"{package} is not installed: pip install 'longlens\[{package}\]'"):
        function("atomic-cumsum", **options)
    assert not list(here.iterdir())


def test_a_sweep_is_chosen_on_validation(in_process):
    table = sweep("atomic-cumsum", grid={"lr": [1e-3, 1e-1], "mixer.window": [3, 5]}, **TINY)
    assert len(table.rows) == 4
    assert table.verdict.startswith("best on validation: las ")
    best = max(table.rows, key=lambda row: row["valid"])
    assert f"lr={best['lr']}" in table.verdict


def test_a_sweep_over_mixers(in_process):
    table = sweep("atomic-cumsum", grid={"mixer": ["las", "s4d"], "lr": [1e-3]}, **TINY)
    assert [row["mixer"] for row in table.rows] == ["las", "s4d"]


def test_a_sweep_of_a_class(in_process):
    table = sweep("atomic-cumsum", RunningMean, grid={"lr": [1e-3]}, **TINY)
    assert [row["mixer"] for row in table.rows] == ["running-mean"]


def test_a_sweep_is_a_loop_too():
    results = [train("atomic-cumsum", lr=lr, **TINY) for lr in np.logspace(-3, -1, 3)]
    best = max(results, key=lambda result: result.valid)
    assert len({result.folder for result in results}) == 3
    assert best in results


def test_load_run(here):
    result = train("atomic-cumsum", "s4d", **TINY | {"steps": 4, "log_every": 2, "evaluate_every": 2})
    run = load_run(str(result.folder))
    assert run.config.to_json() == result.config.to_json()
    assert run.result == dict(result.values)
    assert [(line["split"], line["step"]) for line in run.metrics] == [
        ("train", 2),
        ("valid", 2),
        ("train", 4),
        ("valid", 4),
    ]
    assert all(np.isfinite(line["loss"]) for line in run.metrics)
    assert run.evaluate().value == pytest.approx(result.test)
    assert run.evaluate("valid", "last").step == 4
    best, last = run.model("best"), run.model("last")
    assert isinstance(best, nn.Module)
    assert not best.training
    assert best.state_dict().keys() == last.state_dict().keys()
    assert sum(p.numel() for p in best.parameters()) == result.parameters
    assert run.model("4").state_dict().keys() == best.state_dict().keys()
    for wrong in ("7", "bset", ""):
        with pytest.raises((BadInput, RunError)):
            run.model(wrong)


def test_an_unfinished_run_can_be_looked_at():
    folder = train("atomic-cumsum", **TINY).folder
    (folder / "result.json").unlink()
    run = load_run(folder)
    assert run.result is None
    assert isinstance(run.model("last"), nn.Module)
    assert run.metrics


def test_predict_numbers():
    run = train("atomic-cumsum", **TINY).run
    test = run.config.task.split("test")
    samples = test.take(np.arange(len(test)))
    found = run.predict(list(samples.inputs))
    assert found.shape == samples.targets.shape
    errors = ((found - samples.targets) ** 2).sum() / ((samples.targets - samples.targets.mean()) ** 2).sum()
    assert 1 - errors == pytest.approx(run.result["test"], abs=1e-3)
    with pytest.raises(BadInput, match="probabilities must be False"):
        run.predict(list(samples.inputs), probabilities=True)


def test_predict_classes():
    run = train("listops", recipe="smoke", **LISTOPS).run
    test = run.config.task.split("test")
    samples = test.take(np.arange(len(test)))
    rows = [row[:length] for row, length in zip(samples.inputs, samples.lengths, strict=True)]
    found = run.predict(rows)
    assert found.shape == (16,)
    assert (found == samples.targets).mean() == pytest.approx(run.result["test"])
    chances = run.predict(rows, probabilities=True, batch_size=5)
    assert chances.shape == (16, 10)
    np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(chances.argmax(axis=1), found)
    np.testing.assert_array_equal(run.predict([rows[3]]), found[3:4])
    assert run.predict([]).size == 0
    for wrong, message in (
        ([[99]], "must have tokens from 0 to 17"),
        ([[]], "must be a sequence"),
        ([["a"]], "numbers"),
    ):
        with pytest.raises(BadInput, match=message):
            run.predict(wrong)


def test_predict_the_next_token(here):
    (here / "there").mkdir()
    (here / "there" / "text8").write_text("the cat sat on the mat and " * 1000)
    task = create_task("text8", stand_in=True, max_length=16)
    task.prepare(here / "there")
    run = train(task, "las", recipe="smoke", steps=3, threads=1).run
    inputs = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found = run.predict(inputs)
    assert found.shape == (2,)
    with torch.no_grad():
        for row, token in zip(inputs, found, strict=True):
            assert run.model()(torch.tensor([row]))[0, -1].argmax() == token
    assert run.predict(inputs, probabilities=True).shape == (2, 27)
    assert run.evaluate().change_by_later_tokens == 0


def test_ctrl_c_saves_and_the_same_call_resumes(monkeypatch):
    """As in a notebook: an exception, the signals as before, and no folder that is locked."""
    monkeypatch.setattr(Stopping, "calls", 0)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    small = TINY | {"steps": 6, "depth": 1}
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        train("atomic-cumsum", Stopping, **small)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    result = train("atomic-cumsum", Stopping, **small)
    assert not result.was_there
    assert result.steps == 6
    undisturbed = train("atomic-cumsum", Stopping, **small, runs="others")
    names = ("test", "test_last", "valid", "tokens")
    assert [result.values[name] for name in names] == [undisturbed.values[name] for name in names]


def test_it_can_be_called_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(train("atomic-cumsum", **TINY)))
    thread.start()
    thread.join(120)
    assert [result.steps for result in found] == [2]
    assert train("atomic-cumsum", **TINY).was_there


def test_the_program_around_it_stays_as_it_was():
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    train("atomic-cumsum", **TINY)
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_default_dtype()) == before
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), wanted)


def test_public_names():
    for name in ("train", "compare", "sweep", "load_run", "Result", "Comparison", "Run"):
        assert name in longlens.__all__
