"""What all pictures share: one look, for print and for talks; where they may be written, and how."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longlens.errors import BadInput
from longlens.files import check_out, write_atomic
from longlens.options import shorten

Theme = Literal["light", "dark"]

STYLE: dict[str, Any] = {
    "font.size": 11,
    "figure.titlesize": 13,
    "axes.titlesize": 11.5,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # letters that can be searched and that publishers accept
    "savefig.dpi": 140,
}
# Colors that are told apart by people who do not see all of them (Okabe & Ito 2008), those that show on the background.
INK = {"light": "black", "dark": "#e8e8e8"}
PAPER = {"light": "white", "dark": "#16181d"}
COLORS = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "black"),
    "dark": ("#56b4e9", "#e69f00", "#00b98a", "#cc79a7", "#f0e442", "#ec6a12", "#e8e8e8"),
}
# Five, beside seven colors: 35 lines differ, and each from the next in both.
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)), (0, (9, 2)))
MAP = "viridis"  # from dark to light evenly, for everyone's eyes


@contextmanager
def styled(theme: Theme = "light") -> Iterator[None]:
    """The look of all that is drawn and saved inside; also a decorator."""
    ink, paper = INK[theme], PAPER[theme]
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    look: Any = STYLE | dict.fromkeys(inked, ink) | dict.fromkeys(papers, paper)
    with matplotlib.rc_context(look | {"axes.prop_cycle": cycler(color=COLORS[theme])}):
        yield


def line_look(number: int) -> dict[str, Any]:
    """Color and dashes of a line, for readers of a copy in gray, too."""
    return {"color": f"C{number % len(COLORS['light'])}", "linestyle": DASHES[number % len(DASHES)]}


def ramp(count: int) -> list[tuple[float, ...]]:
    """Colors of lines that follow each other, from dark to light, as far as they show on the background."""
    low, high = (0.4, 1.0) if matplotlib.rcParams["axes.facecolor"] == PAPER["dark"] else (0.0, 0.85)
    return [matplotlib.colormaps[MAP](low + (high - low) * place / max(count - 1, 1)) for place in range(count)]


def without_frame(axes: Axes) -> None:
    """For an image, which a grid and lines around it would disturb."""
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def plain(text: str) -> str:
    """A name that may have any signs, of which $ would begin a formula."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in shorten(text))
    return shown.replace("$", r"\$")


def evenly(count: int, at_most: int) -> list[int]:
    """Some of the numbers 0 … count - 1, with the first and the last."""
    shown = min(count, at_most)
    return [round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)]


def legend_beside(figure: Figure, handles: Sequence[Any]) -> None:
    """On the right of all panels, in as many columns as its height has room for. The figure becomes wider by that."""
    rows = max(1, int(figure.get_figheight() / 0.23) - 1)
    columns = -(-len(handles) // rows)
    if columns:
        longest = max(len(str(handle.get_label())) for handle in handles)
        figure.set_figwidth(figure.get_figwidth() + columns * (0.7 + 0.085 * longest))
        figure.legend(handles=handles, loc="outside right upper", ncols=columns)


def check_picture(out: Path) -> None:
    """Refuse what is no place for a picture, before it is drawn. Its folder is made."""
    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise BadInput(f"out must end in .png, .pdf or .svg, got {out}")
    check_out(out)


def save_picture(figure: Figure, out: Path) -> str:
    """Write a picture, and return the line that says so; the ending decides the format."""
    written = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # of signs that the font has not
        figure.savefig(written, format=out.suffix.lower().removeprefix("."))
    write_atomic(out, written.getvalue())
    return f"written to {out}"
