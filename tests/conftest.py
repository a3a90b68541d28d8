import pytest
import torch
from hypothesis import settings

settings.register_profile("longlens", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("longlens")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Options with which each part of a mixer shows at lengths of about 25.
SMALL = {
    "heads": 4, "max_rate": 0.3, "chunk_size": 7, "block_size": 4, "bucket_size": 4, "rounds": 2, "state_size": 8,
    "features": 12, "memory": 5, "projected": 9,
}  # fmt: skip


@pytest.fixture(scope="session")
def small_options():
    """``small_options("las")``: those of the small options that a mixer has."""

    def choose(name: str, **more) -> dict:
        from longlens.mixers.base import mixer_class
        from longlens.options import option_names

        known = set(option_names(mixer_class(name)))
        if not name.endswith("-chunk"):
            known.discard("chunk_size")  # others can have chunks, but are not about them
        return {option: value for option, value in SMALL.items() if option in known} | more

    return choose
