"""Which part of a sequence decided, in words and as a picture: over a curve, a text or an image."""

import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection, PathCollection
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

from longlens.reports.pictures import save_picture, styled
from longlens.training.explain import Explanation

COLORS = "RdBu_r"  # red speaks for the answer, blue against it
MOST_CHANNELS = 6  # curves of a picture: those that matter most
MOST_SYMBOLS = 4_000  # of a text: those around the part that matters most
LINE = 96  # characters of a line of text
CELL = (0.09, 0.21)  # inches of a character
ADVANCE = 0.602  # of a character of matplotlib's font, in em
STRONGEST = 3  # values that are named


def say_explanation(found: Explanation) -> list[str]:
    """What decided, in three sentences at most."""
    first, last = found.decisive()
    length = len(found.by_position)
    if found.target is None:
        answer = f"the model says {found.answer:.6g}, and {found.baseline:.6g} of a sequence without content"
    else:
        odds = f"log-odds {found.answer:+.2f}, and {found.baseline:+.2f} of a sequence without content"
        answer = f"the model gives {found.target!r} a probability of {found.probability:.1%}: {odds}"
    where = f"position {first}" if first == last else f"positions {first} to {last}"
    lines = [answer, f"half of what counts is in {where} of {length}"]
    order = np.argsort(found.by_position)
    up = [_named(found, int(i)) for i in order[::-1][:STRONGEST] if found.by_position[i] > 0]
    down = [_named(found, int(i)) for i in order[:STRONGEST] if found.by_position[i] < 0]
    words = ("raises it", "lowers it") if found.target is None else ("for it", "against it")
    parts = [f"most {word}: {', '.join(listed)}" for word, listed in zip(words, (up, down), strict=True) if listed]
    return [*lines, "; ".join(parts)] if parts else lines


def _named(found: Explanation, index: int) -> str:
    shown = "" if found.symbols is None else f" {found.symbols[index]!r}"
    return f"position {index + 1}{shown} ({found.by_position[index]:+.3g})"


@styled()
def draw_explanation(found: Explanation, title: str, out: Path) -> str:
    """Write the picture, and return the line that says so."""
    largest = 1.3 * float(np.abs(found.attributions).max()) or 1.0  # so that curves show on the darkest color
    shades = ScalarMappable(TwoSlopeNorm(0.0, -largest, largest), COLORS)
    answer = f"{found.answer:.4g}" if found.target is None else f"{found.target!r}, {found.probability:.1%}"
    heading = f"{title}: {answer}"
    if found.symbols is not None:
        figure = _draw_text(found, shades)
    elif found.shape is not None:
        figure = _draw_image(found, shades)
    else:
        figure = _draw_curves(found, shades)
    figure.suptitle(_plain(heading))
    what = "the number" if found.target is None else f"the log-odds of {found.target!r}"
    place = {"location": "right", "pad": 0.02} if found.symbols is None else {"location": "bottom", "shrink": 0.5}
    bar = figure.colorbar(shades, ax=figure.axes, aspect=30, **place)
    bar.set_label(_plain(f"adds to {what}"), fontsize=9)
    return save_picture(figure, out)


def _plain(text: str) -> str:
    """A dollar sign is no mathematics here."""
    return text.replace("$", r"\$")


def _draw_curves(found: Explanation, shades: ScalarMappable) -> Figure:
    """A panel for each channel, its background colored; below, the sums over all channels."""
    assert found.values is not None
    weights = np.abs(found.attributions).sum(axis=0)
    channels = np.sort(np.argsort(-weights, kind="stable")[:MOST_CHANNELS])
    figure = Figure(figsize=(10, 1.6 + 1.7 * len(channels)), layout="constrained")
    panels = figure.subplots(
        len(channels) + 1, 1, sharex=True, squeeze=False, height_ratios=[*[1.7] * len(channels), 1.2]
    ).ravel()
    positions = np.arange(1, len(found.values) + 1)
    for axis, channel in zip(panels, channels, strict=False):
        values = found.values[:, channel]
        room = 0.08 * (float(np.ptp(values)) or 1.0)
        low, high = values.min() - room, values.max() + room
        extent = (0.5, len(values) + 0.5, low, high)
        shown = found.attributions[None, :, channel]
        axis.imshow(shown, aspect="auto", extent=extent, cmap=shades.cmap, norm=shades.norm, interpolation="nearest")
        axis.plot(positions, values, color="black", linewidth=1.1, marker="." if len(values) <= 80 else None)
        axis.set_ylim(low, high)
        axis.grid(visible=False)
        names = found.channels or [f"channel {place + 1}" for place in range(found.values.shape[1])]
        axis.set_ylabel("value" if found.values.shape[1] == 1 else names[channel])
    sums = found.by_position
    panels[-1].bar(positions, sums, width=1.0, color=shades.cmap(np.where(sums > 0, 0.85, 0.15)))
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].axhline(0, color="black", linewidth=0.6)
    panels[-1].set_ylabel("adds")
    panels[-1].set_xlabel("position")
    panels[-1].set_xlim(0.5, len(sums) + 0.5)
    hidden = found.values.shape[1] - len(channels)
    if hidden:
        panels[-1].set_xlabel(f"position ({hidden} channels that matter less are not shown, but are in the sums)")
    return figure


def _draw_image(found: Explanation, shades: ScalarMappable) -> Figure:
    """The picture, and what each pixel adds."""
    assert found.values is not None
    assert found.shape is not None
    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(found.values[:, 0].reshape(found.shape), cmap="gray", interpolation="nearest")
    shown = found.by_position.reshape(found.shape)
    right.imshow(shown, cmap=shades.cmap, norm=shades.norm, interpolation="nearest")
    for axis in (left, right):
        axis.set_axis_off()
    return figure


def _draw_text(found: Explanation, shades: ScalarMappable) -> Figure:
    """The symbols in lines, each on its color."""
    assert found.symbols is not None
    start, stop = _visible(found)
    symbols = [_visible_symbol(symbol) for symbol in found.symbols[start:stop]]
    gap = 1 if max(map(len, symbols)) > 1 else 0  # between words
    places, row, column = [], 0, 0
    for symbol in symbols:
        if column + len(symbol) > LINE and column:
            row, column = row + 1, 0
        places.append((column, row))
        column += len(symbol) + gap
    width = LINE if row else max(column, 48)
    figure = Figure(figsize=(0.4 + CELL[0] * width, 1.4 + CELL[1] * (row + 1)), layout="constrained")
    axis: Axes = figure.subplots()
    boxes = [Rectangle((x - gap / 2, y), len(s) + gap, 1) for (x, y), s in zip(places, symbols, strict=True)]
    colors = shades.to_rgba(found.by_position[start:stop])
    axis.add_collection(PatchCollection(boxes, facecolors=colors, edgecolors="none"))
    brightness = np.asarray(colors)[:, :3] @ (0.299, 0.587, 0.114)
    ink = np.where(brightness < 0.5, "white", "black").tolist()
    axis.add_collection(PathCollection(_outlines(symbols, places), facecolors=ink, edgecolors="none"))
    axis.set_aspect(CELL[1] / CELL[0])
    axis.set_xlim(-0.5, width + 0.5)
    axis.set_ylim(row + 1, 0)
    axis.set_axis_off()
    if stop - start < len(found.symbols):
        axis.set_title(f"positions {start + 1} to {stop} of {len(found.symbols)}")
    return figure


def _outlines(symbols: list[str], places: list[tuple[int, int]]) -> list[Outline]:
    """The symbols as outlines: thousands of them are drawn at once, which as texts take many seconds."""
    font = FontProperties(family="monospace")
    em = 1 / ADVANCE  # in characters, and then in lines
    scale = np.array([em, -em * CELL[0] / CELL[1]])
    drawn: dict[str, Outline] = {}
    empty = Outline(np.zeros((0, 2)))
    with warnings.catch_warnings(action="ignore"):  # a character that the font has not is a box
        for symbol in set(symbols) - {" "}:
            drawn[symbol] = TextPath((0, 0), _plain(symbol), size=1, prop=font, usetex=False)
    found = []
    for symbol, (column, row) in zip(symbols, places, strict=True):
        path = drawn.get(symbol, empty)
        found.append(Outline(np.asarray(path.vertices) * scale + np.array([column, row + 0.75]), path.codes))
    return found


def _visible(found: Explanation) -> tuple[int, int]:
    """The symbols that are drawn: all, or those around the middle of the decisive part."""
    length = len(found.by_position)
    first, last = found.decisive()
    start = max(0, min((first + last) // 2 - MOST_SYMBOLS // 2, length - MOST_SYMBOLS))
    return start, min(length, start + MOST_SYMBOLS)


def _visible_symbol(symbol: str) -> str:
    """What would not show itself."""
    return symbol if symbol == " " or (symbol.isprintable() and symbol) else {"\n": "¶", "\t": "→"}.get(symbol, "�")
