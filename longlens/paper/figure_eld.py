"""The exponentially locally decaying (ELD) operator in one picture (Section 4.1 and Table 1, right, of the paper).

Top: how much of a score each head keeps with distance, for both readings of the paper's schedule, and what that does to
the weight of a key (it tends to the uniform weight, not to 0). Bottom: the matrices exp(-α_c · D_L) themselves.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator
from torch import Tensor

from longlens.ops.decay import Schedule, decay_rates
from longlens.options import Fraction, Several
from longlens.paper.index import Computed, Found
from longlens.reports.pictures import check_picture, evenly, ramp, save_picture, styled, without_frame

READINGS: tuple[Schedule, ...] = ("exp-uniform", "literal")  # of the paper's text on the rates
LINES, MATRICES = 8, 4  # heads that are drawn, at most
POINTS = 512  # of a curve
SCORE = 2.0  # of the keys whose weight is drawn


def draw_eld(
    *,
    out: Path = Path("figures/eld.png"),
    heads: Several = 8,
    max_rate: Fraction = 1e-3,
    length: Several = 4096,
    theme: Literal["light", "dark"] = "light",
) -> str:
    """Draw how scores decay with distance: the exponentially locally decaying (ELD) operator of Section 4.1.

    Args:
        out: Picture to write (.png, .pdf or .svg).
        heads: Number of heads.
        max_rate: Largest decay rate B.
        length: Sequence length.
        theme: Dark ink on white, for print, or light ink on a dark background, for talks.
    """
    check_picture(out)
    with styled(theme):
        return save_picture(_draw(heads, max_rate, length), out)


def _draw(heads: int, max_rate: float, length: int) -> Figure:
    figure = Figure(figsize=(11.5, 6.1), layout=ConstrainedLayoutEngine(wspace=0.06))
    figure.suptitle(f"Scores decay with distance (ELD): {heads} heads, length {length:,}")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.35, 1], squeeze=False)[:, 0]
    panels = upper.subplots(1, 3)
    for axes, schedule in zip(panels, READINGS, strict=False):
        _draw_kept(axes, decay_rates(heads, max_rate, schedule, dtype=torch.float64), length)
        axes.set_title(f"schedule {schedule}, B = {max_rate:g}")
    panels[0].set_ylabel("fraction of the score kept")
    _draw_weights(panels[2], max_rate, length)
    _draw_matrices(lower, decay_rates(heads, max_rate, dtype=torch.float64), length)
    return figure


def _draw_kept(axes: Axes, rates: Tensor, length: int) -> None:
    distance = torch.unique(torch.logspace(0, torch.log2(torch.tensor(length)), POINTS, 2).round().double()) - 1
    shown = evenly(len(rates), LINES)
    for head, color in zip(shown, ramp(len(shown)), strict=True):
        label = f"head {head}, α = {rates[head].item():.2g}"
        axes.plot(distance + 1, torch.exp(-rates[head] * distance), color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("distance i − j, plus 1")
    axes.set_ylim(-0.03, 1.05)
    drops_at_once = rates[1] * (length - 1) > 100
    axes.legend(fontsize=9, loc="center right" if drops_at_once else "lower left")


def _draw_weights(axes: Axes, max_rate: float, length: int) -> None:
    """Keys of one equal score s: exp(s·exp(-a·n)), relative to a key of score 0."""
    distance = torch.linspace(0, length - 1, POINTS, dtype=torch.float64)
    kept = torch.exp(-max_rate * distance)
    for score, color in ((SCORE, "C1"), (0.0, "tab:gray"), (-SCORE, "C0")):
        label = f"score {score:g}".replace("-", "−")
        axes.plot(distance, torch.exp(score * kept), color=color, label=label)
    axes.set_yscale("log")
    axes.set_yticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0.115, 8.7)
    axes.set_xlabel("distance i − j")
    axes.set_ylabel("weight, relative to a score of 0")
    axes.set_title(f"far keys become uniform, α = {max_rate:g}")
    axes.legend()


def _draw_matrices(figure: SubFigure, rates: Tensor, length: int) -> None:
    position = torch.linspace(0, length - 1, 80, dtype=torch.float64)
    gap = position[:, None] - position[None, :]
    shown = evenly(len(rates), MATRICES)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, head in zip(panels, shown, strict=True):
        matrix = torch.exp(-rates[head] * gap).masked_fill(gap < 0, torch.nan)
        axes.imshow(
            matrix.numpy(), vmin=0, vmax=1, extent=(0, length, length, 0), cmap="magma", interpolation="nearest"
        )
        decay = f"exp(−{rates[head].item():.2g}·(i − j))" if rates[head] > 0 else "no decay"
        axes.set_title(f"head {head}: {decay}")
        axes.set_xticks([0, length], ["0", f"{length:,}"])
        axes.set_yticks([0, length], ["0", f"{length:,}"])
        axes.set_xlabel("key j", labelpad=-8)
        without_frame(axes)
    panels[0].set_ylabel("query i", labelpad=2 - 3 * len(f"{length:,}"))
    figure.colorbar(panels[-1].images[0], ax=list(panels), shrink=0.9, label="fraction of the score kept")


def _compute(results: Path) -> tuple[list[Any], Found]:
    heads, most = 8, 1e-3
    written = draw_eld(out=results / "figure-eld.png", heads=heads, max_rate=most)
    even, printed = (decay_rates(heads, most, schedule, dtype=torch.float64) for schedule in READINGS)
    sentences = [
        f"With exp(-α) spaced evenly from 1 to exp(-B), {heads} heads and B = {most:g}, α runs from {even[0]:g} to "
        f"{even[-1]:.1g}, and the last head keeps {torch.exp(-even[-1] * 128):.2f} of a score at distance 128 and "
        f"{torch.exp(-even[-1] * 1024):.2f} at 1,024.",
        f"As printed, exp(-α) runs from 0 to B: α is {printed[1:].min():.1f} to {printed[1:].max():.1f} in {heads - 1} "
        f"of {heads} heads, which keep at most {torch.exp(-printed[1:].min()):.1g} of a score at distance 1: plain "
        "averages of all other tokens.",
        "Decay shrinks scores to 0 and not to -∞: far keys get the uniform weight, not none.",
    ]
    averages = int((torch.exp(-printed) < 2 * most).sum())  # heads that keep next to nothing of a score at distance 1
    because = f"the two contradict each other: as printed, {averages} of {heads} heads would be plain averages"
    return [written], Found("holds" if printed.max() <= most else "does not hold", because, sentences)


STUDY = Computed(
    name="figure-eld",
    title="Scores decay with distance",
    place="Section 4.1 and Table 1, right",
    claim="Heads decay at rates α from 0 to B, with exp(-α) uniform in [0, B].",
    compute=_compute,
)
