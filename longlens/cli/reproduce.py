"""``longlens reproduce``: the tables, figures and theorems of the paper, and what our runs say of them."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from longlens.cli import sentence
from longlens.errors import BadInput
from longlens.files import check_out, write_atomic
from longlens.options import Device, Size
from longlens.paper.drawing import draw_study
from longlens.paper.index import ARTIFACTS, Computed, find_artifact
from longlens.paper.records import Records
from longlens.paper.report import list_artifacts, picture_of, study_sheets, write_results
from longlens.paper.run import plan, run_cells
from longlens.paper.study import Study
from longlens.training.config import Runtime


def reproduce(
    artifacts: tuple[str, ...] = (),
    *,
    list: bool = False,
    scale: Literal["smoke", "mini", "paper"] = "mini",
    tasks: tuple[str, ...] = (),
    report: bool = False,
    results: Path = Path("results"),
    runs: Path = Path("runs"),
    jobs: Size = 1,
    threads: Size | None = None,
    device: Device = "auto",
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
) -> Sequence[Any]:
    """Reproduce tables, figures and theorems of the paper. What is finished is not run again; what is killed resumes.

    Args:
        artifacts: Names of artifacts, or all.
        list: List all artifacts, or those that are named: their claims, what is done and missing, and the verdicts.
            Nothing is run.
        scale: Size of the runs: smoke (seconds), mini (minutes on a core), paper (a GPU).
        tasks: Make the runs on these tasks only; by default all.
        report: Write RESULTS.md, or RESULTS-SCALE.md for another scale than mini, beside the folder of the records.
        results: Folder of the records of finished runs.
        runs: Folder of the runs themselves.
        jobs: Number of runs at a time on this machine; visible GPUs are dealt out in turn.
        threads: Threads of a run on the CPU; by default as many as the machine has free cores.
        device: Device to train on; auto is a GPU if there is one.
        engine: Processes on this machine, or a Ray cluster, whose machines share the folder of runs and LONGLENS_HOME,
            and have longlens installed.
        address: Address of the Ray cluster; by default that of RAY_ADDRESS, or one that is started on this machine.
    """
    names = [*ARTIFACTS] if artifacts == ("all",) else [*dict.fromkeys(artifacts)]
    chosen = [find_artifact(name) for name in names]
    if not (chosen or list or report):
        raise BadInput(f"name an artifact ({', '.join(ARTIFACTS)}) or all, or give --list or --report")
    if list and (tasks or report):
        raise BadInput(f"--list makes no runs and no report: leave out {'--tasks' if tasks else '--report'}")
    records = Records(results / scale)
    printed: Any = [sentence(f"left out: {problem}") for problem in records.problems]
    if list:
        return [*printed, list_artifacts(scale, records, names)]
    runtime = Runtime.make({"runs": runs, "threads": threads, "device": device}, "the runtime")
    cells = [cell for study in chosen if isinstance(study, Study) for cell in study.cells(scale)]
    if unknown := set(tasks) - {cell.task for cell in cells}:
        known = ", ".join(dict.fromkeys(cell.task for cell in cells)) or "no task"
        raise BadInput(f"tasks must be of these artifacts ({known}), got {', '.join(sorted(unknown))}")
    cells = [cell for cell in cells if not tasks or cell.task in tasks]
    out = results.absolute().parent / ("RESULTS.md" if scale == "mini" else f"RESULTS-{scale}.md")
    if chosen:  # before hours of work
        check_out(results / "records")
    if report:
        check_out(out)
    run_cells(cells, scale, records, runtime, engine=engine, jobs=jobs, address=address)  # of all artifacts together
    for artifact in chosen:
        if isinstance(artifact, Computed):
            printed += artifact.run(results)
            continue
        drawn = None
        if not tasks or {cell.task for cell in artifact.cells(scale)} & {*tasks}:  # and measured, for the tables
            drawn = draw_study(artifact, scale, records, runtime, picture_of(artifact, records.folder))
        printed += [*study_sheets(artifact, scale, records), drawn]
        failed = plan(artifact.cells(scale), scale, records).failed
        printed += [sentence(f"{record.config.mixer.name} failed: {record.error}") for record in failed]
    if chosen:
        where = "" if results == Path("results") else f" --results {shlex.quote(str(results))}"
        printed.append(f"a page of all: longlens report{where}")
    if report:
        write_atomic(out, write_results(scale, records))
        printed.append(f"written to {out}")
    return printed
