"""Every artifact at scale smoke; what is run, and what is said of it."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longlens.cli.reproduce import reproduce
from longlens.errors import BadInput
from longlens.paper.drawing import draw_study
from longlens.paper.index import ARTIFACTS, Computed, Found, find_artifact
from longlens.paper.records import Records
from longlens.paper.report import REASONS, list_artifacts, picture_of, study_sheets, summary, write_results
from longlens.paper.run import Plan, chosen_rate, plan, run_cells, runs_of, seconds_left, verdict_of
from longlens.paper.study import Cell, Claim, Study, better
from longlens.tasks.base import create_task
from longlens.training.config import Runtime
from longlens.training.many import Outcome

STUDIES = [name for name in ARTIFACTS if isinstance(find_artifact(name), Study)]
SOURCES = {"smnist": "mnist", "pmnist": "mnist", "text8": "text8", "enwik8": "enwik8", "wikitext-2": "wikitext-2"}
SHORT = {"training.steps": 4, "training.evaluate_every": 2}


def ready(study, real_data):
    """Import the sets that a study needs."""
    for task in {cell.task for cell in study.cells("smoke")} & SOURCES.keys():
        options = {"stand_in": True} if task in ("text8", "enwik8") else {}
        create_task(task, **options).prepare(real_data(SOURCES[task]))


def run(study, folder, scale="smoke"):
    records = Records(folder / "results" / scale)
    runtime = Runtime(runs=folder / "runs")
    run_cells(study.cells(scale), scale, records, runtime, engine="local", jobs=1, address=None)
    return records


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_at_smoke(name, here, tmp_path, real_data):
    study = find_artifact(name)
    ready(study, real_data)
    records = run(study, tmp_path)
    known = plan(study.cells("smoke"), "smoke", records)
    assert (known.missing, known.failed, len(known.done)) == (0, [], len(here))
    if study.axis or study.curves or study.draw:
        path = picture_of(study, records.folder)
        draw_study(study, "smoke", records, Runtime(runs=tmp_path / "runs"), path)
        assert path.read_bytes().startswith(b"\x89PNG")
    sheets = study_sheets(study, "smoke", Records(records.folder))
    assert not any(cell in ("missing", "failed") for row in sheets[0].rows for cell in row)
    if study.claims("smoke"):
        (claims,) = (sheet for sheet in sheets if sheet.title.startswith("Claims"))
        decided = {row[-1].partition(",")[0] for row in claims.rows}  # and whether it is more or less than the paper's
        assert decided <= {"holds", "does not hold", "not decided"}
        assert "missing" not in verdict_of(study, "smoke", records)
    before = len(here)
    run(study, tmp_path)
    assert len(here) == before, "what is finished is not run again"


def test_cells_build_at_every_scale():
    """Configs only: nothing is run."""
    for name in STUDIES:
        study = find_artifact(name)
        for scale in ("smoke", "mini", "paper"):
            cells = study.cells(scale)
            assert len({(cell.row, cell.column or cell.task) for cell in cells}) == len(cells)
            for cell in cells:
                cell.config(scale, 0, 1e-3)
            for claim in study.claims(scale):
                wanted = {str(cell.config(scale, 0, None).values()) for cell in cells}
                assert {str(cell.config(scale, 0, None).values()) for _, cell in claim.cells} <= wanted
                assert claim.paper is None or claim.paper > 0, "no claim is against the paper's own figures"


@pytest.fixture
def study(monkeypatch):
    """Two layers, and a third that takes the learning rate of the first."""
    from longlens.paper import study as module

    monkeypatch.setitem(module.RATES, "smoke", (1e-2, 1e-3))
    las = Cell("LaS", "listops", "las", SHORT)
    plain = Cell("Transformer", "listops", "transformer", SHORT)
    wide = Cell("wide", "listops", "las", SHORT | {"mixer.window": 9}, like=las)
    claims = [better("LaS is better", las, plain, 1.5)]
    return Study("any", "Any", "nowhere", "A claim.", lambda scale: [las, plain, wide], lambda scale: claims)


def test_learning_rates_are_chosen_on_validation(study, here, tmp_path):
    las, plain, wide = study.cells("smoke")
    empty = plan(study.cells("smoke"), "smoke", Records(tmp_path / "results" / "smoke"))
    assert (len(empty.ready), len(empty.waiting)) == (4, 4), (
        "two rates of two cells; a second seed of each, and two of the third"
    )
    records = run(study, tmp_path)
    assert len(here) == 4 + 2 + 2
    for cell in (las, plain):
        trials = [records.find(cell.config("smoke", 0, rate)) for rate in (1e-2, 1e-3)]
        best = max(trials, key=lambda record: record.result["valid"])
        assert chosen_rate(cell, "smoke", records) == best.config.training.lr
    rate = chosen_rate(las, "smoke", records)
    assert {record.config.training.lr for record in runs_of(wide, "smoke", records)} == {rate}
    assert [record.config.training.seed for record in runs_of(wide, "smoke", records)] == [0, 1]


def test_runs_are_shared_between_studies(study, here, tmp_path):
    run(study, tmp_path)
    count = len(here)
    run(dataclasses.replace(study, name="other"), tmp_path)
    assert len(here) == count


def test_a_failed_run_is_marked_and_the_table_prints(study, here, tmp_path):
    _, plain, _ = study.cells("smoke")
    diverges = Cell("broken", "listops", "las", SHORT | {"training.lr": 1e12})
    claims = [better("a", plain, diverges)]
    mixed = dataclasses.replace(study, cells=lambda scale: [plain, diverges], claims=lambda scale: claims)
    records = run(mixed, tmp_path)
    table, claims, _ = study_sheets(mixed, "smoke", records)
    assert table.rows[1][1] == "failed"
    assert claims.rows[0][-1] == "missing"
    known = plan(mixed.cells("smoke"), "smoke", records)
    assert len(known.failed) == 2
    assert "the loss is nan" in known.failed[0].error
    count = len(here)
    run(mixed, tmp_path)
    assert len(here) == count + 2, "only what has failed is tried again"


def test_a_learning_rate_waits_for_trials_that_failed_before(study, here, tmp_path):
    las, *_ = study.cells("smoke")
    alone = dataclasses.replace(study, cells=lambda scale: [las])
    records = Records(tmp_path / "results" / "smoke")
    for rate in las.rates("smoke"):  # an accident, and not the fault of the rate
        records.add(Outcome(las.config("smoke", 0, rate), tmp_path, error="no memory"))
    assert len(plan([las], "smoke", records).failed) == 2
    records = run(alone, tmp_path)
    assert [config.training.seed for config in here] == [0, 0, 1], "both trials first"
    assert here[-1].training.lr == chosen_rate(las, "smoke", records)
    assert plan([las], "smoke", records).missing == 0


def test_other_processes_may_add_records_meanwhile(study, here, tmp_path):
    before = Records(tmp_path / "results" / "smoke")
    run(study, tmp_path)
    count = len(here)
    runtime = Runtime(runs=tmp_path / "runs")
    run_cells(study.cells("smoke"), "smoke", before, runtime, engine="local", jobs=1, address=None)
    assert len(here) == count


@pytest.fixture
def reported(study, monkeypatch):
    """The report of two artifacts."""
    from longlens.paper import report

    computed = Computed(
        "counted", "Counted", "here", "One is one.", lambda folder: (["one"], Found("holds", "", ["1 = 1."]))
    )
    known = {"any": study, "counted": computed}
    monkeypatch.setattr(report, "ARTIFACTS", tuple(known))
    monkeypatch.setattr(report, "find_artifact", known.get)
    monkeypatch.setattr(report, "REASONS", {"Is it this?": "any"})
    return known


def test_a_report_is_the_same_from_the_same_records(reported, here, tmp_path):
    records = run(reported["any"], tmp_path)
    before = write_results("smoke", records)
    assert "**missing**" in before, "the other artifact was not computed yet"
    reported["counted"].run(tmp_path / "results")
    done = write_results("smoke", Records(records.folder))
    assert "**missing**" not in done
    assert "**holds.** 1 = 1." in done
    assert write_results("smoke", Records(records.folder)) == done
    listed = list_artifacts("smoke", Records(records.folder)).to_markdown()
    assert listed in done, "the list and the report agree"
    found = {path: json.loads(path.read_text()) for path in sorted(records.folder.glob("*/las-*.json"))}
    path, values = next((path, it) for path, it in found.items() if it["config"]["mixer_options"]["window"] != 9)
    values["result"]["test"] = 0.77
    path.write_text(json.dumps(values))
    assert write_results("smoke", Records(records.folder)) != done
    path.unlink()
    without = write_results("smoke", Records(records.folder))
    assert "| missing |\n" in without


def test_the_report_says_how_many_claims_hold_and_why_others_may_not(reported, here, tmp_path):
    (las, *_) = reported["any"].cells("smoke")
    for least, paper, verdict, counts in (
        (2.0, None, "does not hold", "by runs: *holds* 0, *does not hold* 1, *not decided* 0, *missing* 0."),
        (-2.0, 1000.0, "holds, less than the paper's", "1 are smaller than it and 0 larger"),
        (-2.0, -1000.0, "holds, more than the paper's", "0 are smaller than it and 1 larger"),
    ):
        claim = Claim("accuracy", [(1.0, las)], paper, least=least)
        reported["any"] = dataclasses.replace(reported["any"], claims=lambda scale, claim=claim: [claim])
        records = run(reported["any"], tmp_path)
        assert verdict_of(reported["any"], "smoke", records) == verdict.partition(",")[0]
        text = write_results("smoke", records)
        assert counts in text
        assert f"| {verdict} |\n" in text
        asked = re.escape("- Is it this? (`longlens reproduce any --scale smoke`)\n")
        assert re.search(rf"{asked}  - accuracy: \d\S+ \(\S+ … \S+\): {verdict.partition(',')[0]}\n", text)


def test_the_report_says_what_single_verdicts_do_not(reported, here, tmp_path):
    (las, plain, _) = reported["any"].cells("smoke")
    claims = [Claim("accuracy", [(1.0, cell)], least=-2.0) for cell in (las, plain)]
    reported["any"] = dataclasses.replace(reported["any"], claims=lambda scale: claims)
    records = run(reported["any"], tmp_path)
    text = write_results("smoke", records)
    assert "Of the 2 that are decided, 2 remain at a false-discovery rate of 5 %" in text
    assert "last checkpoint" not in text, "no verdict would be another"
    largest = sum(chosen_rate(cell, "smoke", records) == 1e-2 for cell in (las, plain))
    assert (f"{largest} of 2 models took the largest" in text) == (largest > 0)
    for run_of_las in runs_of(las, "smoke", records):
        run_of_las.result["test_last"] = -7.0 - 0.01 * run_of_las.config.training.seed
    assert "1 of 2 verdicts would be others" in write_results("smoke", records)


def test_the_summary_has_what_is_missing_and_the_differences(reported, here, tmp_path):
    records = Records(tmp_path / "results" / "smoke")
    assert [row[1:] for row in summary("smoke", records).rows] == [
        ["missing", "", "+1.5", "any"],
        ["missing", "", "", "counted"],
    ]
    records = run(reported["any"], tmp_path)
    assert re.fullmatch(r"[+-]\d+\.\d points", summary("smoke", records).rows[0][2])


def test_stand_ins_are_named():
    study = find_artifact("table8")
    assert {cell.called("mini") for cell in study.cells("mini")} == {"text8-stand-in", "enwik8-stand-in"}
    assert all("stand-in" in claim.text for claim in study.claims("mini"))
    assert not any("stand-in" in claim.text for claim in study.claims("paper"))


def test_reasons_are_studies():
    assert set(REASONS.values()) <= set(STUDIES)


def test_times_are_those_of_the_same_set_and_steps(study, here, tmp_path):
    records = run(study, tmp_path)
    for number, record in enumerate(records.found.values()):
        record.result["seconds"] = 100.0 + number
    las, *_ = study.cells("smoke")
    assert seconds_left(Plan(ready=[las.config("smoke", 7, None)]), records) == 100.0
    longer = dataclasses.replace(las, changes={**las.changes, "training.steps": 77})
    assert seconds_left(Plan(waiting=[longer.config("smoke", 0, None)]), records) is None


def test_settings_are_those_of_each_set(study, here, tmp_path):
    las, *_ = study.cells("smoke")
    fewer = dataclasses.replace(las, changes={**las.changes, "training.train_samples": 16}, like=las, column="16")
    both = dataclasses.replace(study, cells=lambda scale: [las, fewer])
    settings = study_sheets(both, "smoke", run(both, tmp_path))[-1]
    place = [column.name for column in settings.columns].index("training samples")
    assert [row[place] for row in settings.rows] == ["all", "16"]


@pytest.mark.parametrize(
    ("results", "report"), [(Path("file") / "results", False), (Path("results"), True)], ids=["results", "report"]
)
def test_what_cannot_be_written_is_said_before_the_work(results, report, here, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "RESULTS-smoke.md").mkdir()
    with pytest.raises(BadInput, match=r"cannot write|must be a file"):
        reproduce(("side",), scale="smoke", results=tmp_path / results, runs=tmp_path / "runs", report=report)
    assert here == []


def test_a_report_of_another_scale_is_a_file_of_its_own(tmp_path):
    reproduce(report=True, scale="smoke", results=tmp_path / "results")
    assert [path.name for path in tmp_path.glob("*.md")] == ["RESULTS-smoke.md"]


def test_a_picture_of_models_is_left_alone_if_its_task_is(monkeypatch, here, tmp_path):
    from longlens.cli import reproduce as command

    drawn = []
    monkeypatch.setattr(command, "draw_study", lambda study, *_: drawn.append(study.name))
    monkeypatch.setattr(command, "run_cells", lambda *_, **__: None)
    reproduce(("side", "figure4"), tasks=("listops",), scale="smoke", results=tmp_path)
    assert drawn == ["side"]


def test_a_list_runs_nothing(here, tmp_path):
    (listed,) = reproduce(("side", "table10"), list=True, scale="smoke", results=tmp_path)
    assert [row[0] for row in listed.rows] == ["side", "table10"]
    with pytest.raises(BadInput, match="--list makes no runs and no report: leave out --tasks"):
        reproduce(("side",), list=True, tasks=("listops",), results=tmp_path)
    assert (here, [*tmp_path.iterdir()]) == ([], [])


def test_bad_names(tmp_path):
    with pytest.raises(BadInput, match=r"tasks must be of these artifacts \(smnist, pmnist\), got image"):
        reproduce(("table3",), tasks=("image",), results=tmp_path)
    with pytest.raises(BadInput, match=r"tasks must be of these artifacts \(no task\), got image"):
        reproduce(("table10",), tasks=("image",), results=tmp_path)
    with pytest.raises(BadInput, match="there is no artifact 'table5'; did you mean 'table"):
        find_artifact("table5")


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_command_repeats_no_finished_run(tmp_path):
    command = [sys.executable, "-m", "longlens", "reproduce", "side", "--scale", "smoke", "--threads", "1"]
    started = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finished: list[Path] = []
    while not finished:
        finished = list(tmp_path.glob("results/smoke/*/*.json"))
        time.sleep(0.1)
        assert started.poll() is None
    started.kill()
    started.communicate()
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/*/result.json")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "centered" in done.stdout
    for path, stamp in stamps.items():
        assert path.stat().st_mtime_ns == stamp
    assert len(list(tmp_path.glob("results/smoke/*/*.json"))) == 4
