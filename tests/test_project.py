"""What the project says of itself is true: names, numbers and versions agree."""

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import longlens

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_readme_tasks_are_there():
    named = set(re.findall(r"`([a-z0-9-]+)`", README))
    for name in longlens.list_tasks():
        assert name in named or name.removeprefix("atomic") in named


def test_every_mixer_is_documented():
    named = set(re.findall(r"`([a-z0-9-]+)`", (ROOT / "docs" / "zoo.md").read_text()))
    assert not set(longlens.list_mixers()) - named


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == longlens.__version__
    assert f"version: {longlens.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {_plain(re.match(r"[\w-]+", line)[0]) for line in lines} | {"longlens"}
    distributions = metadata.packages_distributions()
    for path in (ROOT / "longlens").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            for name in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names:
                assert declared & set(map(_plain, distributions.get(name, [name]))), f"{path} imports {name}"


def _plain(name):
    return name.lower().replace("_", "-")


def test_every_public_name_is_there():
    for name in longlens.__all__:
        assert getattr(longlens, name) is not None
    with pytest.raises(AttributeError, match="module 'longlens' has no attribute 'nothing'"):
        _ = longlens.nothing


def test_the_format_of_a_recipe_is_documented(tmp_path):
    """The example of docs/recipes.md is one."""
    from longlens.training.config import load_recipe

    page = (ROOT / "docs" / "recipes.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "my.toml").write_text(example)
    config = load_recipe(str(tmp_path / "my.toml"), "listops", ["las-chunk"]).resolve("listops", "las-chunk")
    assert config.mixer.options["chunk_size"] == 16
    for section in ("about", "tasks", "task", "model", "training", "mixer"):
        assert f"`{section}`" in page or f"`[{section}]`" in page
