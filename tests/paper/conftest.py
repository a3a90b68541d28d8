"""Studies run in this process: the same training, without the start of a process for each run."""

import pytest
from support.data import home, real_data, real_home  # noqa: F401 (fixtures)

from longlens.api import _run_here
from longlens.paper import run as paper_run


@pytest.fixture
def here(monkeypatch):
    """The configs that were run, in this process."""
    ran = []

    def run_many(configs, runtime, *, ended, **_):
        for config in configs:
            ran.append(config)
            ended(_run_here(config, runtime))

    monkeypatch.setattr(paper_run, "run_many", run_many)
    return ran
