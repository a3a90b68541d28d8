import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import what is in tests/support
pytest_plugins = ["support.runs", "support.page"]

settings.register_profile("longlens", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("longlens")


def pytest_collection_modifyitems(items):
    """What takes long comes first, so that no process of pytest-xdist waits for another in the end."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("slow", "distributed", "faults"))))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def small_options():
    """``small_options("las")``: options of a mixer with which each of its parts shows at lengths of about 25."""
    from longlens.mixers.registry import find_mixer
    from longlens.testing.subject import small_options

    return lambda name, **more: small_options(find_mixer(name).options) | more
