"""Tables of the paper's artifacts from records, and RESULTS.md from all of them."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from longlens.paper.index import ARTIFACTS, Artifact, Computed, find_artifact
from longlens.paper.records import Record, Records
from longlens.paper.run import (
    MISSING,
    VERDICTS,
    chosen_rate,
    fastest,
    measures_of,
    plan,
    runs_of,
    seconds_left,
    verdict_of,
    weigh_claim,
)
from longlens.paper.study import Cell, Claim, Scale, Study
from longlens.reports.chance import Finding
from longlens.reports.sheet import Column, Sheet

PERCENT = "accuracy"  # the metric that is shown in percent
REASONS = {  # why LaS may not be ahead, and the artifacts whose runs say so
    "Does LaS gain on longer sequences?": "length",
    "Does it gain by longer training?": "training",
    "Does it gain with fewer or with more samples?": "figure6",
    "Does it hang on the schedule of the learning rate?": "schedule",
    "Does it hang on the side of the smoothing?": "side",
}


def list_artifacts(scale: Scale, records: Records, names: Iterable[str] = ()) -> Sheet:
    """The index of all artifacts, or of some: what the paper says with them, and what is known here."""
    columns = [Column("artifact"), Column("claim", wrap=True), Column("done", 0, True), Column("missing", 0, True)]
    columns += [Column("time left", 2, True), Column("verdict", wrap=True), Column("command", 3)]
    sheet = Sheet(f"the paper at scale {scale}", columns)
    for name in names or ARTIFACTS:
        artifact = find_artifact(name)
        command, verdict = f"longlens reproduce {name}{_flag(scale)}", verdict_of(artifact, scale, records)
        if isinstance(artifact, Computed):
            counts, time = ["0", "1"] if verdict == MISSING else ["1", "0"], ""
        else:
            known = plan(artifact.cells(scale), scale, records)
            left = seconds_left(known, records)
            time = "" if not known.missing else "unknown" if left is None else f"{left / 3600:.1f} h of one core"
            failed = f", {len(known.failed)} failed" if known.failed else ""
            counts = [str(len(known.done)), f"{known.missing}{failed}"]
        sheet.rows.append([name, artifact.claim, *counts, time, verdict, command])
    return sheet


def summary(scale: Scale, records: Records, *, ours: bool = False) -> Sheet:
    """What is decided of the paper's claims, or of the questions that it leaves open, for a first look."""
    says = "what the paper leaves open" if ours else "the paper says"
    sheet = Sheet("", [Column(says, wrap=True), Column("here"), Column("in the paper")])
    for artifact in map(find_artifact, ARTIFACTS):
        if ours != (isinstance(artifact, Study) and artifact.ours):
            continue
        if isinstance(artifact, Computed):
            found = artifact.recorded(records.folder.parent)
            verdicts = {artifact.claim: f"{found.verdict}{found.because and f': {found.because}'}"} if found else {}
        else:
            parts = dict.fromkeys(claim.part for claim in artifact.claims(scale))
            verdicts = {part or artifact.claim: verdict_of(artifact, scale, records, part) for part in parts}
        place = re.split("[,;:]", artifact.place)[0]
        sheet.rows += [[claim, verdict, place] for claim, verdict in verdicts.items() if verdict != MISSING]
    return sheet


def counts(scale: Scale, records: Records) -> str:
    """How many claims have which verdict, and how differences compare with the paper's."""
    studies = [artifact for artifact in map(find_artifact, ARTIFACTS) if isinstance(artifact, Study)]
    lines, beside = [], []
    for whose, ours in (("claims of the paper that are weighed by runs", False), ("that it leaves open", True)):
        claims = [(claim, study) for study in studies if study.ours == ours for claim in study.claims(scale)]
        weighed = [(claim, weigh_claim(claim, study, scale, records)) for claim, study in claims]
        verdicts = [MISSING if finding is None else finding.verdict for _, finding in weighed]
        beside += [_beside_paper(claim, finding, _metric(claim, scale)) for claim, finding in weighed if finding]
        if claims:
            tally = ", ".join(f"*{name}* {verdicts.count(name)}" for name in VERDICTS)
            lines.append(f"Of {len(claims)} {whose}: {tally}.")
    if any(beside):
        lines.append(
            f"Of {sum(text is not None for text in beside)} differences with a figure in the paper, "
            f"{beside.count(LESS)} are smaller than it and {beside.count(MORE)} larger, by more than chance would do."
        )
    return " ".join(lines)


def study_sheets(study: Study, scale: Scale, records: Records) -> list[Sheet]:
    """The table of a study, its claims, and its settings."""
    cells = study.cells(scale)
    sheets = [_table(study, cells, scale, records), _measures(study, scale, records)]
    sheets += [_claims(study, scale, records), _settings(cells, scale, records)]
    return [sheet for sheet in sheets if sheet.rows]


def _measures(study: Study, scale: Scale, records: Records) -> Sheet:
    """What was measured of trained models: the mean and the standard deviation over seeds."""
    known = measures_of(study, scale, records)
    names = dict.fromkeys(name for values in known.values() for name in values)
    sheet = Sheet(
        "Measured: mean and deviation over seeds", [Column(""), *(Column(name, number=True) for name in names)]
    )
    for of, found in known.items():
        sheet.rows.append([of, *(_spread("", found[name]) for name in names)])
    return sheet


def _table(study: Study, cells: list[Cell], scale: Scale, records: Records) -> Sheet:
    columns = list(dict.fromkeys(cell.column or cell.task for cell in cells))
    papers = [name for name in columns if any(key[1] == name for key in study.paper)]
    heads = [Column(name, number=True) for name in columns]
    heads += [Column(f"paper: {name}", number=True) for name in papers]
    sheet = Sheet(study.title, [Column(""), *heads])
    for row in dict.fromkeys(cell.row for cell in cells):
        entries = {cell.column or cell.task: _entry(cell, study, scale, records) for cell in cells if cell.row == row}
        published = [study.paper.get((row, name)) for name in papers]
        shown = ["" if value is None else f"{value:g}" for value in published]
        sheet.rows.append([row, *(entries.get(name, "") for name in columns), *shown])
    return sheet


def _entry(cell: Cell, study: Study, scale: Scale, records: Records) -> str:
    """The mean and the standard deviation over seeds."""
    runs, wanted = runs_of(cell, scale, records), cell.count(scale)
    if not runs:
        failed = plan([cell], scale, records).failed
        return "failed" if failed else MISSING
    values = [run.result[study.score] for run in runs if run.result]
    metric = runs[0].result["metric"]  # pyright: ignore[reportOptionalSubscript]
    text = _spread(metric, values)
    return text if len(runs) == wanted else f"{text} ({len(runs)} of {wanted} seeds)"


def _spread(metric: str, values: Sequence[float]) -> str:
    deviation = f" ± {_number(metric, stdev(values))}" if len(values) > 1 else ""
    return f"{_number(metric, mean(values))}{deviation}"


def _number(metric: str, value: float) -> str:
    return f"{100 * value:.1f}" if metric == PERCENT else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _claims(study: Study, scale: Scale, records: Records) -> Sheet:
    columns = [Column("claim", wrap=True), Column("paper", 1, True), Column("here", 0, True), Column("95 %", 2, True)]
    columns += [Column("p", 1, True), Column("seeds", 3, True), Column("samples", 3, True), Column("verdict")]
    sheet = Sheet("Claims: the difference, and where it lies in 95 % of cases, over seeds and test samples", columns)
    for claim in study.claims(scale):
        metric = _metric(claim, scale)
        published = "" if claim.paper is None else f"{claim.paper:+.2f}" if metric == PERCENT else f"{claim.paper:+.3g}"
        found = weigh_claim(claim, study, scale, records)
        if found is None:
            sheet.rows.append([claim.text, published, *[""] * 5, MISSING])
            continue
        low, here, high = (_signed(metric, found.estimate + side * found.reach) for side in (-1, 0, 1))
        numbers = [here, f"{low} … {high}", f"{found.p:.2g}", str(found.seeds)]
        numbers.append(f"{found.samples:,}" if found.samples else "")
        sheet.rows.append(
            [claim.text, published, *numbers, found.verdict + (_beside_paper(claim, found, metric) or "")]
        )
    return sheet


def _metric(claim: Claim, scale: Scale) -> str:
    return "" if claim.measures else claim.cells[0][1].config(scale, 0, None).task.metric


def _signed(metric: str, value: float) -> str:
    text = _number(metric, value)
    return text if text.startswith("-") else f"+{text}"


LESS, MORE = ", less than the paper's", ", more than the paper's"


def _beside_paper(claim: Claim, found: Finding, metric: str) -> str | None:
    """Whether the paper's difference, if it has one, lies outside of what chance explains."""
    if claim.paper is None:
        return None
    ahead = (claim.paper / 100 if metric == PERCENT else claim.paper) - found.estimate
    return LESS if ahead > found.reach else MORE if -ahead > found.reach else ""


def _settings(cells: Iterable[Cell], scale: Scale, records: Records) -> Sheet:
    """What runs on each set cost, by the fastest of each layer, and the learning rates that were chosen."""
    numbers = {"parameters": 0, "steps": 0, "batch": 0, "training samples": 1, "test samples": 1, "minutes a run": 1}
    columns = [Column("task", wrap=True), *(Column(name, rank, number=True) for name, rank in numbers.items())]
    sheet = Sheet("Settings", [*columns, Column("learning rates", wrap=True)])
    by_set: dict[tuple[str, int | None], list[Cell]] = {}
    for cell in cells:
        config = cell.config(scale, 0, None)
        by_set.setdefault((config.task.title, config.training.train_samples), []).append(cell)
    for (title, train_samples), group in by_set.items():
        runs = [run for cell in group for run in runs_of(cell, scale, records)]
        if not runs:
            continue
        chosen = {cell.row: chosen_rate(cell.like or cell, scale, records) for cell in group}
        rates = ", ".join(f"{row} {rate:g}" for row, rate in chosen.items() if rate is not None)
        sheet.rows.append(
            [
                title,
                _range(runs, "parameters"),
                _range(runs, "steps"),
                str(runs[0].config.training.batch_size),
                "all" if train_samples is None else f"{train_samples:,}",
                _range(runs, "test_samples"),
                _between(sorted({f"{seconds / 60:.1f}" for seconds in fastest(runs).values()}, key=float)),
                rates or f"{runs[0].config.training.lr:g}",
            ]
        )
    return sheet


def _range(runs: list[Record], key: str) -> str:
    return _between([f"{value:,}" for value in sorted({run.result[key] for run in runs if run.result})])


def _between(ordered: Sequence[str]) -> str:
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} – {ordered[-1]}"


def write_results(scale: Scale, records: Records) -> str:
    """RESULTS.md: the index, and a section for each artifact."""
    return "".join(f"{line}\n" for line in _lines(scale, records))


INTRODUCTION = """# Results

Written by `longlens reproduce --report` from the records in `results/`: no figure is typed by hand.
[`docs/reproduction.md`](docs/reproduction.md) has the rules by which the settings are scaled.
A claim *holds* or *does not hold* if the difference has its sign, or the other one, and chance alone would give one as
large in fewer than 1 of 20 cases, over seeds and test samples together. Otherwise it is *not decided*.

{counts}
"""
SMALL = """At mini, models are small, and most see a small part of the paper's samples: that a difference is smaller or
larger here says nothing of full training.
"""


def _lines(scale: Scale, records: Records) -> Iterable[str]:
    yield INTRODUCTION.format(counts=counts(scale, records)) + (SMALL if scale == "mini" else "")
    for ours in (False, True):
        yield from (summary(scale, records, ours=ours).to_markdown(), "")
    yield from _reasons(scale, records)
    yield from ("", "All artifacts, and the runs that they are made of (`longlens reproduce --list`):", "")
    yield list_artifacts(scale, records).to_markdown()
    for name in ARTIFACTS:
        artifact = find_artifact(name)
        yield from ("", f"## {name}: {artifact.title}", "", f"{artifact.place}. {artifact.claim}", "")
        yield f"`longlens reproduce {name}{_flag(scale)}`"
        if isinstance(artifact, Computed):
            found = artifact.recorded(records.folder.parent)
            yield ""
            yield f"**{found.verdict}.** {' '.join(found.sentences)}" if found else f"**{MISSING}**"
            for table in found.tables if found else ():
                yield from ("", table)
        else:
            if artifact.note:
                yield from ("", artifact.note)
            for sheet in study_sheets(artifact, scale, records):
                yield from ("", f"**{sheet.title}**", "", sheet.to_markdown())
        picture = picture_of(artifact, records.folder)
        if picture.is_file():
            yield from ("", f"![{artifact.title}]({picture.relative_to(records.folder.parent.parent).as_posix()})")
    yield from ("", *_environments(records))


def _reasons(scale: Scale, records: Records) -> Iterable[str]:
    """What runs say of likely reasons, where LaS is not ahead."""
    yield from ("Where LaS is not ahead, why may that be?", "")
    for question, name in REASONS.items():
        study = find_artifact(name)
        assert isinstance(study, Study)
        yield f"- {question} (`longlens reproduce {name}{_flag(scale)}`)"
        for claim in study.claims(scale):
            found = weigh_claim(claim, study, scale, records)
            yield f"  - {claim.text}: {MISSING if found is None else found.verdict}"


def picture_of(artifact: Artifact, folder: Path) -> Path:
    """Where the picture of an artifact is or will be."""
    return (folder.parent if isinstance(artifact, Computed) else folder) / f"{artifact.name}.png"


def _flag(scale: Scale) -> str:
    return "" if scale == "mini" else f" --scale {scale}"


def _environments(records: Records) -> Iterable[str]:
    """What the runs were made on."""
    made = sorted(
        {f"torch {run.environment['torch']} on {run.environment['processor']}" for run in records.found.values()}
    )
    if made:
        yield f"{len(records.found):,} runs; {'; '.join(made)}."
