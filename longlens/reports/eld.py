"""The exponentially locally decaying (ELD) operator in one picture (Section 4.1 and Table 1, right, of the paper).

Top: how much of a score each head keeps with distance, for both readings of the paper's schedule, and what that does to
the weight of a key (it tends to the uniform weight, not to 0). Bottom: the matrices exp(-α_c · D_L) themselves.
"""

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from longlens.ops.decay import SCHEDULES, decay_rates
from longlens.reports.pictures import check_picture, save_picture


def draw_eld(path: Path, *, heads: int, max_rate: float, length: int) -> None:
    """Write the picture to ``path``; the ending decides the format."""
    check_picture(path)
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")
    if heads < 2:
        raise ValueError(f"heads must be at least 2, since the first head never decays, got {heads}")
    distance = torch.arange(length, dtype=torch.float64)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.15, 1], squeeze=False)[:, 0]
    top = upper.subplots(1, 3)
    for axes, schedule in zip(top, SCHEDULES, strict=False):
        _draw_kept(axes, decay_rates(heads, max_rate, schedule, dtype=torch.float64), distance)
        axes.set_title(f"{schedule}, B = {max_rate:g}", fontsize=10)
    _draw_weights(top[2], max_rate, distance)

    rates = decay_rates(heads, max_rate, dtype=torch.float64)
    shown = [round(i * (heads - 1) / 3) for i in range(4)] if heads >= 4 else list(range(heads))
    _draw_matrices(lower, rates, shown, length)
    save_picture(figure, path)


def _draw_kept(axes, rates: torch.Tensor, distance: torch.Tensor) -> None:
    colors = matplotlib.colormaps["viridis"](torch.linspace(0, 0.9, len(rates)).numpy())
    for head, (rate, color) in enumerate(zip(rates, colors, strict=True)):
        label = f"head {head}, α = {rate.item():.2g}"
        axes.plot(distance + 1, torch.exp(-rate * distance), color=color, label=label, linewidth=1.6)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("distance i − j, plus 1")
    axes.set_ylabel("share of the score kept")
    axes.set_ylim(-0.03, 1.05)
    drops_at_once = rates[1] * distance[-1] > 100
    axes.legend(fontsize=7, loc="center right" if drops_at_once else "lower left", framealpha=0.85)


def _draw_weights(axes, max_rate: float, distance: torch.Tensor) -> None:
    """Keys of one equal score s: exp(s·exp(-a·n)), relative to a key of score 0."""
    kept = torch.exp(-max_rate * distance)
    for score, color in ((2.0, "tab:red"), (0.0, "tab:gray"), (-2.0, "tab:blue")):
        axes.plot(distance, torch.exp(score * kept), color=color, label=f"score {score:+g}", linewidth=1.6)
    axes.set_yscale("log")
    axes.set_xlabel("distance i − j")
    axes.set_ylabel("weight, relative to a score of 0")
    axes.set_title(f"far keys become uniform, α = {max_rate:g}", fontsize=10)
    axes.legend(fontsize=8)


def _draw_matrices(figure, rates: torch.Tensor, shown: list[int], length: int) -> None:
    position = torch.linspace(0, length - 1, 256, dtype=torch.float64)
    gap = position[:, None] - position[None, :]
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    image = None
    for ax, head in zip(axes, shown, strict=True):
        matrix = torch.exp(-rates[head] * gap).masked_fill(gap < 0, torch.nan)
        image = ax.imshow(matrix, vmin=0, vmax=1, extent=(0, length, length, 0), cmap="magma")
        ax.set_title(f"head {head}: exp(−{rates[head].item():.2g}·(i − j))", fontsize=9)
        ax.set_xticks([0, length])
        ax.set_yticks([0, length])
        ax.set_xlabel("key j", labelpad=-8)
    axes[0].set_ylabel("query i", labelpad=-12)
    figure.colorbar(image, ax=list(axes), shrink=0.85, label="share of the score kept")
