"""Fixtures: a cache folder of its own for each test, and the real data of ../shared where it is."""

import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "home"
    monkeypatch.setenv("LONGLENS_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A function that unpacks a real data set, once, and gives its folder; skips the test where there is none."""
    folder = tmp_path_factory.mktemp("real")

    def unpacked(name: str) -> Path:
        if not (SHARED / "unpack").exists():
            pytest.skip(f"needs the real data in {SHARED.parent.name}/{SHARED.name} beside the repository")
        if not (folder / name).exists():
            subprocess.run([sys.executable, SHARED / "unpack", folder, name], check=True, capture_output=True)
        return folder / name

    return unpacked


@pytest.fixture(scope="session")
def real_home(tmp_path_factory) -> Path:
    """A cache folder that keeps the prepared real sets for the whole session."""
    return tmp_path_factory.mktemp("real_home")
