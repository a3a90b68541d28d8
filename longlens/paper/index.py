"""The index of the paper's artifacts: names, and where they are. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from longlens.errors import BadInput
from longlens.files import read_json, write_json
from longlens.options import nearest
from longlens.paper.study import Study
from longlens.reports.chance import Verdict
from longlens.reports.sheet import Sheet

ARTIFACTS = (  # a module of this room for each
    "table2",
    "table2-cost",
    "table3",
    "table4",
    "figure5",
    "figure6",
    "table7",
    "table8",
    "appendix-c",
    "figure1",
    "figure-eld",
    "figure4",
    "table10",
    "shatter",
    "theorem-b1",
    "alpha-sweep",
    "window-sweep",
    "chunk-sweep",
    "side",
    "length",
    "training",
    "schedule",
    "learning-rate",
    "bidirectional",
)


class Found(NamedTuple):
    """What a computation says of a claim."""

    verdict: Verdict
    because: str  # in a few words
    sentences: list[str]
    tables: Sequence[str] = ()  # in Markdown


@dataclass(frozen=True)
class Computed:
    """An artifact that needs no runs: it is computed at once.

    Args:
        name: Name on the command line.
        title: What it is.
        place: Where the paper has it.
        claim: What the paper says with it.
        compute: Function of the folder for pictures, which returns what to print and what was found.
    """

    name: str
    title: str
    place: str
    claim: str
    compute: Callable[[Path], tuple[list[Any], "Found"]]

    def recorded(self, results: Path) -> "Found | None":
        """What was found before."""
        try:
            return Found(**read_json(results / f"{self.name}.json"))
        except (BadInput, FileNotFoundError, TypeError):
            return None

    def run(self, results: Path) -> list[Any]:
        results.mkdir(parents=True, exist_ok=True)
        printed, found = self.compute(results)
        sheets = [sheet for sheet in printed if isinstance(sheet, Sheet)]
        tables = ["\n\n".join([f"**{sheet.title}**", sheet.to_markdown(), *sheet.notes]) for sheet in sheets]
        write_json(results / f"{self.name}.json", found._replace(tables=tables)._asdict())
        return [*printed, *found.sentences]


Artifact = Study | Computed


def find_artifact(name: str) -> Artifact:
    """An artifact by its name."""
    if name not in ARTIFACTS:
        raise BadInput(f"there is no artifact {name!r}; {nearest(name, [*ARTIFACTS, 'all'])}")
    return import_module(f"longlens.paper.{name.replace('-', '_')}").STUDY
