"""The error of linear-time LaS attention against its near window, beside the bound of ``ops/windows.py``."""

from pathlib import Path
from typing import Literal

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from longlens.ops.las import las_attention
from longlens.ops.linear import linear_attention
from longlens.ops.windows import REACH, choose_windows, round_up, window_bound
from longlens.options import Positive, Several, Size
from longlens.reports.pictures import check_picture, ramp, save_picture, styled

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
    theme: Literal["light", "dark"] = "light",
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
        theme: Dark ink on white, for print, or light ink on a dark background, for talks.
    """
    check_picture(out)
    with styled(theme):
        return save_picture(_draw(length, rates, tolerance, size, batch), out)


def _draw(length: int, rates: tuple[float, ...], tolerance: float, size: float, batch: int) -> Figure:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, batch, 1, length, DIM, dtype=torch.float64)
    query = query * size
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    ink = matplotlib.rcParams["text.color"]
    for rate, color in zip(rates, ramp(len(rates)), strict=True):
        windows, errors, bounds = _curve(query, key, value, rate)
        axes.plot(windows, bounds, "--", color=color, linewidth=1.4)
        axes.plot(windows, errors, color=color, linewidth=1.6, label=f"a = {rate:g}")
        chosen = int(choose_windows(query, key, torch.tensor([rate]), None, DIM**-0.5, tolerance))
        if chosen < length:
            bound = window_bound(query[:, 0], key[:, 0], rate, chosen).error
            axes.plot([chosen], [bound], "o", color=color, markersize=7)
    axes.axhline(tolerance, color="tab:gray", linewidth=1.0, linestyle=":")
    axes.plot([], [], "--", color=ink, linewidth=1.4, label="its bound")
    axes.plot([], [], "o", color=ink, label=f"chosen for {tolerance:g}")
    axes.set_yscale("log")
    axes.set_xlabel("near window W (tokens)")
    axes.set_ylabel("largest error / max|v|")
    axes.set_title(f"Linear-time LaS attention: {length:,} tokens, scores of size {size:g}")
    axes.legend(fontsize=9)
    return figure


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
