"""The near windows of linear-time LaS attention, and the proof of their error.

For a query i let w_j = exp(x_j) be the weights of the exact form, x_j = exp(-a(i-j))·s_j, Z their sum and o the output.
The linear form has 1 + x_j for the weights of the far keys (``linear.py``). What it leaves out,

    δ_j = exp(x_j) - 1 - x_j,        0 ≤ δ_j ≤ x_j² / (2(1 - ε/3))   where |x_j| ≤ ε < 1        (Taylor's remainder),

sums up to Δ = Σ_far δ_j. Its weights are positive, as ε < 1, and their sum is Z - Δ. Since Σ_j w_j·(v_j - o) = 0, its
output õ has (Z - Δ)·(õ - o) = -Σ_far δ_j·(v_j - o), and no entry of v_j - o is larger than 2·max|v|, so that

    |õ - o| ≤ 2ρ / (1 - ρ) · max|v|,        ρ = Δ / Z,

in every entry, with the largest entry of |v| (smoothed) in this head of this sequence. All of it is found in O(L·d²):

    Σ_far x_j²  =  scale²·q_iᵀ S q_i,       S = Σ_far exp(-2a(i-j))·k_j ⊗ k_j, a decaying state as that of the far field
    ε  =  scale·‖q_i‖·max_far exp(-a(i-j))·‖k_j‖
    Z  ≥  Σ_near exp(x_j) + Σ_far exp(x_j)  ≥  n_near·exp(mean_near x_j) + n_far·exp(mean_far x_j)             (Jensen)

where the means are q_i times decaying sums of keys. For scores of one size s, ρ is about s²·exp(-2aW) / (4a·i): far
keys that still have a score are few beside all that have a weight, so it is far below exp(-2aW) late in a sequence.
It is one of exact arithmetic: the rounding of the dtype comes on top, as in the exact form. The gradients are those of
the linear form; their error falls with the window as that of the output does, without a bound.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import at_least_float32, no_autocast
from longlens.ops.decay import decay_weights, widest_dtype
from longlens.ops.linear import MOST, accumulate, block_size

REACH = 3.0  # a·W without a tolerance, and where the search begins
SHORT = 2048  # sequences up to here are exact: choosing a window costs what it would save
OVERHEAD = 1.2  # of a key in the near window, beside one in full attention: measured
FAR = 96  # keys of full attention that the far field of a query costs, and the choice of the window


class Bound(NamedTuple):
    """What a window guarantees for a head: the error relative to max|v|, and the largest far score ε."""

    error: float
    far_score: float


class _Moments:
    """Decayed sums over the keys of a head, (B, L, d), before 0, B, 2B, …: what bounds of any window need."""

    def __init__(self, key: Tensor, mask: Tensor | None, rate: Tensor, block: int) -> None:
        batch, count, wide = len(key), key.shape[1] // block, widest_dtype(key.device)
        key = at_least_float32(key) if mask is None else at_least_float32(key) * mask
        blocks = key[:, : count * block].unflatten(1, (count, block)).transpose(0, 1)  # (n, B, block, d)
        step = torch.arange(block, device=key.device) - block
        weighted = blocks * decay_weights(rate, step, key.dtype)[0]
        kept = decay_weights(rate, torch.tensor([-block], device=key.device), key.dtype)[0]  # (1, 1)
        self.square = accumulate(_after(weighted.mT @ weighted), kept.square())  # (n + 1, B, d, d): S
        self.sum = accumulate(_after(weighted.sum(-2, keepdim=True)), kept)  # (n + 1, B, 1, d)
        present = blocks.new_full((count, batch), block) if mask is None else mask[:, : count * block]
        present = present if mask is None else present.unflatten(1, (count, block)).sum((2, 3)).mT
        self.count = _after(present.to(wide)).cumsum(0)[..., None]  # (n + 1, B, 1)
        # The largest norm decays, too: on a logarithmic scale it is the running maximum of log‖k‖ + a·position.
        norm = weighted.norm(dim=-1).amax(-1).to(wide).log()  # (n, B), -inf where all are 0
        place = rate.to(wide) * block * torch.arange(count + 1, device=key.device)[:, None]
        largest = (norm + place[1:]).cummax(0).values if count else norm
        self.norm = (F.pad(largest, (0, 0, 1, 0), value=-math.inf) - place).exp()[..., None]  # (n + 1, B, 1)


def _after(sums: Tensor) -> Tensor:
    """(n, …) -> (n + 1, …): before the first block there is nothing."""
    return torch.cat([sums.new_zeros(1, *sums.shape[1:]), sums])


def score_bound(squares: Tensor, far_score: Tensor) -> Tensor:
    """Δ at most, of Σ_far x² and ε; infinite where a weight 1 + x could be negative, or something is not a number."""
    return torch.where(far_score <= MOST, squares / (2 - 2 / 3 * far_score), math.inf)


def _bound(query: Tensor, moments: _Moments, rate: Tensor, block: int, window: int, scale: float) -> Bound:
    """The bound of the error of a head with this window; query (B, L, d)."""
    rows = at_least_float32(query[:, window:])
    rows = F.pad(rows, (0, 0, 0, -rows.shape[1] % block)).unflatten(1, (-1, block)).transpose(0, 1)  # (n, B, block, d)
    count, whole, rest = len(rows), window // block, window % block
    step = torch.arange(block, device=query.device)
    rows = rows * (decay_weights(rate, -(rest + step), rows.dtype)[0] * scale)  # since the last whole block before each
    older = math.exp(-rate.item() * whole * block)  # since the end of the far keys, too
    sums = moments.sum[:count].mT * older, moments.sum[whole : whole + count].mT
    products, far_sum, seen_sum = (rows @ torch.cat([moments.square[:count], *sums], dim=-1)).split_with_sizes(
        [rows.shape[-1], 1, 1], dim=-1
    )
    wide = widest_dtype(query.device)
    squares = (products * rows).sum(-1).to(wide) * older**2  # (n, B, block): Σ x²
    far_score = rows.norm(dim=-1) * (moments.norm[:count] * older)  # ε
    far, seen = moments.count[:count], moments.count[whole : whole + count]
    far_sum, near_sum = (x.squeeze(-1).to(wide) for x in (far_sum, seen_sum - far_sum))
    near = seen - far
    weights = far * (far_sum / far.clamp_min(1)).exp() + near * (near_sum / near.clamp_min(1)).exp()  # at most Z
    lost = score_bound(squares, far_score)
    part = torch.where(squares == 0, 0.0, lost / weights).amax().item()
    return Bound(2 * part / (1 - part) if part < 1 else math.inf, far_score.amax().item())


def window_bound(
    query: Tensor,
    key: Tensor,
    rate: float,
    window: int,
    *,
    mask: Tensor | None = None,
) -> Bound:
    """The bound of one head's linear form for queries and keys (B, L, d), a rate above 0, and a near window shorter
    than the sequence; with a mask (B, L, 1) of the keys that count."""
    rates, block = torch.tensor([rate], dtype=widest_dtype(query.device), device=query.device), block_size(rate)
    return _bound(query, _Moments(key, mask, rates, block), rates, block, window, query.shape[-1] ** -0.5)


def round_up(window: float) -> int:
    """The next window of a grid, 64, 128, … 1024, then sixteen to an octave: heads that share one run together."""
    window = max(64, math.ceil(window))
    step = max(64, 2 ** (window - 1).bit_length() // 32)
    return -(-window // step) * step


def longest_window(length: int, block: int) -> int:
    """The longest window that is cheaper than full attention, whose queries see length / 2 keys on average."""
    room = length / 2 - OVERHEAD * block / 2 - FAR  # for the mean of min(i, W), W - W² / 2L
    inside = 1 - 2 * room / OVERHEAD / length
    return int(length * (1 - math.sqrt(inside))) if room > 0 and inside > 0 else 0


@torch.library.custom_op("longlens::choose_windows", mutates_args=())
@no_autocast
def choose_windows(
    query: Tensor, key: Tensor, rates: Tensor, key_mask: Tensor | None, scale: float, tolerance: float
) -> Tensor:
    """The near window of each head, (H,) on the CPU: the shortest (of a grid) whose error is at most ``tolerance``,
    relative to max|v|, for these queries and keys (B, H, L, d), or the length where that is no faster than the exact
    form. Keys whose ``key_mask`` (B or 1, H or 1, 1, L) is False do not count."""
    length, windows = query.shape[2], [query.shape[2]] * query.shape[1]
    for head, rate in enumerate(rates.tolist()):
        longest = longest_window(length, block_size(rate)) if rate > 0 else 0
        if length <= SHORT or rate * longest < 1:  # far scores are hardly smaller than near ones
            continue
        mask = None if key_mask is None else key_mask[:, head % key_mask.shape[1]].mT
        found = _search(query[:, head], key[:, head], rates[head : head + 1], mask, scale, tolerance, longest)
        windows[head] = found or length
    return torch.tensor(windows)


@choose_windows.register_fake
def _(query, key, rates, key_mask, scale, tolerance):
    return torch.empty(query.shape[1], dtype=torch.int64)


def _search(
    query: Tensor, key: Tensor, rate: Tensor, mask: Tensor | None, scale: float, tolerance: float, longest: int
) -> int | None:
    """The error falls like exp(-2aW) and far scores like exp(-aW): each trial tells how far to go."""
    a = rate.item()
    block = block_size(a)
    moments = _Moments(key, mask, rate, block)
    window, found, failed = round_up(min(REACH / a, longest)), None, 0
    while failed < window <= longest and (found is None or window < found):
        error, score = _bound(query, moments, rate, block, window, scale)
        if error <= tolerance:
            found = window
            step = math.log(max(error, 1e-30) / tolerance) / (2 * a)
        else:
            failed = window
            step = math.log(error / tolerance) / (2 * a) if error < math.inf else math.log(max(score, math.e)) / a
            if not step < longest:
                return found
        window = max(round_up(max(window + step, 1)), round_up(failed + 1))
        if found is not None and window > 0.95 * found:  # another trial would cost what it saves
            break
    return found


def fixed_windows(rates: Sequence[float], length: int, reach: float) -> list[int]:
    """Windows of reach / a, without a look at the inputs; the length where full attention is as cheap."""
    windows = [round_up(reach / rate) if rate * length > 2 * reach else length for rate in rates]
    return [window if window <= longest_window(length, 64) else length for window in windows]
