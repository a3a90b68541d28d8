"""The decay of scores with distance: the rates of the heads, and the weights that fold them into queries and keys."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from longlens.ops.precision import widest_dtype, working_dtype

Schedule = Literal["exp-uniform", "literal"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def decay_rates(
    num_heads: int,
    max_rate: float,
    schedule: Schedule = "exp-uniform",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The decay rate of each head, shape (H,). The first is 0: a head of plain attention (Section 4.1 of the paper).

    The paper's text on the spacing contradicts itself, so both readings are offered:

    * ``"exp-uniform"``: exp(-a) is evenly spaced from 1 to exp(-B), so the rates run from 0 to B.
    * ``"literal"``: exp(-a_c) = B·c / (H - 1), as printed. For B = 0.001 and 8 heads the rates are 6.9 to 8.9, which
      makes every score but a token's own almost 0: seven of the eight heads become plain averages.

    Args:
        num_heads: Number of heads H.
        max_rate: Rate B of the last head.
        schedule: Spacing of the rates.
        device: Device of the result.
        dtype: Floating-point type of the result.

    >>> decay_rates(4, 0.3)
    tensor([0.0000, 0.0904, 0.1897, 0.3000])
    """
    if not isinstance(num_heads, int) or isinstance(num_heads, bool) or num_heads < 1:
        raise ValueError(f"num_heads must be an integer of at least 1, got {num_heads!r}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if not isinstance(max_rate, (int, float)) or not 0 <= max_rate < math.inf:
        raise ValueError(f"max_rate must be a finite number of at least 0, got {max_rate!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    if schedule == "literal" and not 0 < max_rate < 1:
        raise ValueError(f"max_rate must lie between 0 and 1 for the literal schedule, got {max_rate!r}")

    parts = [head / (num_heads - 1) for head in range(1, num_heads)]
    if schedule == "literal":
        rates = [-math.log(max_rate * part) for part in parts]
    else:  # expm1 and log1p keep small rates exact; the last one is B itself, however large
        rates = [-math.log1p(math.expm1(-max_rate) * part) if part < 1 else max_rate for part in parts]
    return torch.tensor([0.0, *rates], dtype=dtype or torch.get_default_dtype(), device=device)


def max_exponent(dtype: torch.dtype) -> float:
    """The largest |a·(i - c)| that folding may use in ``dtype``: a quarter of its exponent range.

    A product of two weights then takes half of the range at most, also above the diagonal, where it grows before the
    mask removes it. The other half stays free for the queries, keys and gradients themselves. About 22 in float32 and
    bfloat16, 2.8 in float16, 177 in float64.
    """
    return 0.25 * math.log(torch.finfo(dtype).max)


def decay_weights(rates: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(a_h · x_l), shape (H, L, 1), for rates a (H,) and signed distances x (L,).

    Computed in float64, because an error in a·x is a *relative* error of the weight, and a·x may be large. Returned in
    float32, or float64 for float64 inputs; low-precision queries are multiplied in float32 and rounded once.
    """
    widest = widest_dtype(rates.device)
    weights = torch.exp(rates.to(widest)[:, None] * exponents.to(widest))
    return weights.unsqueeze(-1).to(working_dtype(dtype))
