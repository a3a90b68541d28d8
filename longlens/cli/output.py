"""What a command prints: tables for a terminal or, with ``--format`` and ``--out``, for papers and programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, ConsoleOptions

from longlens.errors import BadInput
from longlens.files import check_out
from longlens.options import Option
from longlens.reports.sheet import Sheet, plain_text

Format = Literal["terminal", "markdown", "latex", "csv", "json"]
ENDINGS: dict[str, Format] = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json"}
BESIDE = (".md", ".tex", ".csv")  # endings of a table where --out is a JSON file of all results otherwise

FORMAT = Option(
    "format", Format, "terminal", "Format in which the table is printed, or written to --out. Sentences go to stderr."
)
OUT = Option("out", Path | None, None, "File to write the table to: .md, .tex, .csv, .json, or any with --format.")


@dataclass(frozen=True)
class Output:
    """How tables are printed, and where to and how they are written."""

    printed: Format = "terminal"
    out: Path | None = None
    written: Format = "markdown"


class Told(Sheet):
    """A table that a terminal shows as sentences: its notes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        yield from map(plain_text, self.notes)


class Failed(SystemExit):
    """The end of a command that did its work and found that something is wrong: what it prints, and exit code 1."""

    def __init__(self, printed: Any):
        super().__init__(1)
        self.printed = printed


def table_options(options: Mapping[str, Option], endings: Sequence[str]) -> dict[str, Option]:
    """The options of a command that prints tables, with ``--format`` and ``--out``. A command with an ``--out`` of its
    own keeps it, but for the given endings."""
    found = {**options, "format": FORMAT}
    if "out" not in options:
        return found | {"out": OUT}
    if endings:
        own = options["out"]
        found["out"] = replace(own, help=f"{own.help} With the ending {_listed(endings)}, the table is written.")
    return found


def _listed(endings: Sequence[str]) -> str:
    return f"{', '.join(endings[:-1])} or {endings[-1]}"


def take_output(values: dict[str, Any], endings: Sequence[str]) -> Output:
    """What the flags say about tables. ``--out`` stays in the values where the command has one of its own, unless the
    file has one of the given endings."""
    chosen: Format | None = values.pop("format", None)
    out: Path | None = values.get("out")
    if out is not None and chosen not in (None, "terminal") and not endings:
        raise BadInput("--format is for what is shown: leave it out with --out, whose ending says the format")
    own = tuple(endings) != tuple(ENDINGS)
    if out is None and not own:
        values.pop("out", None)  # "none" was given
    if out is None or (own and out.suffix.lower() not in endings):
        return Output(chosen or "terminal")
    del values["out"]
    meant = ENDINGS.get(out.suffix.lower())
    chosen = None if chosen == "terminal" else chosen
    if meant is None and chosen is None:
        raise BadInput(f"out must end in {_listed(endings)}, or --format say what is written, got {out}")
    if meant is not None and chosen is not None and meant != chosen:
        raise BadInput(
            f"--format {chosen} and --out {out} contradict each other: leave out --format, or change the ending"
        )
    check_out(out)
    return Output("terminal", out, chosen or meant or "markdown")
