"""Layers and tasks of a user, by LONGLENS_IMPORT: a bug of theirs keeps its traceback, bad input never has one."""

import re

import pytest

LAYER = """
from torch import nn
from longlens.mixers import register

@register("mine", summary="mine")
class Mine(nn.Module):
    def __init__(self, d_model: int, *, scale: float = 1.0):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x, *, mask=None):
        {body}
"""
LIGHT = LAYER.replace("from torch import nn\n", "").replace("(nn.Module)", "")  # nothing of torch to wait for
TASK = """
from dataclasses import dataclass
from typing import ClassVar
from longlens.tasks.base import Task, register

@register("parity")
@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    origin: ClassVar[str] = "generated"
    head: ClassVar[str] = "classify"
    metric: ClassVar[str] = "accuracy"
    spec = load = None
"""


@pytest.fixture
def added(shell, here):
    """A command with a file, or a module, of this source."""

    def call(source, *arguments, module=False):
        (here / "mine.py").write_text(source)
        variables = {"LONGLENS_IMPORT": "mine", "PYTHONPATH": str(here)} if module else {"LONGLENS_IMPORT": "mine.py"}
        return shell(*arguments, **variables)

    return call


LIST = ("list", "mixers", "mine")


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("raise ValueError('my bug')\n", "ValueError: my bug"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0\n", "ZeroDivisionError"),
    ],
    ids=lambda text: text.split()[0],
)
def test_a_bug_in_the_file_keeps_its_traceback_after_a_line_that_names_the_file(added, source, error, module):
    said = added(source, *LIST, module=module)
    first, *rest = said.err.splitlines()
    assert said.code == 1
    assert first.startswith("longlens: LONGLENS_IMPORT names ")
    assert "mine" in first
    assert rest[0] == "Traceback (most recent call last):"
    assert "mine.py" in said.err
    assert error in rest[-1]


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
@pytest.mark.parametrize(
    "arguments",
    [LIST, ("check", "las"), ("train", "listops"), ("bench", "layers", "--mixers", "las")],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_is_taken_is_one_line(added, arguments, module):
    said = added(LIGHT.replace('"mine"', '"las"').format(body="return x"), *arguments, module=module)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert "there is a mixer 'las' already: choose another name" in said.err
    assert "mine" in said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LIGHT.replace("*, mask=None", "y=None").format(body="return x"), "forward must accept a mask"),
        (LIGHT.replace("= 1.0", "").format(body="return x"), "has no default for its option 'scale': give it one"),
        (
            LIGHT.replace("d_model: int, *, scale: float = 1.0", "").format(body="return x"),
            "must be its width, d_model",
        ),
        (TASK, "task 'parity' must say its summary"),
    ],
    ids=["mask", "default", "width", "summary"],
)
def test_what_a_layer_or_task_lacks_is_one_line(added, source, message):
    said = added(source, *LIST)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert message in said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere.py", "nowhere.py, and there is no such file"),
        ("no_such_module", "no_such_module, and there is no such module"),
        ("no_such.module", "no_such.module, and there is no such module"),
    ],
)
def test_a_file_that_is_not_there_is_one_line(shell, value, message):
    said = shell(*LIST, LONGLENS_IMPORT=value)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert "LONGLENS_IMPORT names " in said.err
    assert message in said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "module"), [("ValueError", False), ("ValueError", True), ("TypeError", True), ("OSError", False)]
)
def test_a_bug_in_a_layer_keeps_its_traceback(added, tiny, error, module):
    source = LAYER.format(body=f"raise {error}('my bug')")
    said = added(source, "train", "atomic-cumsum", "--mixer", "mine", *tiny, module=module)
    assert said.code == 1
    assert "Traceback (most recent call last):" in said.err
    assert "mine.py" in said.err
    assert said.err.splitlines()[-1].startswith(f"{error}: ")


@pytest.mark.slow
def test_a_bug_in_a_layer_is_told_by_compare(added, here, tiny):
    source = LAYER.format(body="raise ValueError('my bug')")
    said = added(source, "compare", "atomic-cumsum", "--mixers", "mine", *tiny)
    assert said.code == 1
    assert "mine, seed 0 failed: ValueError: my bug" in said.words
    (log,) = here.glob("runs/*/mine/*/log.txt")
    assert "mine.py" in log.read_text() + said.err
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_a_layer_that_returns_another_shape_is_told_what_it_must_return(added, tiny):
    said = added(LAYER.format(body="return x[:, :1]"), "train", "atomic-cumsum", "--mixer", "mine", *tiny)
    assert said.code == 2
    assert "must accept x of shape (batch, length, width) and return a tensor of the same shape" in said.err
    assert said.err.rstrip().endswith("got shape (16, 1, 16)")


@pytest.mark.slow
def test_a_layer_of_your_own_is_listed_described_and_trained(added, here, tiny):
    source = LAYER.format(body="return self.linear(x)")
    described = added(source, *LIST)
    assert "scale" in described.out
    assert described.out.rstrip().endswith("in Python: create_mixer('mine', d_model=…)"), "it is not of longlens.mixers"
    assert "│ mine " in added(source, "list", "mixers").out
    assert "--mixer.scale NUMBER" in added(source, "train", "listops", "--mixer", "mine", "--help").words
    said = added(source, "train", "atomic-cumsum", "--mixer", "mine", "--mixer.scale", "2", *tiny)
    assert said.code == 0, said.err
    assert list(here.glob("runs/atomic-cumsum/mine/*/result.json"))


@pytest.mark.slow
def test_a_layer_whose_source_changes_is_another_one(added, shell, here, tiny):
    source, train = LAYER.format(body="return self.linear(x)"), ("train", "atomic-cumsum", "--mixer", "mine", *tiny)
    assert added(source, *train, "--folder", "runs/a/mine/one").code == 0
    assert "has changed" not in added(source, "export", "runs/a/mine/one", "new", "--to", "torch-export").err
    changed = source.replace("self.linear(x)", "-self.linear(x)")
    said = added(changed, "export", "runs/a/mine/one", "other", "--to", "torch-export")
    assert "the source of the layer 'mine' has changed since runs/a/mine/one was trained: " in said.err
    assert added(changed, *train, "--folder", "runs/a/mine/two").code == 0
    assert len(re.findall(r"source=\w{8}", added(changed, "list", "runs").words)) == 2
    assert "2 runs on one page" in added(changed, "report", "runs").words
    listed = shell("list", "runs")
    assert "cannot be read" in listed.words
    assert "the mixer 'mine' is not known here; if it is your own, name its module in LONGLENS_IMPORT" in listed.words


def test_a_flag_that_a_command_and_a_task_have_is_the_commands(added):
    source = TASK.replace(
        "spec = load = None", 'summary: ClassVar[str] = "parity"\n    count: int = 3\n    spec = load = None'
    )
    said = added(source, "data", "show", "parity", "--help")
    assert said.code == 0, said.err
    assert {"--count", "--task.count"} <= {*said.out.split()}
