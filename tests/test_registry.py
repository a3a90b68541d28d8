"""The source that a result of a user's layer belongs to: whatever decides what the layer computes."""

import linecache
import os
import subprocess
import sys
import types
from importlib import import_module

import pytest

import longlens.mixers
from longlens.registry import foreign_source

LAYER = """
class Layer:
    def forward(self, x, *, mask=None):
        return mix(x)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files from which modules can be imported: ``write({"mine/ops.py": "def mix(x): return x"})``."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def call(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    yield call
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture(params=[True, False], ids=["notebook", "prompt"])
def cell(request, monkeypatch):
    """Runs a cell of a notebook, or of a prompt, which has no source; returns the class ``Layer``."""
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    names = (f"<cell {number}>" for number in range(99))

    def call(text):
        name = next(names)
        if request.param:
            monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        exec(compile(text, name, "exec"), vars(module))
        return vars(module).get("Layer")

    return call


def test_a_file_that_imports_nothing_of_the_user_is_its_source(write):
    """As it always was, so that finished runs are found."""
    text = f"import json\nfrom torch import nn\nfrom longlens.mixers import register\n{LAYER}"
    write({"mine.py": text})
    assert foreign_source(import_module("mine").Layer) == text


def test_a_layer_of_the_package_has_none():
    assert {foreign_source(longlens.mixers.find_mixer(name).layer) for name in longlens.mixers.list_mixers()} == {""}


@pytest.mark.parametrize(
    "line",
    [
        "from helper import mix",
        "from helper import *",
        "import helper",
        "def mix(x):\n    from helper import mix\n    return mix(x)",
        "from between import mix",
        "try:\n    from . import mix\nexcept ImportError:\n    from helper import mix",
    ],
    ids=["name", "all", "module", "later", "by another", "without its package"],
)
def test_an_edit_of_a_module_that_the_file_imports_is_another_layer(write, line):
    """The two may import each other."""
    helper = "def mix(x): return x\nimport between"
    write({"mine.py": line + LAYER, "helper.py": helper, "between.py": "import helper\nmix = helper.mix"})
    layer = import_module("mine").Layer
    before = foreign_source(layer)
    assert before.startswith(line + LAYER)
    write({"helper.py": helper.replace("x\n", "2 * x\n")})
    assert foreign_source(layer) == before.replace("return x\n", "return 2 * x\n") != before


def test_an_edit_of_a_neighbor_in_a_package_is_another_layer(write):
    write(
        {
            "house/__init__.py": "",
            "house/ops.py": "def mix(x): return x",
            "house/mine.py": f"from .ops import mix{LAYER}",
        }
    )
    layer = import_module("house.mine").Layer
    before = foreign_source(layer)
    write({"house/ops.py": "def mix(x): return 2 * x"})
    assert foreign_source(layer) != before


MIX = "def mix(x): return x.{}(1)\n"
METHOD = "    def forward(self, x, *, mask=None): return x.{}(1)\n"


@pytest.mark.parametrize(
    "cells",
    [
        ["class Layer:\n" + METHOD],
        [LAYER, MIX],
        [LAYER, "def mix(x): return inner(x)", "def inner(x): return [mix, x.{}(1)]"],
        [LAYER, "def mix(x): return (lambda y: y.{}(1))(x)"],
        [LAYER, "class mix:\n    def __init__(self, x): x.{}(1)\nmix.itself = mix"],
        ["class Base:\n" + METHOD + "class Layer(Base): pass"],
        ["class Layer:\n    @property\n    def rate(self): return self.{}"],
        ["class Layer:\n    kind = '{}'"],
        ["class Layer:\n    def forward(self, x, *, mask=None): return x ** kind", "kind = '{}'"],
    ],
    ids=["method", "function", "two functions", "lambda", "class", "base", "property", "attribute", "value"],
)
def test_an_edit_of_what_a_layer_of_a_notebook_uses_is_another_layer(cell, cells):
    found = []
    for word in ("cumprod", "argsort", "cumprod"):
        for text in cells:
            layer = cell(text.format(word))
        found.append(foreign_source(layer))
    assert found[0]
    assert found[0] == found[2] != found[1]


def test_what_a_layer_of_a_notebook_does_not_use_changes_nothing(cell):
    layer = cell("class Layer:\n    def forward(self, x, *, mask=None): return self.scale * x\nscale = 1\n")
    before = foreign_source(layer)
    cell("scale = 2\ndef mix(x): return x")
    assert foreign_source(layer) == before


@pytest.mark.parametrize("line", ["from helper import mix", "import helper\nmix = helper.mix"])
def test_an_edit_of_a_module_that_a_notebook_imports_is_another_layer(cell, write, line):
    write({"helper.py": "def mix(x): return x"})
    layer = cell(line + LAYER)
    before = foreign_source(layer)
    write({"helper.py": "def mix(x): return 2 * x"})
    assert foreign_source(layer) != before


LAYER_OF_A_SCRIPT = """
from longlens.registry import foreign_source

def mix(x): return x

class Layer:
    def forward(self, x, kind="a"): return mix(x) if kind in {"a", "b", "c", "d"} else x

print(foreign_source(Layer))
"""


@pytest.mark.parametrize("script", [["-"], ["-c", LAYER_OF_A_SCRIPT]], ids=["stdin", "command"])
def test_a_layer_of_a_script_without_a_file_is_the_same_in_each_process(script):
    found = {
        subprocess.run(
            [sys.executable, *script],
            input=LAYER_OF_A_SCRIPT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(found) == 1
    assert "'d'" in found.pop()
