"""The page as one text: templates, styles, scripts and data, all inside of it."""

import base64
import hashlib
import html
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from longlens import __version__
from longlens.reports.page.boards import make_boards, show_time
from longlens.reports.page.command import command_of
from longlens.reports.page.entries import Entry, total_steps, without_repeats
from longlens.reports.page.samples import Shown
from longlens.reports.sheet import Sheet
from longlens.training.run import show_metric

SCRIPTS = ("vendor/plotly-basic.min.js", "charts.js", "page.js")
SHAPES = (  # of the marks of layers, on a field from -5 to 5; the names are those of plotly
    ("circle", "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z"),
    ("square", "M-3.5 -3.5H3.5V3.5H-3.5Z"),
    ("diamond", "M0 -5L5 0L0 5L-5 0Z"),
    ("triangle-up", "M0 -4.5L4.5 3.5H-4.5Z"),
    ("cross", "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z"),
    ("triangle-down", "M0 4.5L4.5 -3.5H-4.5Z"),
    ("hexagon", "M-4.3 -2.5L0 -5L4.3 -2.5V2.5L0 5L-4.3 2.5Z"),
)
DASHES = ("solid", "8px,3px", "2px,3px", "10px,3px,2px,3px", "4px,2px")
COLORS = 8  # of the palette in style.css


@dataclass(frozen=True)
class Figure:
    """A picture with what it shows."""

    title: str
    text: str
    address: str  # data:…
    is_small: bool = False  # others fit beside it


@dataclass(frozen=True)
class Artifact:
    """A table, figure or theorem of the paper, beside ours."""

    title: str
    claim: str
    place: str
    verdict: str
    sentences: list[str] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)


@dataclass(frozen=True)
class Still:
    """What does not change while runs train."""

    title: str = "LongLens report"
    summary: Sheet | None = None  # the paper's claims
    artifacts: list[Artifact] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    samples: list[Shown] = field(default_factory=list)


def style_of(number: int) -> dict[str, Any]:
    """How a layer looks in all charts: color, dash and mark all change from one to the next, so that each is enough."""
    name, path = SHAPES[number % len(SHAPES)]
    return {"color": number % COLORS, "dash": DASHES[number % len(DASHES)], "mark": name, "path": path}


@cache
def _environment() -> Environment:
    """Every value is escaped, whatever its name."""
    found = Environment(
        loader=PackageLoader("longlens.reports.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"show_time": show_time, "command_of": command_of, "show_metric": show_metric, "pretty": _pretty}
    return found


def _pretty(values: Any) -> str:
    """JSON between tags, escaped but for its quotes: their escapes would be a fifth of the list of runs."""
    return html.escape(json.dumps(values, indent=1), quote=False)


@cache
def _asset(name: str) -> str:
    return (files("longlens.reports.page") / name).read_text(encoding="utf-8")


@cache
def content_policy() -> str:
    """Nothing is loaded, nothing is sent but to where the page comes from, and only our scripts run."""
    digests = (base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() for name in SCRIPTS)
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    rules = ["default-src 'none'", f"script-src {scripts}", "style-src 'unsafe-inline'", "img-src data: blob:"]
    return "; ".join([*rules, "connect-src 'self'", "base-uri 'none'", "form-action 'none'"])


@dataclass(frozen=True)
class Changing:
    """What changes while runs train: parts of the page by their ids, and the data of the charts."""

    parts: dict[str, str]
    data: dict[str, Any]

    @property
    def version(self) -> str:
        text = json.dumps([self.parts, self.data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def draw_changing(entries: Iterable[Entry]) -> Changing:
    """The parts of the page that are made of runs."""
    found = without_repeats(entries)
    boards = make_boards(found)
    layers = sorted({row.layer for board in boards for row in board.rows})
    styles = {layer: style_of(number) for number, layer in enumerate(layers)}
    of_rows = [(entry, row.differs) for board in boards for row in board.rows for entry in row.entries]
    values = {
        "entries": found,
        "runs": [*of_rows, *((entry, "") for entry in found if entry.config is None)],
        "boards": boards,
        "styles": styles,
        "open": [_progress(entry) for entry in found if entry.state in ("training", "stopped")],
        "tasks": sorted({board.task for board in boards}),
        "scales": sorted({board.scale for board in boards}),
    }
    names = ("counts", "filters", "live", "board", "cards", "runs")
    parts = {name: _environment().get_template(f"{name}.html").render(values) for name in names}
    return Changing(parts, {"boards": [board.chart() for board in boards if board.rows], "styles": styles})


def _progress(entry: Entry) -> dict[str, Any]:
    """A run that is at work, or was."""
    assert entry.config is not None
    steps = total_steps(entry.config)
    left = entry.seconds_left(steps)
    evaluated = [line for line in entry.metrics if line["split"] == "valid"]
    trained = [line["loss"] for line in entry.metrics if "loss" in line and line["split"] == "train"]
    metric = entry.metric or entry.config.task.metric
    return {
        "entry": entry,
        "config": entry.config,
        "steps": steps,
        "part": min(1.0, entry.step / steps) if steps else 0.0,
        "left": "" if left is None else f"{show_time(left)} left",
        "quiet": show_time(max(0.0, time.time() - entry.written)),
        "loss": trained[-1] if trained else None,
        "valid": evaluated[-1].get(metric) if evaluated else None,
        "metric": metric,
    }


def render_page(still: Still, changing: Changing, *, follows: bool = False) -> str:
    """The whole page; one that ``follows`` asks the server, from which it comes, for what has changed."""
    data = {**changing.data, "version": changing.version, "follows": follows}
    return (
        _environment()
        .get_template("page.html")
        .render(
            still=still,
            parts=changing.parts,
            data=data,
            style=_asset("style.css"),
            scripts=[_asset(name) for name in SCRIPTS],
            policy=content_policy(),
            version=__version__,
            written=time.strftime("%Y-%m-%d %H:%M"),
            follows=follows,
        )
    )
