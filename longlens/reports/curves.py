"""Curves in panels: one for each class or, where there are several channels, for each class and channel."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from longlens.reports.pictures import check_picture, line_look, plain, save_picture, styled

MOST_PANELS = 12  # classes that are drawn
MOST_CHANNELS = 4
IN_A_ROW = 3  # panels of one channel
MOST_POINTS = 4_000  # of a curve: more do not show, and are too many for some backends


@styled()
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
    figure.suptitle(plain("; ".join([title, *left_out])))
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="col" if several else "all")
    for number, name in enumerate(shown):
        for channel, channel_name in enumerate(channels):
            axes = panels[number, channel] if several else panels.flat[number]
            for curve in groups[name]:
                positions = np.arange(0, len(curve), max(1, len(curve) // MOST_POINTS))
                marker = "." if len(curve) == 1 else None  # a line of one point does not show
                style = {"color": line_look(number)["color"], "linewidth": 0.9, "alpha": 0.7, "marker": marker}
                axes.plot(positions, curve[positions, channel], **style)
            axes.set_title(plain(f"{name}, {channel_name}" if several else name))
    for axes in panels.flat[len(shown) * (len(channels) if several else 1) :]:
        axes.set_axis_off()
    figure.supxlabel("position", fontsize=11)
    return save_picture(figure, out)
