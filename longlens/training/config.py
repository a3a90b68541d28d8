"""What a run is: typed configs, recipes, and the one resolved config that names its folder. No torch here."""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from longlens.errors import BadInput
from longlens.files import open_file
from longlens.mixers.registry import Mixer, choose_mixer, find_mixer, list_mixers
from longlens.models.config import ModelConfig
from longlens.options import (
    REQUIRED,
    Device,
    Is,
    NonNegative,
    Option,
    Options,
    Size,
    check_names,
    check_options,
    nearest,
    options_of,
    shorten,
)
from longlens.tasks.base import Task, create_task, find_task, list_tasks
from longlens.training.options import BUDGETS, Groups
from longlens.training.options import TrainingConfig as TrainingConfig

SCALES = ("smoke", "mini", "paper")
PUBLISHED = "published"  # the recipe of a layer's own publication
SECTIONS = ("task", "mixer", "model", "training")
PARTS = ("task_options", "mixer_options", "model", "training")  # of config.json
# Options that are younger than runs which people have: at their defaults they are not in the name of a folder.
LATER = (
    *("task.folds", "task.fold", "mixer.tolerance"),
    *("training.minutes", "training.min_steps", "training.stop_after", "training.class_weights"),
)

Engine = Literal["local", "ray"]
Changes = Mapping[str, Any]  # by dotted or plain names: {"training.lr": 1e-4, "depth": 2, "task.max_length": 512}


@dataclass(frozen=True)
class Config:
    """A run, resolved: all that decides its result, and the name of its recipe."""

    recipe: str
    task: Task
    mixer: Mixer
    model: ModelConfig
    training: TrainingConfig

    def to_json(self) -> dict[str, Any]:
        values = {
            "recipe": self.recipe,
            "task": self.task.name,
            "task_options": self.task.values(),
            "mixer": self.mixer.name,
            "mixer_options": dict(self.mixer.options),
            "model": self.model.values(),
            "training": self.training.values(),
        }
        return json.loads(json.dumps(values))

    @classmethod
    def from_json(cls, values: Any, where: str) -> "Config":
        """The config that ``to_json`` wrote; ``where`` says in an error what cannot be read."""
        try:
            hints = dict.fromkeys(("recipe", "task", "mixer"), str) | dict.fromkeys(PARTS, dict[str, Any])
            known = {name: Option(name, hint) for name, hint in hints.items()}
            given = check_options(known, Option("config", dict[str, Any]).check(values), "a config")
            for kind, names in (("task", list_tasks()), ("mixer", list_mixers())):
                if given[kind] not in names:
                    own = "if it is your own, name its module in LONGLENS_IMPORT"
                    raise BadInput(f"the {kind} {shorten(given[kind])!r} is not known here; {own}")
            for name in PARTS:
                options = section_options(name.removesuffix("_options"), given["task"], [given["mixer"]])
                if missing := options.keys() - given[name].keys():
                    raise BadInput(f"{name} lacks {', '.join(sorted(missing))}")
            return _make_config(given["recipe"], given["task"], given["mixer"], (given[name] for name in PARTS))
        except BadInput as error:
            raise BadInput(f"{where} is no config of a run that can be used: {error}") from None

    def values(self) -> dict[str, Any]:
        """All that decides the result, by dotted names: ``training.lr``."""
        values = self.to_json()
        flat = {"task": values["task"], "mixer": values["mixer"]}
        for section in PARTS:
            flat |= {f"{section.removesuffix('_options')}.{key}": value for key, value in values[section].items()}
        return flat

    def digest(self, fingerprint: str, without: Iterable[str] = ()) -> str:
        """The name of its folder: another one if any number or the data is another."""
        left_out = {*without, *(name for name in LATER if self._is_default(name))}
        values = {name: value for name, value in self.values().items() if name not in left_out}
        text = json.dumps([values, fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _is_default(self, name: str) -> bool:
        section, _, option = name.partition(".")
        if section == "mixer":
            known = find_mixer(self.mixer.name).options.get(option)
            return known is not None and self.mixer.options[option] == known.default
        part = getattr(self, section)
        return hasattr(part, option) and getattr(part, option) == getattr(type(part), option, REQUIRED)


def _make_config(recipe: str, task: str | Task, mixer: str, sections: Iterable[Changes]) -> Config:
    of_task, of_mixer, model, training = sections
    return Config(
        recipe,
        task if isinstance(task, Task) else create_task(task, **of_task),
        choose_mixer(mixer, **of_mixer),
        ModelConfig.make(model, "the model"),
        TrainingConfig.make(training, "the training"),
    )


def _change_task(task: Task, changes: Changes) -> Task:
    """A task with other values of some options. The same one if they are its own: its data is then looked at once."""
    if all(getattr(task, name) == value for name, value in changes.items()):
        return task
    return type(task).make({**task.values(), **changes}, f"task {task.name!r}")


@dataclass(frozen=True)
class Recipe:
    """The numbers of a task at a scale, or those with which a layer was published: one TOML file."""

    name: str
    about: str = ""  # where the numbers come from
    source: str = ""  # of a published result: repository @ commit: files, or the table of a paper
    published: Annotated[float, Ge(0), Le(100), Is("a number from 0 to 100")] | None = None  # accuracy in percent
    gpu_hours: NonNegative | None = None  # estimated by what the source says
    differs: tuple[str, ...] = ()  # what is still not as in the source
    tasks: tuple[str, ...] = ()  # of a file that serves several
    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    mixer: dict[str, Any] = field(default_factory=dict)  # for every mixer that has such an option
    mixers: dict[str, dict[str, Any]] = field(default_factory=dict)  # for one mixer, by its name
    own: "dict[str, Recipe]" = field(default_factory=dict)  # of several mixers that have a recipe each; not of a file

    def defaults(self, section: str, mixer: str) -> dict[str, Any]:
        """What the recipe says about a section: for a mixer, the shared options that it has and then its own."""
        if mixer in self.own:
            return self.own[mixer].defaults(section, mixer)
        if section != "mixer":
            return getattr(self, section)
        shared = {name: value for name, value in self.mixer.items() if name in find_mixer(mixer).options}
        return shared | self.mixers.get(mixer, {})

    def common(self, section: str, mixers: Iterable[str]) -> dict[str, Any]:
        """What it says about a section for all of several mixers; None where it is not the same."""
        first, *others = (self.defaults(section, mixer) for mixer in mixers)
        names = dict.fromkeys(name for values in (first, *others) for name in values)
        same = {name for name in names if all(values.get(name) == first.get(name) for values in others)}
        return {name: first.get(name) if name in same else None for name in names}

    def resolve(
        self,
        task: str | Task,
        mixer: str,
        changes: Changes | None = None,
        *,
        others: Iterable[str] = (),
        also: Iterable[str] = (),
    ) -> Config:
        """A run of this recipe, with other values of some fields. Changes that only ``others`` of several mixers have
        are left out. An unknown name may have been meant to be one of the fields, or ``also`` one of the caller's."""
        name = task.name if isinstance(task, Task) else task
        new = sort_changes(changes or {}, name, [mixer, *others], also)
        new["mixer"] = {key: value for key, value in new["mixer"].items() if key in find_mixer(mixer).options}
        if any(new["training"].get(budget) is not None for budget in BUDGETS):  # instead of the recipe's
            new["training"] = dict.fromkeys(BUDGETS) | new["training"]
        if groups := new["training"].get("groups"):  # added to those of the recipe
            before = Option("groups", Groups | None).check(self.defaults("training", mixer).get("groups")) or {}
            new["training"]["groups"] = before | {name: before.get(name, {}) | groups[name] for name in groups}
        if isinstance(task, Task):
            task = _change_task(task, new["task"])
        sections = (self.defaults(section, mixer) | new[section] for section in SECTIONS)
        return _make_config(self.name, task, mixer, sections)


def load_recipe(given: str | Path, task: str, mixers: Iterable[str] = ()) -> Recipe:
    """The recipe of a task at a scale (smoke, mini or paper), that of a TOML file, or those with which the mixers were
    published, each its own. Every name in it is checked; the values are, when it is resolved."""
    find_task(task)
    name: str = Option("recipe", str).check(given)
    mixers = [find_mixer(mixer).name for mixer in mixers]
    if name == PUBLISHED and len(mixers) != 1:
        return Recipe(name, own={mixer: load_recipe(name, task, [mixer]) for mixer in mixers})
    try:
        recipe = _read_recipe(name, task, mixers)
        if name == PUBLISHED:  # none of the options can be left out
            recipe = replace(recipe, mixer={}, mixers={mixers[0]: recipe.mixer})
        aliases = find_task(task).aliases
        renamed = {aliases.get(option, option): value for option, value in recipe.task.items()}
        if len(renamed) < len(recipe.task):
            raise BadInput(f"[task] names an option twice, also by its old name: {', '.join(recipe.task)}")
        recipe = replace(recipe, task=renamed)
        for section in ("task", "model", "training"):
            check_names(section_options(section, task, ()), getattr(recipe, section), f"[{section}]")
        for mixer, options in recipe.mixers.items():
            check_names(find_mixer(mixer).options, options, f"mixer {mixer!r}")
        if not recipe.mixer.keys() <= section_options("mixer", task, mixers).keys():  # others have more
            check_names(section_options("mixer", task, list_mixers()), recipe.mixer, "[mixer]")
    except BadInput as error:
        raise BadInput(f"recipe {name} of {task}: {error}") from None
    return recipe


@cache
def shipped_recipes() -> dict[tuple[str, str], Traversable]:
    """The files of the shipped recipes by scale and task; ``*`` is for tasks that have none of their own."""
    found = {}
    for scale in SCALES:
        for path in (files("longlens.recipes") / scale).iterdir():
            tasks = tomllib.loads(path.read_text()).get("tasks", [path.name.removesuffix(".toml")])
            found |= {(scale, task): path for task in tasks}
    return found


@cache
def published_recipes() -> dict[tuple[str, str], Traversable]:
    """The files of the published recipes by mixer and task."""
    folders = sorted((files("longlens.recipes") / PUBLISHED).iterdir(), key=lambda folder: folder.name)
    found = [(folder.name, path.name.removesuffix(".toml"), path) for folder in folders for path in folder.iterdir()]
    return {(mixer, task): path for mixer, task, path in found if path.name.endswith(".toml")}


def _read_recipe(name: str, task: str, mixers: Sequence[str]) -> Recipe:
    if name == PUBLISHED:
        path = published_recipes().get((mixers[0], task))
        if path is None:
            those = ", ".join(mixer for mixer, known in published_recipes() if known == task)
            raise BadInput(f"mixer {mixers[0]!r} has no such recipe; choose from {those or 'other tasks'}")
        text = path.read_text()
    elif name in SCALES:
        shipped = shipped_recipes()
        path = shipped.get((name, task)) or shipped.get((name, "*"))
        if path is None:
            raise BadInput("there is none: give a TOML file of your own with --recipe")
        text = path.read_text()
    elif name.endswith(".toml") and "\0" not in name:
        try:
            with open_file(Path(name)) as file:
                text = file.read().decode()
        except OSError as error:
            raise BadInput(f"cannot read the file: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise BadInput(f"the file is not text: {error}") from None
    else:
        hint = nearest(name, (*SCALES, PUBLISHED))
        end = "" if hint.endswith("?") else "."
        raise BadInput(f"unknown recipe; {hint}{end} A file of your own must end in .toml")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of TOML, or a number of thousands of digits
        raise BadInput(f"not a TOML file: {error}") from None
    known = options_of(Recipe)
    del known["name"], known["own"]
    return Recipe(name, **check_options(known, values, "a recipe"))


def section_options(section: str, task: str, mixers: Iterable[str]) -> dict[str, Option]:
    """The options of a section of a config; those of several mixers together, where they differ with what any takes."""
    if section != "mixer":
        return options_of({"model": ModelConfig, "training": TrainingConfig}.get(section) or find_task(task))
    joined: dict[str, Option] = {}
    for mixer in mixers:
        for name, option in find_mixer(mixer).options.items():
            before = joined.setdefault(name, option)
            if before.hint != option.hint:
                joined[name] = replace(before, hint=before.hint | option.hint)
    return joined


def find_option(name: str, known: Mapping[str, Mapping[str, Option]], task: str) -> tuple[str, str] | None:
    """The section and the option of a dotted name; a plain one is looked up in training, model, mixer and task."""
    section, _, option = name.rpartition(".")
    if section in ("", "task"):
        option = find_task(task).aliases.get(option, option)
    sections = [section] if section else reversed(SECTIONS)
    return next(((section, option) for section in sections if option in known.get(section, ())), None)


def sort_changes(changes: Changes, task: str, mixers: Iterable[str], also: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Changes by section. ``also`` are names that an error may propose besides."""
    known = {section: section_options(section, task, mixers) for section in SECTIONS}
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in changes.items():
        place = find_option(name, known, task)
        if place is None:
            names = [f"{s}.{o}" if "." in name else o for s in SECTIONS for o in known[s]]
            raise BadInput(f"there is no option {name!r}; {nearest(name, dict.fromkeys([*also, *names]))}")
        section, option = place
        if option in found[section]:
            raise BadInput(f"{section}.{option} is given twice")
        found[section][option] = known[section][option].check(value)
    return found


@dataclass(frozen=True, kw_only=True)
class Runtime(Options):
    """Where and how to run; the result is the same up to rounding.

    Args:
        runs: Folder of all runs.
        folder: Folder of this run, instead of RUNS/TASK/MIXER/HASH.
        device: Device to train on; auto is a GPU if there is one.
        threads: Threads of a process on the CPU; by default as many as the machine has free cores.
        parallel: Under torchrun: a whole model in each process (ddp), or a part of it (fsdp).
        compile: Compile the model with torch.compile.
        deterministic: Choose kernels that give the same bits each time, where torch has them.
        tf32: Use TF32 for float32 matrix products on GPUs that have it.
        checkpoint_every: Steps between checkpoints, beside those at evaluations.
        keep: Number of checkpoints to keep, beside the best.
        log_every: Steps between lines of metrics.jsonl.
        tensorboard: Write the metrics for TensorBoard as well.
        wandb: Project of Weights & Biases to send the metrics to.
    """

    runs: Path = Path("runs")
    folder: Path | None = None
    device: Device = "auto"
    threads: Size | None = None
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool = False
    deterministic: bool = True
    tf32: bool = False
    checkpoint_every: Size = 500
    keep: Size = 2
    log_every: Size = 10
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tensorboard", "wandb"):
            if getattr(self, name) not in (None, False) and find_spec(name) is None:
                raise BadInput(f"{name} is not installed: pip install 'longlens[{name}]'")


def completed(values: Any) -> Any:
    """A config with the defaults of options that were not there when it was written."""
    values = dict(values)
    for name in PARTS:
        options = section_options(name.removesuffix("_options"), values["task"], [values["mixer"]]).values()
        defaults = {option.name: option.default for option in options if option.default is not REQUIRED}
        values[name] = json.loads(json.dumps(defaults)) | values[name]
    return values


def differences(before: Config, now: Config) -> list[str]:
    """The fields in which two configs differ: ``training.lr: 0.001, now 0.01``."""
    old, new = before.values(), now.values()
    pairs = {name: (old.get(name, "not there"), new.get(name, "not there")) for name in old | new}
    return [f"{name}: {was}, now {now_is}" for name, (was, now_is) in pairs.items() if was != now_is]
