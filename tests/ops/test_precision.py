"""The precision of what is computed: float32 at least, also under autocast."""

import pytest
import torch

from longlens.ops.checks import at_least_float32, no_autocast, working_dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(dtype):
    x = torch.randn(3, 4).to(dtype)
    assert torch.equal(at_least_float32(x), x.float())
    assert working_dtype(dtype) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_others_stay_what_they_are(dtype):
    x = torch.ones(3, dtype=dtype)
    assert at_least_float32(x) is x
    assert working_dtype(dtype) == dtype


def test_without_autocast():
    """The first tensor may come after other arguments; outside of autocast nothing changes."""

    @no_autocast
    def product(scale: float, left: torch.Tensor, *, right: torch.Tensor) -> torch.Tensor:
        """A product."""
        return scale * left @ right

    left, right = torch.randn(3, 4), torch.randn(4, 3)
    expected = product(2.0, left, right=right)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(2.0, left, right=right), expected)
        assert torch.equal(product(scale=2.0, left=left, right=right), expected)
        assert (left @ right).dtype == torch.bfloat16
    assert product.__doc__ == "A product."
    assert product(1.0, left.to("meta"), right=right.to("meta")).shape == (3, 3)
