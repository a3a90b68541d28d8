"""The precision in which things are computed.

Half precision has no complex numbers, cannot count positions beyond 256, and loses what long sums cancel, so that such
steps run in float32 at least, also under autocast.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor itself, or in float32 if it is of half precision."""
    return x.to(working_dtype(x.dtype))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def no_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator of a function that computes in the dtypes of its arguments, on the device of the first tensor."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run
