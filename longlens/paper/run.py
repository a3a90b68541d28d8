"""Run what artifacts of the paper are made of, and what is known of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import get_args

import numpy as np

from longlens.errors import BadInput
from longlens.files import read_json
from longlens.paper.index import Artifact, Computed
from longlens.paper.records import Record, Records, record_name
from longlens.paper.study import Cell, Claim, Scale, Study
from longlens.reports.chance import Finding, Trial, Verdict, weigh, weigh_seeds
from longlens.training.config import Config, Engine, Runtime
from longlens.training.many import run_many
from longlens.training.run import higher_is_better

MISSING = "missing"  # instead of a verdict, while runs are
VERDICTS = (*get_args(Verdict), MISSING)


@dataclass
class Plan:
    """The runs of some cells: those that ended, those that can start, and those that wait for the choice of a learning
    rate."""

    done: list[Record] = field(default_factory=list)
    ready: list[Config] = field(default_factory=list)
    failed: list[Record] = field(default_factory=list)
    waiting: list[Config] = field(default_factory=list)  # at any rate

    @property
    def missing(self) -> int:
        return len(self.ready) + len(self.waiting)


def plan(cells: Iterable[Cell], scale: Scale, records: Records) -> Plan:
    """What is there of these cells. A run that failed can start again."""
    found, seen = Plan(), set()
    for cell in cells:
        configs, later = _configs(cell, scale, records)
        found.waiting += later
        for config in configs:
            if (name := record_name(config)) in seen:
                continue
            seen.add(name)
            record = records.find(config)
            if record is not None and record.result is not None:
                found.done.append(record)
                continue
            found.ready.append(config)
            if record is not None:
                found.failed.append(record)
    return found


def _configs(cell: Cell, scale: Scale, records: Records) -> tuple[list[Config], list[Config]]:
    """The runs of a cell that are known now, and the others that there will be."""
    tuned = cell.like or cell
    trials = _trials(tuned, scale)
    rate = chosen_rate(tuned, scale, records)
    if trials and rate is None:
        first = int(cell is tuned)  # of which the first seed is among the trials
        return trials, [cell.config(scale, seed, None) for seed in range(first, cell.count(scale))]
    return [*trials, *(cell.config(scale, seed, rate) for seed in range(cell.count(scale)))], []


def _trials(cell: Cell, scale: Scale) -> list[Config]:
    """The first seed at all learning rates."""
    return [cell.config(scale, 0, rate) for rate in cell.rates(scale)]


def chosen_rate(cell: Cell, scale: Scale, records: Records) -> float | None:
    """The learning rate that is best on the validation set; None while one of the trials has not ended, or if there is
    nothing to choose."""
    ended = [records.find(config) for config in _trials(cell, scale)]
    if not ended or any(record is None for record in ended):
        return None
    scores = [(record.result["valid"], record) for record in ended if record is not None and record.result]
    if not scores:  # all have failed, and the first is as good as any
        return cell.rates(scale)[0]
    metric = scores[0][1].result["metric"]  # pyright: ignore[reportOptionalSubscript]
    best = (max if higher_is_better(metric) else min)(scores, key=lambda entry: entry[0])
    return best[1].config.training.lr


def runs_of(cell: Cell, scale: Scale, records: Records) -> list[Record]:
    """The finished runs of a cell at its learning rate, by their seeds."""
    tuned = cell.like or cell
    rate = chosen_rate(tuned, scale, records)
    if rate is None and tuned.rates(scale):
        return []
    found = [records.find(cell.config(scale, seed, rate)) for seed in range(cell.count(scale))]
    return [record for record in found if record is not None and record.result is not None]


def measures_of(study: Study, scale: Scale, records: Records) -> dict[str, dict[str, list[float]]]:
    """What was measured of trained models, and is written beside the picture: of what, what of it, a number for each
    seed. Nothing if other runs than those of the study were measured."""
    try:
        found = read_json(records.folder / f"{study.name}.json")
        runs = [record_name(run.config) for cell in study.cells(scale) for run in runs_of(cell, scale, records)]
        return found["measures"] if found["runs"] == runs else {}
    except (BadInput, FileNotFoundError, LookupError, TypeError):
        return {}


def weigh_claim(claim: Claim, study: Study, scale: Scale, records: Records, *, last: bool = False) -> Finding | None:
    """What the runs say, by their best checkpoint on the validation set or by the last; None while some are missing."""
    if claim.measures:
        known = measures_of(study, scale, records)
        series = [known.get(of, {}).get(what, []) for _, of, what in claim.measures]
        if any(len(values) < study.cells(scale)[0].count(scale) for values in series):
            return None
        by_seed = [weight * np.array(values) for (weight, *_), values in zip(claim.measures, series, strict=True)]
        return weigh_seeds(np.sum(by_seed, axis=0), claim.least)
    terms = [(weight, runs_of(cell, scale, records)) for weight, cell in claim.cells]
    wanted = [cell.count(scale) for _, cell in claim.cells]
    if any(len(found) < count for (_, found), count in zip(terms, wanted, strict=True)):
        return None
    metric = next(record.result["metric"] for _, found in terms for record in found if record.result)
    score = f"{study.score}_last" if last else study.score
    return weigh([(weight, _trials_of(found, score)) for weight, found in terms], metric, claim.least)


def _trials_of(records: list[Record], score: str) -> list[Trial]:
    """Scores of single samples are those of the test set, by the best checkpoint; those by the last vary as much."""
    samples = score.startswith("test")
    return [Trial(run.result[score], run.scores if samples else None) for run in records if run.result]


def verdict_of(artifact: Artifact, scale: Scale, records: Records, part: str | None = None) -> str:
    """The verdict of all claims together, or of those of a part: the one that all have, or how many have which, as in
    ``holds in 3, missing in 1``."""
    if isinstance(artifact, Computed):
        found = artifact.recorded(records.folder.parent)
        return MISSING if found is None else found.verdict
    claims = [claim for claim in artifact.claims(scale) if part in (None, claim.part)]
    findings = [weigh_claim(claim, artifact, scale, records) for claim in claims]
    counts = Counter(finding.verdict if finding else MISSING for finding in findings)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} in {counts[name]}" for name in VERDICTS if name in counts)


def run_cells(
    cells: Sequence[Cell],
    scale: Scale,
    records: Records,
    runtime: Runtime,
    *,
    engine: Engine,
    jobs: int,
    address: str | None,
) -> None:
    """Run what is missing, the trials of learning rates first, with those that failed before; records are written as
    runs end. A run that fails is tried once, and the others go on."""
    tried: set[str] = set()
    while True:
        records.read()
        known = plan(cells, scale, records.without_failures(but=tried))
        ready = {name: config for config in known.ready if (name := record_name(config)) not in tried}
        if not ready:
            return
        tried |= ready.keys()
        run_many([*ready.values()], runtime, engine=engine, jobs=jobs, address=address, ended=records.add)


def seconds_left(found: Plan, records: Records) -> float | None:
    """By the fastest run of the same layer, task and steps, which shared its core the least, or as long as most layers
    take; None if no run has these."""

    @cache
    def fastest(title: str, steps: int | None) -> dict[str, float]:
        """The seconds of the fastest run of each layer."""
        found: dict[str, float] = {}
        for run in records.found.values():
            if run.result and run.config.task.title == title and run.config.training.steps == steps:
                name, seconds = run.config.mixer.name, run.result["seconds"]
                found[name] = min(seconds, found.get(name, seconds))
        return found

    seconds = 0.0
    for config in (*found.ready, *found.waiting):
        known = fastest(config.task.title, config.training.steps)
        if not known:
            return None
        seconds += known.get(config.mixer.name) or median(known.values())
    return seconds
