"""The house is in order: rooms know only those below, options are declared once, and nobody waits for torch in vain."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longlens

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "longlens").rglob("*.py"))
MODULES = [
    found.name for found in pkgutil.walk_packages(longlens.__path__, "longlens.") if "__main__" not in found.name
]


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported_by(code: str) -> set[str]:
    """The modules that are there after some code, in a process of its own."""
    code = f"import sys\n{code}\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_longlens_brings_nothing():
    modules = imported_by("import longlens; dir(longlens); longlens.__version__; longlens.__all__")
    assert not modules & {"torch", "rich", "numpy", "pydantic", "matplotlib"}
    assert {name for name in modules if name.startswith("longlens")} == {"longlens"}


@pytest.mark.slow
def test_a_layer_brings_nothing_but_torch():
    modules = imported_by(
        "import longlens; longlens.las_attention, longlens.LaSAttention; 'las_attention' in dir(longlens)"
    )
    assert "torch" in modules
    assert not modules & {"matplotlib", "rich", "pandas", "PIL"}


@pytest.mark.slow
def test_the_names_of_tasks_and_mixers_bring_no_torch():
    code = "import longlens; longlens.list_tasks(); longlens.list_mixers(); longlens.create_task('listops')"
    assert "torch" not in imported_by(code)


def test_the_api_itself_brings_no_torch():
    assert "torch" not in imported_by("from longlens import train, compare, sweep, load_run")


def test_no_option_of_a_layer_is_declared_twice(house):
    found = house.options_declared_twice(ROOT)
    assert found["declared twice"] == 0
    assert found["options of layers"] > 100


def test_an_option_that_is_declared_twice_would_be_noticed(house, tmp_path):
    (tmp_path / "longlens" / "mixers").mkdir(parents=True)
    (tmp_path / "longlens" / "mixers" / "x.py").write_text(
        "class X:\n    def __init__(self, d_model, taps=8): ...\n\n"
        "@register('x')\nclass XConfig:\n    taps: int = 8\n    summary: ClassVar[str] = ''\n"
    )
    assert house.options_declared_twice(tmp_path) == {"options of layers": 1, "declared twice": 1}


@pytest.fixture(scope="module")
def traced(house):
    return house.trace(ROOT)


@pytest.mark.slow
def test_a_command_looks_everything_up_once(traced):
    assert traced["create_task"] == traced["load_recipe"] == 1


@pytest.mark.slow
def test_a_command_runs_few_files(traced):
    assert traced["files run"] <= 31
    assert traced["files imported"] <= 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_read_in_one_sitting(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    numbers = r"[-+.e\d\s,()]*"
    for line in text.splitlines():
        if "# fmt: skip" in line:
            assert re.fullmatch(numbers, line.partition("#")[0]), "only tables of numbers are not formatted"


@pytest.mark.parametrize("path", sorted((ROOT / "longlens" / "mixers").glob("*.py")), ids=lambda path: path.stem)
def test_no_layer_imports_another(path):
    layers = {name.module.rpartition(".")[2] for name in map(longlens.mixers.find_mixer, longlens.list_mixers())}
    found = set(re.findall(r"^(?:from|import) longlens\.mixers\.(\w+)", path.read_text(), flags=re.MULTILINE))
    assert not found & layers


def test_every_room_knows_only_those_below():
    """What ``make check`` enforces."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    pytest.importorskip("ray") if name.endswith(".ray") else None
    pytest.importorskip("transformers") if ".huggingface" in name else None
    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": importlib.import_module("torch")})
    assert result.failed == 0


def test_there_are_doctests():
    attempted = sum(
        len(test.examples)
        for name in MODULES
        if "longlens.ops" in name
        for test in _tests(importlib.import_module(name))
    )
    assert attempted >= 3


def _tests(module):
    return doctest.DocTestFinder().find(module)


@pytest.mark.parametrize("name", ["train", "compare", "sweep", "load_run"])
def test_what_is_public_is_described(name):
    assert len((getattr(longlens, name).__doc__ or "").splitlines()) >= 1


def test_the_library_neither_prints_nor_exits():
    """That is for the commands; messages of a run go to stderr."""
    for path in SOURCES:
        if "cli" in path.parts or path.name == "__main__.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"(?<![\w.])print\(", line):
                where = f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
                assert "file=" in line, where
            assert "raise SystemExit" not in line, f"{path.relative_to(ROOT)}:{number}"
    exits = [path.name for path in SOURCES if "sys.exit(" in path.read_text() and "cli" not in path.parts]
    assert set(exits) <= {"generate.py", "many.py"}, "only the main function of a process of its own ends it"
