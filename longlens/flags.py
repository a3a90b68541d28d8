"""The flags of commands that train: made of the options of the task and the mixer and of the configs, so that help
shows each field with the value of the recipe. What was changed goes through the same checks as a recipe."""

import argparse
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from longlens.mixers.base import mixer_class
from longlens.models.config import ModelConfig, Strict
from longlens.options import option_names, required_options
from longlens.tasks.base import create_task, task_class
from longlens.training.config import Config, Recipe, TrainingConfig, load_recipe, recipe_mixer, resolve
from longlens.training.runtime import Runtime

RECIPE, MIXER, MIXERS = "mini", "las", ("transformer", "las", "las-chunk")


@dataclass(frozen=True, kw_only=True)
class Many:
    """Several runs.

    Args:
        seeds: one run of each for each seed; by default the one of --seed.
        engine: processes on this machine, or a Ray cluster.
        jobs: runs at a time on this machine.
        address: of the Ray cluster; by default one is started on this machine.
        out: also write the results to this JSON file.
    """

    seeds: tuple[int, ...] = ()
    engine: Literal["local", "ray"] = "local"
    jobs: int = 1
    address: str | None = None
    out: Path | None = None


class Flags:
    """The flags of one task: a dataclass for tyro, and the way back from its values to changes of a config.

    Args:
        task: its name.
        arguments: of the command line, in which ``--recipe`` and the mixers are looked up first.
        several: mixers are compared: their options are given to those that have them.
    """

    def __init__(self, task: str, arguments: list[str], *, several: bool = False):
        chosen = _look_up(arguments)
        self.task, self.recipe_name = task, chosen.recipe
        self.mixers = list(chosen.mixers) if several else [chosen.mixer]
        self.recipe: Recipe = load_recipe(self.recipe_name, task)
        for mixer in self.mixers:
            mixer_class(mixer)
        self.defaults = {
            "task": _task_defaults(task, self.recipe),
            "mixer": self._shared_mixer() if several else without_checks(recipe_mixer(self.recipe, self.mixers[0])),
            "model": plain(ModelConfig, self.recipe.model),
            "training": plain(TrainingConfig, self.recipe.training),
        }
        self.runtime = plain(Runtime, Runtime())

    def type(self) -> Any:
        """The dataclass: ``--task.…`` and ``--mixer.…`` for their options, plain names for the others."""
        sections = []
        for name, value in (self.defaults | {"runtime": self.runtime}).items():
            prefix = tyro.conf.arg(name=name if name in ("task", "mixer") else "")
            sections.append((name, Annotated[type(value), prefix], field(default=value)))
        return make_dataclass("Flags", sections, kw_only=True)

    def changes(self, values: Any) -> dict[str, Any]:
        """What differs from the recipe, by dotted names."""
        changed = {}
        for section, before in self.defaults.items():
            now = getattr(values, section)
            for option in fields(before):
                old, new = getattr(before, option.name), getattr(now, option.name)
                if new != old or old is tyro.MISSING:
                    changed[f"{section}.{option.name}"] = new
        return changed

    def config(self, mixer: str, changes: dict[str, Any], *, shared: bool = False) -> Config:
        """The config of a run. If the changes are shared by several mixers, options of others are left out."""
        if shared:
            known = {f"mixer.{option}" for option in option_names(mixer_class(mixer))}
            changes = {name: v for name, v in changes.items() if not name.startswith("mixer.") or name in known}
        return resolve(self.recipe_name, self.task, mixer, changes)

    def runtime_of(self, values: Any) -> Runtime:
        return Runtime(**asdict(values.runtime))

    def _shared_mixer(self) -> Any:
        """The options of all mixers, of which None are given."""
        options: dict[str, Any] = {}
        for mixer in self.mixers:
            hints = get_type_hints(mixer_class(mixer))
            for name in option_names(mixer_class(mixer)):  # of several types, what any of the mixers takes
                options[name] = options[name] | hints[name] if name in options else hints[name]
        note = tyro.conf.arg(help="of the mixers that have it; by default as the recipe says.")
        made = [(name, Annotated[hint | None, note], field(default=None)) for name, hint in options.items()]
        return make_dataclass("Mixer", made, kw_only=True, frozen=True)()


def _look_up(arguments: list[str]) -> argparse.Namespace:
    """The flags that decide which other flags there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe", default=RECIPE, const=RECIPE, nargs="?")  # a missing value is tyro's to report
    parser.add_argument("--mixer", default=MIXER, const=MIXER, nargs="?")
    parser.add_argument("--mixers", default=MIXERS, nargs="*")
    return parser.parse_known_args(arguments)[0]


def _task_defaults(task: str, recipe: Recipe) -> Any:
    chosen = task_class(task)
    missing = {name: tyro.MISSING for name in required_options(chosen) if name not in recipe.task}
    if missing:
        return without_checks_class(chosen)(**missing, **recipe.task)
    return without_checks(create_task(task, **recipe.task))


def without_checks_class(chosen: type) -> Any:
    """The fields of a dataclass without its checks: they run, and speak for themselves, when it is created."""
    return type(chosen.__name__, (chosen,), {"__post_init__": lambda self: None, "__doc__": chosen.__doc__})


def without_checks(instance: Any) -> Any:
    return without_checks_class(type(instance))(**asdict(instance))


def plain(chosen: type[Strict], values: Strict) -> Any:
    """A config as a dataclass of plain types, with its descriptions as help: what it refuses, it says itself later."""
    made = [
        (name, Annotated[info.annotation, tyro.conf.arg(help=info.description)], field(default=getattr(values, name)))
        for name, info in chosen.model_fields.items()
    ]
    return make_dataclass(chosen.__name__, made, kw_only=True, frozen=True)()
