"""``longlens check``: what a layer must keep, a line for each property."""

from typing import Any

from longlens.cli.output import Failed
from longlens.errors import BadInput
from longlens.mixers.registry import choose_mixer, list_mixers
from longlens.options import Size
from longlens.progress import progress
from longlens.reports.sheet import Column, Sheet
from longlens.testing import TWO_PROCESSES, Check, check_properties, check_two_processes, find_subject, sides

WORDS = {True: "ok", False: "FAILED", None: "–"}


def check(
    layers: tuple[str, ...] = (),
    *,
    options: tuple[str, ...] = (),
    width: Size = 16,
    length: Size = 27,
    processes: bool = True,
    traceback: bool = False,
) -> list[Any]:
    """Check what every layer must keep: shapes, causality, padding, steps, half precision, gradients and more. If a
    property fails, the exit code is 1. LONGLENS_IMPORT=FILE.py, or an entry point of a package, adds your own layers.

    Args:
        layers: Names of mixers; by default all.
        options: Options of the mixers, as NAME=VALUE. Others are small, so that each part shows in short sequences.
        width: Width of the layers.
        length: Length of the sequences.
        processes: Train in two processes as well, with DDP and FSDP.
        traceback: Show where a layer raised an error.
    """
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise BadInput(f"--options must be NAME=VALUE, got {option}")
        given[name.replace("-", "_")] = value
    subjects = {}
    for name in dict.fromkeys(layers or list_mixers()):
        for side in [{}] if "bidirectional" in given else sides(name):
            chosen = choose_mixer(name, **side, **given)
            label = ", ".join(f"{option}={chosen.options[option]}" for option in (*side, *given))
            subject = find_subject(name, d_model=width, length=length, **side, **given)
            subjects[f"{name} ({label})" if label else name] = subject
    found: dict[str, list[Check]] = {}
    with progress("checks", len(subjects), "layers") as done:
        for label, subject in subjects.items():
            found[label] = check_properties(subject)
            done(len(found), label)
    built = [label for label in subjects if found[label][0].passed]
    together = check_two_processes([subjects[label] for label in built]) if processes else []
    last = dict(zip(built, together, strict=False))
    printed, failed = [], []
    for label, checks in found.items():
        checks.append(last.get(label, Check(TWO_PROCESSES, None, "left out")))
        sheet = Sheet(label, [Column("property"), Column("result"), Column("detail", wrap=True)])
        sheet.rows += [[check.name, WORDS[check.passed], check.detail] for check in checks]
        printed += [sheet, *(check.traceback.rstrip() for check in checks if traceback and check.traceback)]
        if wrong := [check.name for check in checks if check.passed is False]:
            failed.append(f"{label} ({', '.join(wrong)})")
    if not failed:
        all_of_them = f"{len(found)} of {len(found)} layers keep everything"
        return [*printed, all_of_them if len(found) > 1 else "it keeps everything"]
    printed.append(f"{len(failed)} of {len(found)} layers failed: {'; '.join(failed)}")
    if not traceback and any(check.traceback for checks in found.values() for check in checks):
        printed.append("--traceback shows where a layer raised an error")
    raise Failed(printed)
