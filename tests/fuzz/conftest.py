"""What all cases share; how many there were is said at the end."""

import os
from collections import Counter
from unittest import mock

import pytest
from fuzz import cases
from fuzz.originals import WholeRuns, WholeSets

total: Counter[str] = Counter()  # of all processes of pytest-xdist


@pytest.fixture(scope="session", autouse=True)
def _quick():
    """What does not matter here and takes long: bringing files to the disk, asking git, choosing threads."""
    import torch

    import longlens.training.loop  # noqa: F401 (before the clock of a case runs)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        mock.patch("os.fsync"),
        mock.patch("longlens.progress.EVERY", 1e9),  # seconds, so that a slow machine says no more than a fast one
        mock.patch("longlens.training.machine._commit", return_value="0123456789ab"),
        mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}),
    ):
        os.environ.pop("LONGLENS_IMPORT", None)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def whole_runs(_quick, tmp_path_factory) -> WholeRuns:
    return WholeRuns(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def whole_sets(_quick, tmp_path_factory) -> WholeSets:
    return WholeSets(tmp_path_factory.mktemp("sets"))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz"] = dict(cases.counts)
    else:
        total.update(cases.counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    total.update(getattr(node, "workeroutput", {}).get("fuzz", {}))


def pytest_terminal_summary(terminalreporter):
    if total:
        kinds = {kind: count for kind, count in sorted(total.items()) if not kind.startswith("code ")}
        codes = [f"{count:,} with {kind}" for kind, count in sorted(total.items()) if kind not in kinds]
        by_kind = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        terminalreporter.write_line(f"{sum(kinds.values()):,} cases of the fuzz: {by_kind}")
        terminalreporter.write_line(f"{total.total() - sum(kinds.values()):,} commands ended: {', '.join(codes)}")
