"""Rotary positions (Su et al. 2021): the score of query and key depends on their distance alone."""

import torch
from torch import Tensor

from longlens.ops.checks import at_least_float32, working_dtype


def rotate(x: Tensor, start: int = 0, base: float = 10_000.0) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) of (..., L, d) by the angle position · base^(-2i/d).

    Positions count from ``start``. (R_m q)·(R_n k) depends on q, k and m - n.
    """
    length, width = x.shape[-2:]
    if width % 2:
        raise ValueError(f"rotary positions turn pairs of channels, so the width must be even, got {width}")
    dtype = working_dtype(x.dtype)  # bfloat16 cannot count to 257
    rates = base ** (-torch.arange(0, width, 2, device=x.device, dtype=dtype) / width)  # (d/2,)
    angles = torch.arange(start, start + length, device=x.device, dtype=dtype)[:, None] * rates  # (L, d/2)
    cos, sin = angles.cos(), angles.sin()
    first, second = at_least_float32(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
