"""What ``longlens train``, ``evaluate``, ``compare`` and ``sweep`` do."""

import itertools
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from longlens.console import say
from longlens.flags import Flags, Many
from longlens.mixers.base import mixer_class
from longlens.models.model import Model
from longlens.naming import nearest
from longlens.options import option_names
from longlens.reports.tables import choice, results_table, verdict
from longlens.tasks.base import SplitName, Task
from longlens.tasks.bigram import bigram_bits
from longlens.training import checkpoint
from longlens.training.config import Config
from longlens.training.distributed import join_processes
from longlens.training.evaluate import evaluate, sees_ahead
from longlens.training.loop import train
from longlens.training.many import Outcome, run_many
from longlens.training.run import RunError, RunFolder, check_fingerprint, read_config, read_result, run_folder
from longlens.training.runtime import Runtime


def train_one(config: Config, runtime: Runtime, console: Console) -> None:
    """Train in this process, and show the result (in the first process only)."""
    folder = run_folder(config, runtime)
    was_there = (folder / "result.json").exists()
    result = train(config, runtime)
    if int(os.environ.get("RANK", "0")) == 0:
        console.print(results_table([Outcome(config, folder, result)]))
        say(console, f"run folder: {folder}{' (finished before, not run again)' if was_there else ''}")


def compare_mixers(
    configs: list[Config], runtime: Runtime, many: Many, console: Console, *, choose: bool = False
) -> list[Outcome]:
    """Run all, show the table and who is ahead; end with code 1 if a run failed.

    ``choose`` says that one of them is to be chosen: the best on the validation set, as the test set is not for that.
    """
    if not configs:
        raise ValueError("there is nothing to run: name at least one mixer and one seed")
    out = many.out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(f"out must be a file in a folder that exists, got {out}")
    for config in configs:
        with torch.device("meta"):  # a layer that cannot be is refused before anything runs
            config.create_mixer().build(config.model.width)
    outcomes = run_many(configs, runtime, engine=many.engine, jobs=many.jobs, address=many.address)
    console.print(results_table(outcomes))
    for outcome in outcomes:
        if outcome.error is not None:
            say(console, f"{outcome.config.mixer}, seed {outcome.config.training.seed} failed: {outcome.error}")
    for line in choice(outcomes) if choose else verdict(outcomes):
        say(console, line)
    before = sum(outcome.was_there for outcome in outcomes)
    if before:
        say(
            console,
            f"{before} of {len(outcomes)} were finished before and not run again; delete a folder to run it anew",
        )
    say(console, f"run folders: {runtime.runs / outcomes[0].config.create_task().slug}")
    if out is not None:
        rows = [
            {"config": o.config.values(), "folder": str(o.folder), "result": o.result, "error": o.error}
            for o in outcomes
        ]  # fmt: skip
        out.write_text(json.dumps(rows, indent=1))
        say(console, f"written to {out}")
    if any(outcome.error is not None for outcome in outcomes):
        sys.exit(1)
    return outcomes


def sweep_grid(
    flags: Flags,
    changes: dict[str, Any],
    grid: tuple[str, ...],
    seeds: tuple[int, ...],
    runtime: Runtime,
    many: Many,
    console: Console,
) -> None:
    """All combinations of the grid and the seeds."""
    axes = dict(_axis(entry) for entry in grid)
    if len(axes) < len(grid):
        raise ValueError(f"grid names a field twice: {' '.join(grid)}")
    if axes.keys() & {"seed", "training.seed"}:
        raise ValueError("grid names the seed: give --seeds instead, so that runs with other seeds are averaged")
    if "mixer" in axes:
        known = {f"mixer.{name}" for mixer in axes["mixer"] for name in option_names(mixer_class(str(mixer)))}
        for name in axes:
            if name.startswith("mixer.") and name not in known:
                raise ValueError(f"no mixer of the grid has {name!r}; {nearest(name, sorted(known))}")
    configs = []
    for values in itertools.product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        mixer = cell.pop("mixer", flags.mixers[0])
        for seed in seeds:
            configs.append(
                flags.config(str(mixer), changes | cell | {"training.seed": seed}, shared="mixer" in axes)
            )  # fmt: skip
    compare_mixers(configs, runtime, many, console, choose=True)


def _axis(entry: str) -> tuple[str, list[Any]]:
    """``lr=1e-3,3e-4`` as the field and its values."""
    name, equals, values = entry.partition("=")
    if not equals or not name or not all(value.strip() for value in values.split(",")):
        raise ValueError(f"grid has {entry!r}; it must be a field and its values, as in lr=1e-3,3e-4")
    return name.replace("-", "_") if name != "mixer" else name, [_value(value.strip()) for value in values.split(",")]


def _value(text: str) -> Any:
    """A number, true or false, none, or a word."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text.lower() if text.lower() in ('true', 'false') else text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def evaluate_run(folder: Path, split: SplitName, which: str, device: str, console: Console) -> None:
    """Print the metric and the loss of a checkpoint on a whole split."""
    config = read_config(folder)
    check_fingerprint(folder, config)
    path = _checkpoint(RunFolder(folder, keep=1), which)
    try:
        found = checkpoint.read(path)
    except checkpoint.DamagedError as error:
        raise RunError(f"checkpoint {path} is damaged: {error}") from None
    runtime = Runtime.model_validate({"device": device})
    with join_processes(runtime) as processes:
        task = config.create_task()
        torch.manual_seed(config.training.seed)
        model = Model(task.spec, config.create_mixer(), config.model).to(processes.device)
        checkpoint.restore(found, model)
        metric, loss = evaluate(model, task, split, config.training, processes)
        if processes.is_first:
            count, step = len(task.split(split)), int(path.name)
            say(
                console,
                f"{config.mixer} on {task.title}, {split} ({count:,} samples), step {step:,}: "
                f"{task.spec.metric} {metric:.4f}, loss {loss:.4f}",
            )
            if task.spec.head == "language":
                _say_of_language(model, task, split, console)


def _say_of_language(model: nn.Module, task: Task, split: SplitName, console: Console) -> None:
    """Whether it looks ahead, and what counting pairs of tokens would reach."""
    change = sees_ahead(model, task)
    say(console, f"when later tokens change, the logits before them change by {change:.3g}")
    bits = bigram_bits(task, split)
    if bits is not None:
        value = bits if task.spec.metric == "bits_per_byte" else 2**bits
        say(console, f"a bigram model of the training set: {task.spec.metric} {value:.4f}")


def _checkpoint(run: RunFolder, which: str) -> Path:
    """The folder of the best or the last checkpoint, or of that of a step."""
    steps = [int(path.name) for path in run.checkpoint_folders()]
    if not steps:
        raise ValueError(f"{run.folder} has no checkpoint yet")
    if which == "last":
        return run.checkpoint(steps[0])
    if which == "best":
        result = read_result(run.folder)
        best = result["best_step"] if result else _best_so_far(run, steps[0])
        if best is None:
            raise ValueError(f"{run.folder} was not evaluated yet: choose the checkpoint last")
        return run.checkpoint(best)
    if not which.isdigit() or int(which) not in steps:
        raise ValueError(f"checkpoint is {which!r}; it can be best, last, {', '.join(map(str, sorted(steps)))}")
    return run.checkpoint(int(which))


def _best_so_far(run: RunFolder, newest: int) -> int | None:
    state = json.loads((run.checkpoint(newest) / "state.json").read_text())
    return state["standing"]["best_step"]
