"""Tables of the paper's artifacts from records, and RESULTS.md from all of them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from longlens.paper.index import ARTIFACTS, Artifact, Computed, find_artifact
from longlens.paper.records import Record, Records, record_name
from longlens.paper.run import (
    MISSING,
    VERDICTS,
    chosen_rate,
    measures_of,
    plan,
    runs_of,
    seconds_left,
    verdict_of,
    weigh_claim,
)
from longlens.paper.study import Cell, Claim, Scale, Study
from longlens.reports.chance import LEVEL, Finding
from longlens.reports.sheet import Column, Sheet

PERCENT = "accuracy"  # the metric that is shown in percent
REASONS = {  # why LaS may not be ahead, and the artifacts whose runs say so
    "Does LaS gain on longer sequences?": "length",
    "Does it gain by longer training?": "training",
    "Does it gain with fewer or with more samples?": "figure6",
    "Does it hang on the schedule of the learning rate?": "schedule",
    "Does it hang on the rates that are offered?": "learning-rate",
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
    columns = [Column(says, wrap=True), Column("here", wrap=True), Column("difference", 1), Column("in the paper", 2)]
    sheet = Sheet("", [*columns, Column("artifact")])
    for artifact in map(find_artifact, ARTIFACTS):
        if ours != (isinstance(artifact, Study) and artifact.ours):
            continue
        if isinstance(artifact, Computed):
            found = artifact.recorded(records.folder.parent)
            verdict = f"{found.verdict}{found.because and f': {found.because}'}" if found else MISSING
            sheet.rows.append([artifact.claim, verdict, "", "", artifact.name])
            continue
        for part in dict.fromkeys(claim.part for claim in artifact.claims(scale)):
            verdict = verdict_of(artifact, scale, records, part)
            differences = _differences(artifact, scale, records, part)
            sheet.rows.append([part or artifact.claim, verdict, *differences, artifact.name])
    return sheet


def _differences(study: Study, scale: Scale, records: Records, part: str | None) -> tuple[str, str]:
    """Between which the differences of a study lie, here and in the paper, if they are of one metric."""
    claims = [claim for claim in study.claims(scale) if claim.part == part]
    metrics = {_metric(claim, scale) for claim in claims}
    if len(metrics) > 1 or any(claim.least or claim.measures for claim in claims):
        return "", ""
    found = [finding for claim in claims if (finding := weigh_claim(claim, study, scale, records))]
    here = sorted(finding.estimate for finding in found)
    metric = metrics.pop()
    paper = sorted(claim.paper / (100 if metric == PERCENT else 1) for claim in claims if claim.paper is not None)
    unit = {PERCENT: "points", "r2": "of R²"}.get(metric, metric.replace("_", " "))
    shown = [_between([_signed(metric, value) for value in values], " … ") for values in (here, paper)]
    return f"{shown[0]} {unit}" if here else "", shown[1]


def counts(scale: Scale, records: Records) -> str:
    """How many claims have which verdict, how much of that may be chance, and how differences compare with the
    paper's."""
    studies = [artifact for artifact in map(find_artifact, ARTIFACTS) if isinstance(artifact, Study)]
    claims = [(claim, study) for study in studies for claim in study.claims(scale)]
    weighed = [(claim, study, weigh_claim(claim, study, scale, records)) for claim, study in claims]
    lines = []
    for whose, ours in (("claims of the paper that are weighed by runs", False), ("that it leaves open", True)):
        verdicts = [found.verdict if found else MISSING for _, study, found in weighed if study.ours == ours]
        if verdicts:
            tally = ", ".join(f"*{name}* {verdicts.count(name)}" for name in VERDICTS)
            lines.append(f"Of {len(verdicts)} {whose}: {tally}.")
    known = [(claim, study, found) for claim, study, found in weighed if found]
    beside = [_beside_paper(claim, found, _metric(claim, scale)) for claim, _, found in known]
    if any(beside):
        lines.append(
            f"Of {sum(text is not None for text in beside)} differences with a figure in the paper, "
            f"{beside.count(LESS)} are smaller than it and {beside.count(MORE)} larger, by more than chance would do."
        )
    return "\n".join(f"- {line}" for line in (*lines, *_doubts(known, studies, scale, records)))


def _doubts(
    known: list[tuple[Claim, Study, Finding]], studies: list[Study], scale: Scale, records: Records
) -> Iterable[str]:
    """What the single verdicts do not tell: that they are many, and what hangs on the checkpoint and on the rates."""
    from scipy import stats  # half a second to import

    chances = [found.p for *_, found in known if not math.isnan(found.p)]
    decided = sum(p < LEVEL for p in chances)
    if decided:
        remain = int((stats.false_discovery_control(chances) < LEVEL).sum())
        yield (
            f"Each of the {len(known)} is weighed by itself: if no difference was real, chance would still decide "
            f"about {LEVEL * len(known):.0f}. Of the {decided} that are decided, {remain} remain at a false-discovery "
            f"rate of {100 * LEVEL:g} % (Benjamini & Hochberg), if p-values are taken as they are: of three seeds, "
            "small ones are too small."
        )
    last = [
        (found, weigh_claim(claim, study, scale, records, last=True))
        for claim, study, found in known
        if study.score == "test" and not claim.measures
    ]
    others = sum(after is not None and after.verdict != found.verdict for found, after in last)
    if others:
        yield (
            f"By the last checkpoint of each run, instead of the best on the validation set, {others} of {len(last)} "
            "verdicts would be others."
        )
    tuned = [cell.like or cell for study in studies for cell in study.cells(scale)]
    offered = {record_name(cell.config(scale, 0, None)): cell for cell in tuned}.values()
    rates = [(rate, max(cell.rates(scale))) for cell in offered if (rate := chosen_rate(cell, scale, records))]
    largest = sum(rate == most for rate, most in rates)
    if largest:
        yield (
            f"{largest} of {len(rates)} models took the largest learning rate that was offered: a larger one may suit "
            "them better."
        )


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
    columns = {cell.column or cell.task: cell.called(scale) for cell in cells}
    papers = [name for name in columns if any(key[1] == name for key in study.paper)]
    heads = [Column(title, number=True) for title in columns.values()]
    heads += [Column(f"paper: {name}", number=True) for name in papers]
    sheet = Sheet(study.title, [Column(""), *heads, Column("parameters", 1, number=True)])
    for row in dict.fromkeys(cell.row for cell in cells):
        found = {cell.column or cell.task: cell for cell in cells if cell.row == row}
        entries = [_entry(found[name], study, scale, records) if name in found else "" for name in columns]
        published = [study.paper.get((row, name)) for name in papers]
        shown = ["" if value is None else f"{value:g}" for value in published]
        runs = [run for cell in found.values() for run in runs_of(cell, scale, records)]
        sheet.rows.append([row, *entries, *shown, _range(runs, "parameters")])
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
    return f"{100 * value:.1f}" if metric == PERCENT else f"{value:.{1 if metric == 'perplexity' else 3}f}"


def _claims(study: Study, scale: Scale, records: Records) -> Sheet:
    columns = [Column("claim", wrap=True), Column("paper", 1, True), Column("here", 0, True), Column("95 %", 2, True)]
    columns += [Column("p", 1, True), Column("seeds", 3, True), Column("samples", 3, True), Column("verdict")]
    title = (
        "Claims: the difference, and where it lies in 95 % of cases, over seeds and, where they are counted, samples"
    )
    sheet = Sheet(title, columns)
    for claim in study.claims(scale):
        metric = _metric(claim, scale)
        published = "" if claim.paper is None else f"{claim.paper:+.2f}" if metric == PERCENT else f"{claim.paper:+.3g}"
        found = weigh_claim(claim, study, scale, records)
        if found is None:
            sheet.rows.append([claim.text, published, *[""] * 5, MISSING])
            continue
        here, interval = _estimate(claim, found, metric)
        p = "" if not found.error else "< 0.001" if found.p < 0.001 else f"{found.p:.2g}"  # three seeds tell no less
        numbers = [here, interval, p, str(found.seeds)]
        numbers.append(f"{found.samples:,}" if found.samples else "")
        sheet.rows.append(
            [claim.text, published, *numbers, found.verdict + (_beside_paper(claim, found, metric) or "")]
        )
    return sheet


def _estimate(claim: Claim, found: Finding, metric: str) -> tuple[str, str]:
    """The sum of a claim, and its interval. What is no difference has no sign."""
    middle, show = found.estimate + claim.least, _number if len(claim.cells) == 1 else _signed
    low, here, high = (show(metric, middle + side * found.reach) for side in (-1, 0, 1))
    return here, f"{low} … {high}"


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
    """How long runs on each set train, and the learning rates that were chosen."""
    numbers = {"steps": 0, "batch": 0, "training samples": 1, "test samples": 1}
    columns = [Column("task", wrap=True), *(Column(name, rank, number=True) for name, rank in numbers.items())]
    sheet = Sheet("Settings", [*columns, Column("learning rates", wrap=True)])
    by_set: dict[tuple[str, int | None], list[Cell]] = {}
    for cell in cells:
        config = cell.config(scale, 0, None)
        by_set.setdefault((config.task.title, config.training.train_samples), []).append(cell)
    for (title, train_samples), group in by_set.items():
        runs = [(cell.row, run) for cell in group for run in runs_of(cell, scale, records)]
        if not runs:
            continue
        rates: dict[float, dict[str, None]] = {}
        for row, run in runs:
            rates.setdefault(run.config.training.lr, {})[row] = None
        said = [f"{rate:g}" + (f" ({'; '.join(rows)})" if len(rates) > 1 else "") for rate, rows in rates.items()]
        runs = [run for _, run in runs]
        sheet.rows.append(
            [
                title,
                _range(runs, "steps"),
                str(runs[0].config.training.batch_size),
                "all" if train_samples is None else f"{train_samples:,}",
                _range(runs, "test_samples"),
                ", ".join(said),
            ]
        )
    return sheet


def _range(runs: list[Record], key: str) -> str:
    return _between([f"{value:,}" for value in sorted({run.result[key] for run in runs if run.result})])


def _between(ordered: Sequence[str], dash: str = " – ") -> str:
    return dash.join(dict.fromkeys([*ordered[:1], *ordered[-1:]]))


def write_results(scale: Scale, records: Records) -> str:
    """RESULTS.md: the index, and a section for each artifact."""
    return "".join(f"{line}\n" for line in _lines(scale, records))


INTRODUCTION = """# Results

Written by `longlens reproduce --report` from the records in `results/`: no result is typed by hand.
[`docs/reproduction.md`](docs/reproduction.md) has the rules by which the settings are scaled.
A claim *holds* or *does not hold* if the difference has its sign, or the other one, and chance alone would give one as
large in fewer than 1 of 20 cases, over seeds and test samples together. Otherwise it is *not decided*.
Differences above 0 speak for the claim; a row of several claims has the least and the greatest of theirs.
"""
SMALL = """
At mini, models are small, and most see a small part of the paper's samples: that a difference is smaller or
larger here says nothing of full training.
"""


def _lines(scale: Scale, records: Records) -> Iterable[str]:
    yield INTRODUCTION + (SMALL if scale == "mini" else "")
    for ours in (False, True):
        yield from (summary(scale, records, ours=ours).to_markdown(), "")
    yield from (counts(scale, records), "")
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
            if found is None:
                yield f"  - {claim.text}: {MISSING}"
                continue
            here, interval = _estimate(claim, found, _metric(claim, scale))
            yield f"  - {claim.text}: {here} ({interval}): {found.verdict}"


def picture_of(artifact: Artifact, folder: Path) -> Path:
    """Where the picture of an artifact is or will be."""
    return (folder.parent if isinstance(artifact, Computed) else folder) / f"{artifact.name}.png"


def _flag(scale: Scale) -> str:
    return "" if scale == "mini" else f" --scale {scale}"


def _environments(records: Records) -> Iterable[str]:
    """What the runs were made on."""
    runs = [run for run in records.found.values() if run.result]
    made = sorted({f"torch {run.environment.get('torch')} on {run.environment.get('processor')}" for run in runs})
    if made:
        yield f"{len(runs):,} runs; {'; '.join(made)}."
