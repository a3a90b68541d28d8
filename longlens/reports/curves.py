"""Curves in panels: one for each class or, where there are several channels, for each class and channel."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from longlens.options import shorten
from longlens.reports.pictures import check_picture, save_picture

MOST_PANELS = 12  # classes that are drawn
MOST_CHANNELS = 4
IN_A_ROW = 3  # panels of one channel
MOST_POINTS = 4_000  # of a curve: more do not show, and are too many for some backends


def draw_curves(groups: Mapping[str, Sequence[np.ndarray]], channels: Sequence[str], title: str, out: Path) -> str:
    """Draw the curves (L, C) of each group, and return the line that says where they are.

    The panels of a channel have the same axes, so that classes can be compared.
    """
    check_picture(out)
    shown, channels = list(groups)[:MOST_PANELS], channels[:MOST_CHANNELS]
    left_out = [f"{len(groups) - len(shown):,} more classes"] if len(groups) > len(shown) else []
    several = len(channels) > 1
    columns = len(channels) if several else min(len(shown), IN_A_ROW)
    rows = len(shown) if several else -(-len(shown) // columns)
    figure = Figure(figsize=(max(4.0 * columns, 5.0), 0.7 + 2.1 * rows), layout="constrained")
    figure.suptitle(_plain("; ".join([title, *left_out])), fontsize=11)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="col" if several else "all")
    for number, name in enumerate(shown):
        for channel, channel_name in enumerate(channels):
            axes = panels[number, channel] if several else panels.flat[number]
            for curve in groups[name]:
                positions = np.arange(0, len(curve), max(1, len(curve) // MOST_POINTS))
                marker = "." if len(curve) == 1 else None  # a line of one point does not show
                style = {"color": f"C{number % 10}", "linewidth": 0.9, "alpha": 0.7, "marker": marker}
                axes.plot(positions, curve[positions, channel], **style)
            axes.set_title(_plain(f"{name}, {channel_name}" if several else name), fontsize=10)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(shown) * (len(channels) if several else 1) :]:
        axes.set_axis_off()
    figure.supxlabel("position", fontsize=9)
    with warnings.catch_warnings(action="ignore"):  # of signs that the font has not
        return save_picture(figure, out)


def _plain(text: str) -> str:
    """A name that may have any signs, of which $ would begin a formula."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in shorten(text))
    return shown.replace("$", r"\$")
