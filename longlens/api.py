"""Train, compare and load in Python: what the commands of the same names do. Nothing here prints or exits."""

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from longlens.errors import BadInput, RunError
from longlens.mixers.registry import REGISTRY, find_mixer, layer_options, register
from longlens.options import REQUIRED, Is, Option, Seed, Several, Size, nearest, options_of, shorten
from longlens.tasks.base import Task, find_task
from longlens.training.config import (
    SECTIONS,
    Config,
    Engine,
    Recipe,
    Runtime,
    find_option,
    load_recipe,
    section_options,
)
from longlens.training.saved import Run as Run
from longlens.training.saved import load_run as load_run

if TYPE_CHECKING:
    import pandas

    from longlens.reports.sheet import Sheet
    from longlens.training.many import Outcome

SEEDS = Option("seeds", Annotated[tuple[Seed, ...], Is("a list of whole numbers from 0 on, as in seeds=[0, 1, 2]")])
OtherMetric = Literal["balanced-accuracy", "macro-f1", "auc", "mae"]


def train(
    task: str | Task, mixer: str | type = "las", *, recipe: str | Path | Recipe = "mini", **changes: Any
) -> "Result":
    """Train a model. A finished run is not run again, and a stopped one resumes.

    ``train("listops", "las", recipe="mini", lr=3e-4, depth=2, runs="my_runs")``: other arguments are options of the
    training, the model, the mixer, the task and the runtime, by plain or dotted names (``task.max_length``).

    Args:
        task: Name of the task, or a task.
        mixer: Name of the mixer ('longlens list mixers' has all); its options are flags --mixer.NAME.
        recipe: Defaults of all other flags: smoke, mini, paper, published (of the layer's own source), or a TOML
            file of your own.
    """
    (config,), runtime = _resolve(train, task, [mixer], recipe, (), changes)
    return train_config(config, runtime)


def train_config(config: Config, runtime: Runtime) -> "Result":
    """Train one resolved config in this process."""
    from longlens.models.model import check_mixer_builds
    from longlens.training.loop import train_run
    from longlens.training.machine import refuse_lone_tasks
    from longlens.training.run import fingerprint, run_folder

    refuse_lone_tasks()
    check_mixer_builds(config.task, config.mixer, config.model)  # before data is downloaded for it
    data = fingerprint(config)
    folder = run_folder(config, runtime, data)
    was_there = (folder / "result.json").exists()
    return Result(config, folder, train_run(config, runtime, data), was_there)


def compare(
    task: str | Task,
    mixers: str | type | Sequence[str | type] = ("transformer", "las", "las-chunk"),
    *,
    recipe: str | Path | Recipe = "mini",
    seeds: tuple[Seed, ...] = (),
    folds: Several | None = None,
    metrics: tuple[OtherMetric, ...] = (),
    engine: Engine = "local",
    jobs: Size = 1,
    address: str | None = None,
    **changes: Any,
) -> "Comparison":
    """Train several mixers at the same budget. Other arguments are those of ``train``; an option of a mixer goes to all
    that have it.

    Args:
        task: Name of the task, or a task.
        mixers: Names of the mixers ('longlens list mixers' has all).
        recipe: Defaults of all other flags: smoke, mini, paper, published (of the layer's own source), or a TOML
            file of your own.
        seeds: Seeds: one run of each mixer for each; by default the one of --seed.
        folds: Folds of your own sequences (task files): one run of each mixer for each fold, which is its test set, so
            that each sample is tested on once. Each of several seeds cuts other folds.
        metrics: Other metrics of the test set, beside the task's own.
        engine: Processes on this machine, or a Ray cluster, whose machines share the folder of runs and LONGLENS_HOME,
            and have longlens installed.
        jobs: Number of runs at a time on this machine; visible GPUs are dealt out in turn.
        address: Address of the Ray cluster; by default that of RAY_ADDRESS, or one that is started on this machine.
    """
    mixers = [mixers] if isinstance(mixers, str | type) else mixers
    configs, runtime = _resolve(compare, task, mixers, recipe, seeds, changes, folds=folds)
    if metrics:
        from longlens.reports.metrics import check_metrics

        check_metrics(configs[0].task, metrics)
    found = run_configs(configs, runtime, engine=engine, jobs=jobs, address=address)
    return replace(found, metrics=metrics)


def sweep(
    task: str | Task,
    mixer: str | type = "las",
    *,
    grid: Mapping[str, Sequence[Any]],
    recipe: str | Path | Recipe = "mini",
    seeds: tuple[Seed, ...] = (),
    folds: Several | None = None,
    engine: Engine = "local",
    jobs: Size = 1,
    address: str | None = None,
    **changes: Any,
) -> "Comparison":
    """Train all combinations of some values: ``sweep("listops", grid={"lr": [1e-3, 3e-3], "mixer.window": [3, 5]})``.

    The best is chosen on the validation set. Other arguments are those of ``train``.

    Args:
        task: Name of the task, or a task.
        mixer: Name of the mixer ('longlens list mixers' has all), unless the grid has several.
        grid: Fields and their values, all combinations of which are run.
        recipe: Defaults of all other flags: smoke, mini, paper, published (of the layer's own source), or a TOML
            file of your own.
        seeds: Seeds: one run of each combination for each; by default the one of --seed.
        folds: Folds of your own sequences (task files): one run of each combination for each fold, as in compare.
        engine: Processes on this machine, or a Ray cluster, whose machines share the folder of runs and LONGLENS_HOME,
            and have longlens installed.
        jobs: Number of runs at a time on this machine; visible GPUs are dealt out in turn.
        address: Address of the Ray cluster; by default that of RAY_ADDRESS, or one that is started on this machine.
    """
    for field, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Collection):
            raise BadInput(f"grid must give {field} a list, as in {{'lr': [1e-3, 3e-4]}}, got {shorten(values)}")
    if not grid or not all(len(values) for values in grid.values()):
        raise BadInput("grid must name at least one field and its values, as in lr=1e-3,3e-4")
    if grid.keys() & {"seed", "training.seed"}:
        raise BadInput("grid names the seed: give seeds instead, so that runs with other seeds are averaged")
    name = _task_name(task)
    mixers = [_mixer_name(entry) for entry in grid.get("mixer", [mixer])]
    known = {section: section_options(section, name, mixers) for section in SECTIONS}
    places = {field: find_option(field, known, name) for field in grid if field != "mixer"}
    for field, place in places.items():
        if place is None:
            names = [o if s in ("model", "training") else f"{s}.{o}" for s in SECTIONS for o in known[s]]
            raise BadInput(f"grid names {field!r}, and there is no such field; {nearest(field, names)}")
    if len(set(places.values())) < len(places):
        raise BadInput(f"grid names a field twice: {', '.join(grid)}")
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, name, mixers)
    resolved = []
    for values in itertools.product(*grid.values()):
        cell = dict(zip(grid, values, strict=True))
        chosen = _mixer_name(cell.pop("mixer", mixer))
        cell = {**changes, **cell}
        resolved.append(_resolve(sweep, task, [chosen], recipe, seeds, cell, others=mixers, folds=folds))
    configs = [config for found, _ in resolved for config in found]
    return run_configs(configs, resolved[0][1], engine=engine, jobs=jobs, address=address, choose=True)


def run_configs(
    configs: list[Config],
    runtime: Runtime,
    *,
    engine: Engine = "local",
    jobs: int = 1,
    address: str | None = None,
    choose: bool = False,
) -> "Comparison":
    """Run resolved configs, each in a process of its own."""
    from longlens.models.model import check_mixer_builds
    from longlens.training.many import run_many

    if runtime.folder is not None:
        raise BadInput("folder is for a single run: leave it out")
    for config in configs:
        check_mixer_builds(config.task, config.mixer, config.model)
    if any(_is_only_here(config) for config in configs):
        if engine != "local" or jobs > 1:
            raise BadInput(
                "a layer or task of the main file runs in this process only: put it into a module, with a name"
            )
        return Comparison([_run_here(config, runtime) for config in configs], choose)
    return Comparison(run_many(configs, runtime, engine=engine, jobs=jobs, address=address), choose)


def _is_only_here(config: Config) -> bool:
    """Whether another process could not import the layer or the task: they are of a notebook or of the main file, or
    the task is of a class without a name."""
    task = type(config.task)
    return "__main__" in (config.mixer.preset.module, task.__module__) or find_task(config.task.name) is not task


def _run_here(config: Config, runtime: Runtime) -> "Outcome":
    from longlens.training.many import Outcome
    from longlens.training.run import fingerprint, run_folder

    try:
        result = train_config(config, runtime)
    except (BadInput, RunError) as error:  # does not hide the others
        return Outcome(config, run_folder(config, runtime, fingerprint(config)), error=str(error))
    return Outcome(config, result.folder, dict(result.values), was_there=result.was_there)


def _resolve(
    caller: Callable[..., Any],
    task: str | Task,
    mixers: Sequence[str | type],
    recipe: str | Path | Recipe,
    seeds: Sequence[int],
    changes: Mapping[str, Any],
    others: Iterable[str] = (),
    folds: int | None = None,
) -> tuple[list[Config], Runtime]:
    """The configs of all mixers, seeds and folds; the recipe is read once and the task made once."""
    name, names = _task_name(task), [_mixer_name(mixer) for mixer in mixers]
    if not names:
        raise BadInput("mixers must name at least one mixer")
    runtime_options = options_of(Runtime)
    runtime = Runtime.make({key: value for key, value in changes.items() if key in runtime_options}, "the runtime")
    changes = {key: value for key, value in changes.items() if key not in runtime_options}
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, name, names)
    seeds, also = SEEDS.check(seeds), [*options_of(caller), *runtime_options]
    configs: list[Config] = []
    for mixer, seed in itertools.product(names, seeds or [None]):
        changed = changes if seed is None else {**changes, "training.seed": seed}
        config = loaded.resolve(task, mixer, changed, others=[*names, *others], also=also)
        task = task if loaded.own else config.task  # made once, unless each mixer has a recipe of its own
        configs += [config] if folds is None else _cut(config, folds, seed, changes)
    return configs, runtime


def _cut(config: Config, folds: int, seed: int | None, changes: Mapping[str, Any]) -> list[Config]:
    """A run for each fold. Those of another seed are other folds."""
    folds = Option("folds", Several).check(folds)
    if not {"folds", "fold", "seed"} <= config.task.values().keys():
        raise BadInput(f"folds are for the task files, whose samples have no splits yet, got {config.task.name}")
    cut: dict[str, Any] = {"folds": folds}
    if seed is not None:
        if "task.seed" in changes:
            raise BadInput("task.seed must be left out with folds and seeds: each of the seeds cuts folds of its own")
        cut["seed"] = seed
    tasks = (replace(config.task, **cut, fold=fold) for fold in range(folds))
    return [replace(config, task=task) for task in tasks]


def _task_name(task: str | Task) -> str:
    return task.name if isinstance(task, Task) else Option("task", str).check(task)


def _mixer_name(mixer: str | type) -> str:
    """The name of a mixer. A class that has none is registered under its own, in lower case with dashes; of several
    names, a class stands for the one that has its own defaults."""
    if isinstance(mixer, str):
        return find_mixer(mixer).name
    if not isinstance(mixer, type):
        raise BadInput(f"mixer must be a name or a class, got {shorten(mixer)}")
    if "<locals>" in mixer.__qualname__:
        raise BadInput(f"mixer must be a class of a module, got {mixer.__name__} of a function: move it out of it")
    homes = (REGISTRY.modules | REGISTRY.homes).items()
    presets = [find_mixer(name) for name, module in homes if module == mixer.__module__]
    presets = [preset for preset in presets if preset.layer_name == mixer.__name__]
    presets = [preset for preset in presets if preset.registered in (mixer, None)]  # a cell may define it again
    if not presets:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", mixer.__name__).lower()
        register(name)(mixer)
        return name
    options = layer_options(mixer, mixer.__name__).values()
    own = {option.name: option.default for option in options if option.default is not REQUIRED}
    same = []
    for preset in presets:
        values = {option.name: option.default for option in preset.options.values()} | dict(preset.fixed)
        same += [preset.name] if {name: values[name] for name in own} == own else []
    found = same if len(presets) > 1 else [presets[0].name]
    if len(found) != 1:
        names = ", ".join(preset.name for preset in presets)
        raise BadInput(f"mixer must be a name for {mixer.__name__}, which has several: choose from {names}")
    return found[0]


@dataclass(frozen=True)
class Result:
    """A finished run: ``result.test``, ``result.valid``, ``result.seconds`` and whatever else ``result.json`` has."""

    config: Config
    folder: Path
    values: Mapping[str, Any]
    was_there: bool  # finished before, and not run again

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("values", {})  # not there yet in a copy that is being made
        if name.startswith("_") or name not in values:
            raise AttributeError(f"a result has no {name!r}; it has {', '.join(values)}")
        return values[name]

    def __repr__(self) -> str:
        return f"Result({self.config.mixer.name} on {self.config.task.title}: {self.metric} {self.test}, {self.folder})"

    @property
    def run(self) -> Run:
        return load_run(self.folder)


@dataclass(frozen=True)
class Comparison:
    """Several runs: a table, and what it says."""

    outcomes: "list[Outcome]"
    choose: bool = False  # whether one of them is to be chosen
    metrics: tuple[str, ...] = ()  # others than the task's own

    @property
    def table(self) -> "Sheet":
        from longlens.reports.tables import results_table

        return results_table(self.outcomes, self.metrics)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each run: its config, its folder, and its result or its error."""
        return [
            {
                **{name.removeprefix("training."): value for name, value in outcome.config.values().items()},
                "folder": str(outcome.folder),
                **(outcome.result or {}),
                "error": outcome.error,
            }
            for outcome in self.outcomes
        ]

    @property
    def verdict(self) -> str:
        """Which is best and whether it may be chance; of a sweep, the best on the validation set."""
        from longlens.reports.tables import beats_guessing, choice, verdict

        said = choice(self.outcomes) if self.choose else verdict(self.outcomes)
        return "\n".join([*said, *beats_guessing(self.outcomes)])

    @property
    def failed(self) -> "list[Outcome]":
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    def to_pandas(self) -> "pandas.DataFrame":
        try:
            import pandas
        except ImportError:
            raise BadInput("pandas is not installed: pip install pandas") from None
        return pandas.DataFrame(self.rows)

    def to_markdown(self) -> str:
        return self.table.to_markdown()

    def to_latex(self) -> str:
        return self.table.to_latex()

    def to_csv(self) -> str:
        return self.table.to_csv()

    def __rich__(self) -> "Sheet":
        return self.table

    def __str__(self) -> str:
        return f"{self.to_markdown()}\n{self.verdict}"

    def _repr_markdown_(self) -> str:
        return str(self)
