"""The error of linear-time LaS attention against its near window, beside the bound of ``ops/windows.py``."""

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from longlens.ops.las import las_attention
from longlens.ops.linear import linear_attention
from longlens.ops.windows import REACH, choose_windows, round_up, window_bound
from longlens.options import Positive, Several, Size
from longlens.reports.pictures import check_picture, save_picture

DIM = 32
WINDOWS = 12  # points of a curve


def draw_linear(
    *,
    out: Path = Path("figures/linear.png"),
    length: Several = 4096,
    rates: tuple[Positive, ...] = (4e-3, 8e-3, 16e-3),
    tolerance: Positive = 1e-3,
    size: Positive = 1.0,
    batch: Size = 1,
) -> str:
    """Draw the error of attention in linear time against the window that is exact, beside its bound.

    Queries, keys and values are normal, in float64, and both are relative to the largest value. A circle is the window
    that the tolerance chooses.

    Args:
        out: Picture to write (.png, .pdf or .svg).
        length: Sequence length.
        rates: Decay rates of the heads.
        tolerance: Largest error, relative to the largest value.
        size: Size of the scores.
        batch: Sequences.
    """
    check_picture(out)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, batch, 1, length, DIM, dtype=torch.float64)
    query = query * size
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["viridis"](torch.linspace(0, 0.8, len(rates)).tolist())
    for rate, color in zip(rates, colors, strict=True):
        windows, errors, bounds = _curve(query, key, value, rate)
        axes.plot(windows, bounds, "--", color=color, linewidth=1.4)
        axes.plot(windows, errors, color=color, linewidth=1.6, label=f"a = {rate:g}")
        chosen = int(choose_windows(query, key, torch.tensor([rate]), None, DIM**-0.5, tolerance))
        if chosen < length:
            bound = window_bound(query[:, 0], key[:, 0], rate, chosen).error
            axes.plot([chosen], [bound], "o", color=color, markersize=7)
    axes.axhline(tolerance, color="tab:gray", linewidth=1.0, linestyle=":")
    axes.plot([], [], "--", color="black", linewidth=1.4, label="its bound")
    axes.plot([], [], "o", color="black", label=f"chosen for {tolerance:g}")
    axes.set_yscale("log")
    axes.set_xlabel("near window W (tokens)")
    axes.set_ylabel("largest error / max|v|")
    axes.set_title(f"Linear-time LaS attention: {length:,} tokens, scores of size {size:g}", fontsize=11)
    axes.legend(fontsize=9)
    return save_picture(figure, out)


def _curve(query: Tensor, key: Tensor, value: Tensor, rate: float) -> tuple[list[int], list[float], list[float]]:
    """Some windows up to twice the usual one, their errors, and their bounds where there is one."""
    length = query.shape[2]
    longest = min(2 * REACH / rate, 0.75 * length)
    windows = sorted({round_up(longest * (point + 1) / WINDOWS) for point in range(WINDOWS)})
    windows = [window for window in windows if window < length]
    rates = torch.tensor([rate], dtype=torch.float64)
    exact = las_attention(query, key, value, decay=[rate])
    errors, bounds = [], []
    for window in windows:
        found = linear_attention(query, key, value, rates, None, torch.tensor([window]), DIM**-0.5, torch.float64)[0]
        errors.append(((found - exact).abs().max() / value.abs().max()).item())
        bounds.append(window_bound(query[:, 0], key[:, 0], rate, window).error)
    return windows, errors, bounds
