"""Commands as a person gives them: in this process, in an empty folder; or in a shell."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.data import home, real_data  # noqa: F401 (fixtures)

from longlens.cli import main


class Said(NamedTuple):
    """How a command ended, and what it printed."""

    code: int | str | None
    out: str
    err: str

    @property
    def words(self) -> str:
        """The output without the frames of tables and the breaks of lines."""
        return " ".join(self.out.translate(str.maketrans("│┃", "  ")).split())


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, in which the command is given."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NO_COLOR", "1")
    return folder


@pytest.fixture
def longlens(here, monkeypatch, capsys):
    """``longlens("list", "runs")``: a command in this process, on a terminal of so many columns."""

    def call(*arguments: object, columns: int = 120) -> Said:
        monkeypatch.setenv("COLUMNS", str(columns))
        code: int | str | None = 0
        capsys.readouterr()
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code or 0
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def shell(here):
    """The same in a process of its own, with variables of the environment."""

    def call(*arguments: object, **variables: str) -> Said:
        command = [sys.executable, "-m", "longlens", *map(str, arguments)]
        environment = os.environ | {"COLUMNS": "120"} | variables
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return Said(done.returncode, done.stdout, done.stderr)

    return call


TINY = "--recipe smoke --task.max-length 16 --task.sizes 32 8 8 --steps 2 --threads 1".split()


@pytest.fixture
def tiny() -> list[str]:
    """Flags with which a run on an atomic task takes a moment."""
    return TINY
