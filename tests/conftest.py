import pytest
import torch
from hypothesis import settings

settings.register_profile("longlens", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("longlens")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
