"""What a table or figure of the paper is made of: its cells, which are runs, and its claims, which compare them.

A learning rate is chosen for each cell, from the same values for all: by the validation accuracy of the first seed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longlens.training.config import Config, Runtime, load_recipe

Scale = Literal["smoke", "mini", "paper"]
PLAIN_AND_LAS = {"Transformer": "transformer", "LaS": "las"}  # the rows of many tables, and their layers

# At scale paper beside the rate of the recipe, as in Appendix A.
RATES: Mapping[str, tuple[float, ...]] = {"smoke": (), "mini": (1e-3, 3e-3), "paper": (1e-3, 1e-4)}
SEEDS: Mapping[str, int] = {"smoke": 2, "mini": 3, "paper": 3}


@dataclass(frozen=True)
class Cell:
    """An entry of a table: a layer on a task, trained once for each seed.

    Args:
        row: Name of its row.
        task: Name of the task.
        mixer: Name of the mixer.
        changes: What differs from the recipe of the task.
        like: Cell whose learning rate it takes; by default one is chosen for it.
        column: Name of its column; by default the task.
        seeds: Number of seeds; by default that of the scale.
    """

    row: str
    task: str
    mixer: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    like: "Cell | None" = None
    column: str = ""
    seeds: int | None = None

    def config(self, scale: Scale, seed: int, lr: float | None) -> Config:
        """The run of a seed; ``lr`` is the recipe's if it is None."""
        changes = {**self.changes, "training.seed": seed} | ({} if lr is None else {"training.lr": lr})
        return _resolve(scale, self.task, self.mixer, json.dumps(changes))

    def rates(self, scale: Scale) -> tuple[float, ...]:
        """The learning rates to choose from."""
        if "training.lr" in self.changes:
            return ()
        own = (self.config(scale, 0, None).training.lr,) if scale == "paper" else ()
        return tuple(dict.fromkeys((*own, *RATES[scale])))

    def called(self, scale: Scale) -> str:
        """The name of its column; that of a task says whether its set is a stand-in."""
        return self.column or self.config(scale, 0, None).task.slug

    def count(self, scale: Scale) -> int:
        """The number of seeds."""
        return SEEDS[scale] if scale == "smoke" else self.seeds or SEEDS[scale]


@cache
def _resolve(scale: Scale, task: str, mixer: str, changes: str) -> Config:
    return load_recipe(scale, task, [mixer]).resolve(task, mixer, json.loads(changes))


def chunk_size(scale: Scale, task: str) -> int:
    """The size of the chunks of LaS-chunk in the recipe of a task."""
    return load_recipe(scale, task).mixers["las-chunk"]["chunk_size"]


def option(scale: Scale, task: str, name: str) -> Any:
    """An option of LaS in the recipe of a task."""
    return load_recipe(scale, task).resolve(task, "las").mixer.options[name]


def sweep_task(scale: Scale) -> str:
    """On which options of LaS are varied."""
    return "listops" if scale == "smoke" else "image"


def las(scale: Scale, row: str = "LaS", column: str = "") -> Cell:
    return Cell(row, sweep_task(scale), "las", column=column)


def transformer(scale: Scale) -> Cell:
    return Cell("Transformer", sweep_task(scale), "transformer")


class Claim(NamedTuple):
    """What the paper says, as a sum of metrics that is above ``least`` if it is right: LaS minus a Transformer."""

    text: str
    cells: Sequence[tuple[float, Cell]]
    paper: float | None = None  # the paper's own figure of the same sum
    least: float = 0.0
    measures: Sequence[tuple[float, str, str]] = ()  # or of what is measured of trained models: of what, and what of it
    part: str | None = None  # of what the study claims, if it is to be summed up by itself


def better(text: str, winner: Cell, loser: Cell, paper: float | None = None) -> Claim:
    """That one is better than the other, whichever way the metric counts."""
    return Claim(text, [(1.0, winner), (-1.0, loser)], paper)


@dataclass(frozen=True)
class Study:
    """An artifact of the paper that is made of runs.

    Args:
        name: Name on the command line.
        title: Title of the table.
        place: Where the paper has it.
        claim: What the paper says with it.
        cells: Cells at a scale.
        claims: Claims at a scale.
        paper: The paper's own figures, by row and column.
        ours: Whether the paper leaves the question open.
        note: What a reader should know of its runs.
        axis: Name of the horizontal axis of a picture with a line for each row and a point for each column.
        score: What is compared: the test set, or the validation set.
        curves: Draw learning curves.
        draw: Draws another picture, from trained models: a function of the scale, the records, where to run, and the
            picture to write. What it measures of the models is written beside it (see ``measures_of``).
    """

    name: str
    title: str
    place: str
    claim: str
    cells: Callable[[Scale], list[Cell]]
    claims: Callable[[Scale], list[Claim]]
    paper: Mapping[tuple[str, str], float] = field(default_factory=dict)
    ours: bool = False
    note: str = ""
    axis: str | None = None
    score: Literal["test", "valid"] = "test"
    curves: bool = False
    draw: Callable[[Scale, Any, Runtime, Path], str] | None = None


def las_beside_transformer(
    paper: Mapping[str, tuple[float, float]],
    *,
    las_is_better: bool,
    seeds: int | None = None,
    changes: Callable[[Scale], Mapping[str, Any]] = lambda scale: {},
) -> dict[str, Any]:
    """Cells, claims and figures of a table with two rows, a Transformer and LaS, and a column for each task: by the
    paper's figures of both, and what differs from the recipes at a scale."""

    def row(task: str, scale: Scale) -> tuple[Cell, Cell]:
        plain, ours = (Cell(name, task, mixer, changes(scale), seeds=seeds) for name, mixer in PLAIN_AND_LAS.items())
        return plain, ours

    def claim(task: str, scale: Scale) -> Claim:
        plain, ours = row(task, scale)
        margin = abs(paper[task][1] - paper[task][0])
        if las_is_better:
            return better(f"LaS is better than a Transformer on {ours.called(scale)}", ours, plain, margin)
        return better(f"a Transformer is better than LaS on {ours.called(scale)}", plain, ours, margin)

    return {
        "cells": lambda scale: [cell for task in paper for cell in row(task, scale)],
        "claims": lambda scale: [claim(task, scale) for task in paper],
        "paper": {(name, task): both[k] for task, both in paper.items() for k, name in enumerate(PLAIN_AND_LAS)},
    }


def growing_lead(
    cell: Callable[[str, Any, Scale], Cell], places: Callable[[Scale], Sequence[Any]], here: str, there: str
) -> dict[str, Any]:
    """Cells and claims of a table with the same two rows, and a column for each place: LaS is ahead in the last one,
    which is ``here``, and by more than in the first, which is ``there``."""

    def claims(scale: Scale) -> list[Claim]:
        first, *_, last = places(scale)
        ours, plain = (cell(row, last, scale) for row in ("LaS", "Transformer"))
        lead = better(f"LaS is better than a Transformer {here.format(last)}", ours, plain)
        before = [(-1.0, cell("LaS", first, scale)), (1.0, cell("Transformer", first, scale))]
        more = f"LaS leads by more {here.format(last)} than {there.format(first)}"
        return [lead, Claim(more, [*lead.cells, *before])]

    return {
        "cells": lambda scale: [cell(row, place, scale) for row in PLAIN_AND_LAS for place in places(scale)],
        "claims": claims,
    }
