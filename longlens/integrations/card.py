"""The README.md of an exported model: what it is, how good it is, how it was made, and how to use it."""

import json
import shlex
from pathlib import Path
from typing import Any

from longlens.files import write_atomic
from longlens.training.run import read_environment, read_identity, show_metric
from longlens.training.saved import Run


def write_card(path: Path, run: Run, result: dict[str, Any], step: int, usage: str, library: str) -> None:
    """Write the card of a checkpoint, filled from the records of its run."""
    config, started = run.config, read_environment(run.folder) or [{}]
    rows = {
        "task": f"{config.task.title}: {config.task.summary}",
        "data": f"{config.task.origin}; fingerprint {read_identity(run.folder).fingerprint[:12]}",
        "mixer": config.mixer.name,
        "parameters": f"{result['parameters']:,}",
        "training": f"{result['steps']:,} steps of {config.training.batch_size} samples, seed {config.training.seed}",
        "checkpoint": f"step {step:,}" + (", the best on the validation set" if step == result["best_step"] else ""),
        "test": _score(result, step),
        "environment": _environment(started[-1]),
    }
    lines = [
        "---",
        f"library_name: {library}",
        f"tags: {json.dumps(['longlens', config.mixer.name, config.task.name])}",
        "---",
        "",
        f"# {config.mixer.name} on {config.task.name}",
        "",
        "A model of LongLens, a library of long-range sequence layers for PyTorch.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in rows.items()),
        "",
        "## Use it",
        "",
        usage.strip(),
        "",
        "## How it was made",
        "",
        "```sh",
        _command(started[0]),
        "```",
        "",
        "The config of the run:",
        "",
        "```json",
        json.dumps(config.to_json(), indent=1),
        "```",
        "",
    ]
    write_atomic(path, "\n".join(lines))


def _score(result: dict[str, Any], step: int) -> str:
    """The metric of the test set, if the checkpoint is one that was tried on it."""
    found = {result["steps"]: result["test_last"], result["best_step"]: result["test"]}.get(step)
    if found is None:
        return "not evaluated at this step"
    return f"{result['metric']} {show_metric(result['metric'], found)} of {result['test_samples']:,} samples"


def _environment(started: dict[str, Any]) -> str:
    names = ("longlens", "commit", "torch", "python", "device", "processor", "threads", "date")
    return ", ".join(f"{name} {started[name]}" for name in names if started.get(name) is not None) or "not known"


def _command(started: dict[str, Any]) -> str:
    words = [str(word) for word in started.get("command", [])]
    if not words:
        return "# not kept"
    first = ["longlens"] if words[0] in ("longlens", "__main__.py") else ["python", words[0]]
    return shlex.join([*first, *words[1:]])


def _cell(value: str) -> str:
    return value.replace("|", "\\|")
