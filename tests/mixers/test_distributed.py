"""Two processes with DDP or FSDP train every mixer as one process does."""

import pytest

from longlens.mixers.registry import list_mixers
from longlens.testing import check_two_processes, find_subject, sides


@pytest.mark.zoo
@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_equal_one():
    """All layers in one pair of processes, which takes seconds to start."""
    variants = [(name, options) for name in list_mixers() for options in sides(name)]
    found = check_two_processes([find_subject(name, **options) for name, options in variants])
    assert len(found) == len(variants) >= 31
    failed = {str(variant): check for variant, check in zip(variants, found, strict=True) if check.passed is not True}
    assert not failed, "\n".join(f"{name}: {check.detail}\n{check.traceback}" for name, check in failed.items())
