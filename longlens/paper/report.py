"""Tables of the paper's artifacts from records, and RESULTS.md from all of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from longlens.paper.index import ARTIFACTS, Artifact, Computed, find_artifact
from longlens.paper.records import Record, Records
from longlens.paper.run import MISSING, chosen_rate, measures_of, plan, runs_of, seconds_left, verdict_of, weigh_claim
from longlens.paper.study import Cell, Scale, Study
from longlens.reports.sheet import Column, Sheet

PERCENT = "accuracy"  # the metric that is shown in percent


def list_artifacts(scale: Scale, records: Records) -> Sheet:
    """The index: what there is, what the paper says with it, and what is known here."""
    columns = [Column("artifact"), Column("claim", wrap=True), Column("done", 0, True), Column("missing", 0, True)]
    columns += [Column("time left", 2, True), Column("verdict", wrap=True), Column("command", 3)]
    sheet = Sheet(f"the paper at scale {scale}", columns)
    for name in ARTIFACTS:
        artifact = find_artifact(name)
        command = f"longlens reproduce {name}" + (f" --scale {scale}" if scale != "mini" else "")
        if isinstance(artifact, Computed):
            found = artifact.recorded(records.folder.parent)
            counts = ["1", "0"] if found else ["0", "1"]
            sheet.rows.append([name, artifact.claim, *counts, "", found.verdict if found else MISSING, command])
            continue
        known = plan(artifact.cells(scale), scale, records)
        left = seconds_left(known, records)
        time = "" if not known.missing else "unknown" if left is None else f"{left / 3600:.1f} h of one core"
        verdict = verdict_of(artifact, scale, records)
        failed = f", {len(known.failed)} failed" if known.failed else ""
        counts = [str(len(known.done)), f"{known.missing}{failed}"]
        sheet.rows.append([name, artifact.claim, *counts, time, verdict, command])
    return sheet


def summary(scale: Scale, records: Records) -> Sheet:
    """What is decided of the paper's claims, for a first look."""
    sheet = Sheet("", [Column("the paper says", wrap=True), Column("here"), Column("in the paper")])
    for name in ARTIFACTS:
        artifact = find_artifact(name)
        if isinstance(artifact, Computed):
            found = artifact.recorded(records.folder.parent)
            verdict = MISSING if found is None else f"{found.verdict}: {found.because}".removesuffix(": ")
        else:
            verdict = verdict_of(artifact, scale, records)
        if verdict not in (MISSING, "no claim"):
            sheet.rows.append([artifact.claim, verdict, artifact.place.partition(",")[0]])
    return sheet


def study_sheets(study: Study, scale: Scale, records: Records) -> list[Sheet]:
    """The table of a study, its claims, and its settings."""
    cells = study.cells(scale)
    sheets = [_table(study, cells, scale, records), _claims(study, scale, records), _settings(cells, scale, records)]
    sheets.insert(1, _measures(study, scale, records))
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
    columns = [Column("claim", wrap=True), Column("paper", 1, True), Column("here", 0, True), Column("error", 2, True)]
    columns += [Column("p", 1, True), Column("seeds", 3, True), Column("samples", 3, True), Column("verdict")]
    sheet = Sheet("Claims: the difference, and its standard error over seeds and test samples", columns)
    for claim in study.claims(scale):
        metric = "" if claim.measures else claim.cells[0][1].config(scale, 0, None).task.metric
        published = "" if claim.paper is None else f"{claim.paper:+.2f}" if metric == PERCENT else f"{claim.paper:+.3g}"
        found = weigh_claim(claim, study, scale, records)
        if found is None:
            sheet.rows.append([claim.text, published, *[""] * 5, MISSING])
            continue
        here, error = (f"{_number(metric, value)}" for value in (found.estimate, found.error))
        here = here if here.startswith("-") else f"+{here}"
        numbers = [here, error, f"{found.p:.2g}", str(found.seeds), f"{found.samples:,}" if found.samples else ""]
        sheet.rows.append([claim.text, published, *numbers, found.verdict])
    return sheet


def _settings(cells: Iterable[Cell], scale: Scale, records: Records) -> Sheet:
    """What the fastest run of each task cost, and the learning rates that were chosen."""
    columns = [
        Column("task", wrap=True),
        Column("parameters", 0, True),
        Column("steps", 0, True),
        Column("batch", 0, True),
    ]
    columns += [Column("test samples", 1, True), Column("minutes a run", 1, True), Column("learning rates", wrap=True)]
    sheet = Sheet("Settings", columns)
    by_task: dict[str, list[Cell]] = {}
    for cell in cells:
        by_task.setdefault(cell.task, []).append(cell)
    for group in by_task.values():
        runs = [run for cell in group for run in runs_of(cell, scale, records)]
        if not runs:
            continue
        chosen = {cell.row: chosen_rate(cell.like or cell, scale, records) for cell in group}
        rates = ", ".join(f"{row} {rate:g}" for row, rate in chosen.items() if rate is not None)
        sheet.rows.append(
            [
                runs[0].config.task.title,
                _range(runs, "parameters"),
                _range(runs, "steps"),
                str(runs[0].config.training.batch_size),
                _range(runs, "test_samples"),
                f"{min(run.result['seconds'] for run in runs if run.result) / 60:.1f}",
                rates or f"{runs[0].config.training.lr:g}",
            ]
        )
    return sheet


def _range(runs: list[Record], key: str) -> str:
    values = sorted({run.result[key] for run in runs if run.result})
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} – {values[-1]:,}"


def write_results(scale: Scale, records: Records) -> str:
    """RESULTS.md: the index, and a section for each artifact."""
    return "".join(f"{line}\n" for line in _lines(scale, records))


INTRODUCTION = """# Results

Written by `longlens reproduce --report` from the records in `results/`: no figure is typed by hand.
[`docs/reproduction.md`](docs/reproduction.md) has the rules by which the settings are scaled.
A claim *holds* or *does not hold* if the difference has its sign, or the other one, and chance alone would give one as
large in fewer than 1 of 20 cases, over seeds and test samples together. Otherwise it is *not decided*.
"""


def _lines(scale: Scale, records: Records) -> Iterable[str]:
    yield INTRODUCTION
    yield summary(scale, records).to_markdown()
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
        else:
            for sheet in study_sheets(artifact, scale, records):
                yield from ("", f"**{sheet.title}**", "", sheet.to_markdown())
            yield from _reasons(artifact, scale, records)
        picture = picture_of(artifact, records.folder)
        if picture.is_file():
            yield from ("", f"![{artifact.title}]({picture.relative_to(records.folder.parent.parent).as_posix()})")
    yield from ("", *_environments(records))


def _reasons(study: Study, scale: Scale, records: Records) -> Iterable[str]:
    """Where a claim does not hold, or is not decided: what other runs say of likely reasons."""
    if not any(verdict in verdict_of(study, scale, records) for verdict in ("does not hold", "not decided")):
        return
    for question, name in study.reasons.items():
        other = find_artifact(name)
        assert isinstance(other, Study)
        yield from ("", f"{question} `longlens reproduce {name}{_flag(scale)}`:", "")
        for claim in other.claims(scale):
            found = weigh_claim(claim, other, scale, records)
            yield f"- {claim.text}: {MISSING if found is None else found.verdict}"


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
