"""What the project says of itself is true: the README's snippets run, and versions agree."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import longlens

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_has_snippets():
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_readme_snippets_run(snippet, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path))
    exec(compile(snippet, "README.md", "exec"), {})


def test_readme_commands_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"`?make (\w+)`?", README):
        assert target in targets


def test_readme_tasks_are_there():
    named = set(re.findall(r"`([a-z0-9-]+)`", README))
    for name in longlens.list_tasks():
        assert name in named or name.removeprefix("atomic") in named


@pytest.mark.parametrize("page", ["README.md", "docs/zoo.md"])
def test_every_mixer_is_documented(page):
    named = set(re.findall(r"`([a-z0-9-]+)`", (ROOT / page).read_text()))
    assert not set(longlens.list_mixers()) - named
    assert page != "README.md" or f"{len(longlens.list_mixers())} of them" in README


def test_the_layer_of_the_contributing_guide_trains(tmp_path):
    snippet = re.search(r"   ```python\n(.*?)   ```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    assert snippet is not None
    (tmp_path / "average.py").write_text(textwrap.dedent(snippet[1]))
    command = ["train", "atomic-cumsum", "--recipe", "smoke", "--mixer", "average", "--steps", "2"]
    environment = os.environ | {"LONGLENS_IMPORT": "average.py", "LONGLENS_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "longlens", *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.glob("runs/atomic-cumsum/average/*/result.json"))


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == longlens.__version__
    assert f"version: {longlens.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_doctests():
    import doctest

    import longlens.ops.decay
    import longlens.ops.smoothing

    for module in (longlens.ops.decay, longlens.ops.smoothing):
        result = doctest.testmod(module, extraglobs={"torch": __import__("torch")})
        assert result.attempted > 0
        assert result.failed == 0
