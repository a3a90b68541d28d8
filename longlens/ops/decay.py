"""The decay of scores with distance: the rates of the heads, and what queries and keys become for the kernel.

For i >= j and any center c the decay folds into both: exp(-a(i-j)) · q_i·k_j = (exp(-a(i-c))·q_i) · (exp(a(j-c))·k_j).
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.smoothing import check_choice

Schedule = Literal["exp-uniform", "positive", "literal"]


def decay_rates(
    num_heads: int,
    max_rate: float,
    schedule: Schedule = "exp-uniform",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The decay rate of each of H heads, (H,). The first is 0: a head of plain attention (Section 4.1 of the paper);
    only the schedule ``"positive"`` has none.

    The paper's text on the spacing contradicts itself, so both readings are offered, for ``max_rate`` B:

    * ``"exp-uniform"``: exp(-a) is evenly spaced from 1 to exp(-B), so the rates run from 0 to B.
    * ``"literal"``: exp(-a_c) = B·c / (H - 1), as printed. For B = 0.001 and 8 heads the rates are 6.9 to 8.9, which
      makes every score but a token's own almost 0: seven of the eight heads become plain averages.

    The third, ``"positive"``, is the first without its 0: exp(-a) is evenly spaced from 1, excluded, to exp(-B). All
    heads decay then, so that all have a linear form and a bounded cache (``backend="linear"`` of ``las_attention``).

    >>> decay_rates(4, 0.3)
    tensor([0.0000, 0.0904, 0.1897, 0.3000])
    """
    if not isinstance(num_heads, int) or isinstance(num_heads, bool) or num_heads < 1:
        raise ValueError(f"num_heads must be an integer of at least 1, got {num_heads!r}")
    check_choice("schedule", schedule, Schedule)
    if not isinstance(max_rate, (int, float)) or not 0 <= max_rate < math.inf:
        raise ValueError(f"max_rate must be a finite number of at least 0, got {max_rate!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    if schedule == "literal" and not 0 < max_rate < 1:
        raise ValueError(f"max_rate must lie between 0 and 1 for the literal schedule, got {max_rate!r}")

    parts = [head / (num_heads - 1) for head in range(1, num_heads)]
    if schedule == "positive":
        parts = [head / num_heads for head in range(1, num_heads + 1)]
    if schedule == "literal":
        rates = [-math.log(max(max_rate * part, math.ulp(0.0))) for part in parts]  # the product may be too small
    else:  # expm1 and log1p keep small rates exact; the last one is B itself, however large
        rates = [-math.log1p(math.expm1(-max_rate) * part) if part < 1 else max_rate for part in parts]
    rates = rates if schedule == "positive" else [0.0, *rates]
    return torch.tensor(rates, dtype=dtype or torch.get_default_dtype(), device=device)


def max_exponent(dtype: torch.dtype) -> float:
    """The largest |a·(i - c)| that folding may use in ``dtype``: a quarter of its exponent range (about 22 in float32
    and bfloat16, 2.8 in float16, 177 in float64). A product of two weights then takes half of the range at most, also
    above the diagonal, where it grows before the mask removes it; the rest is for queries, keys and gradients."""
    return 0.25 * math.log(torch.finfo(dtype).max)


def one_folding_fits(length: int, max_rate: float, dtype: torch.dtype) -> bool:
    """Whether the weights of a segment of ``length``, folded around its middle, stay within ``max_exponent``."""
    return max_rate * (length - 1) <= 2 * max_exponent(dtype)


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def decay_weights(rates: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(a_h · x_l), (H, L, 1), for rates a (H,) and signed distances x (L,), in float32, or float64 for float64
    inputs. Computed in float64, because an error in a·x, which may be large, is a *relative* error of the weight."""
    widest = widest_dtype(rates.device)
    weights = torch.exp(rates.to(widest)[:, None] * exponents.to(widest))
    return weights.unsqueeze(-1).to(torch.promote_types(dtype, torch.float32))


class Piece(NamedTuple):
    """Queries ``rows`` and keys ``keys`` (both as [start, stop) of absolute positions), folded around ``center``."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    center: float
    causal: bool  # a triangle: j <= i, or for the upper one j > i
    upper: bool = False  # keys later than the queries

    @property
    def reversed(self) -> bool:
        """An upper triangle becomes a causal one when its rows and keys are read backwards."""
        return self.causal and self.upper

    def distances(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """i - c and j - c, negated for keys that come later than their queries."""
        sign, dtype = -1.0 if self.upper else 1.0, widest_dtype(device)
        rows = sign * (torch.arange(*self.rows, device=device, dtype=dtype) - self.center)
        if self.rows == self.keys:
            return rows, rows
        return rows, sign * (torch.arange(*self.keys, device=device, dtype=dtype) - self.center)

    def weights(self, rates: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """exp(∓a(i-c)) and exp(±a(j-c)), two of (H, L, 1)."""
        query_distance, key_distance = self.distances(rates.device)
        if query_distance is key_distance:  # the usual piece, the diagonal: one exponential serves both
            weights = decay_weights(rates, key_distance, key_distance.dtype)
            dtype = torch.promote_types(dtype, torch.float32)
            return weights.reciprocal().to(dtype), weights.to(dtype)
        return decay_weights(rates, -query_distance, dtype), decay_weights(rates, key_distance, dtype)


def fold(
    query: Tensor, key: Tensor, rates: Tensor | None, piece: Piece, *, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weighted queries and keys of a piece: scale·exp(∓a(i-c))·q_i and exp(±a(j-c))·k_j, in ``dtype``."""
    if rates is None:
        return (query if scale == 1.0 else query * scale).to(dtype), key.to(dtype)
    query_weights, key_weights = piece.weights(rates, query.dtype)
    query_weights = query_weights if scale == 1.0 else query_weights * scale
    return (query * query_weights).to(dtype), (key * key_weights).to(dtype)


def hide_keys(query: Tensor, key: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Exclude keys where ``key_mask`` (B, 1 or H, 1, Lk) is False without a mask of size Lq×Lk: one more column, whose
    product is a huge negative score for them and 0 for the others. The scale must be in the queries already."""
    huge = 240.0 if query.dtype == torch.float16 else 1e15  # its square is still finite
    hidden = key_mask.mT.logical_not().to(key.dtype) * -huge
    query = torch.cat([query, query.new_full((1,), huge).expand(*query.shape[:-1], 1)], dim=-1)
    return query, torch.cat([key, hidden.expand(*key.shape[:-1], 1)], dim=-1)


def join_masks(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """The kernels take a mask or the causal flag, not both."""
    if mask is None or not causal:
        return mask, causal
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return mask & triangle, False


def pad_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns up to a head width that the kernels run fast, one for all three: they change no score and no value.
    On CPU anything from 16 on is as good; on GPUs, multiples of 8. Rows are packed."""
    width = max(query.shape[-1], value.shape[-1], 16)
    if query.device.type != "cpu":
        width += -width % 8
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    return tuple(map(pack_rows, padded))  # pyright: ignore[reportReturnType]


def pack_rows(x: Tensor) -> Tensor:
    """The same with the numbers of each row side by side. Kernels are slow without, or read what is not there."""
    return x if x.stride(-1) == 1 else x.contiguous()
