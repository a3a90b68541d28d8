"""The command that makes a run, from its config: what differs from its recipe, as flags."""

import shlex
from functools import cache
from typing import Any

from longlens.errors import BadInput
from longlens.training.config import Config, load_recipe


def command_of(config: Config) -> str:
    """``longlens train image --mixer las --recipe mini --seed 1 --mixer.window 5``. Of a recipe that is no longer
    there, nobody knows what differs, and the command names its file alone."""
    words = ["longlens", "train", config.task.name, "--mixer", config.mixer.name, "--recipe", config.recipe]
    values = config.values()
    usual = _usual(config.recipe, config.task.name, config.mixer.name)
    if usual is None:
        usual = _beside_the_task(config)
    for name, value in values.items():
        if name in ("task", "mixer") or usual.get(name, ...) == value:
            continue
        section, _, option = name.partition(".")
        flag = (name if section in ("task", "mixer") else option).replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}", *_given(value)]
    return shlex.join(words)


@cache
def _usual(recipe: str, task: str, mixer: str) -> dict[str, Any] | None:
    """The values of the recipe; None if they take options of the task, such as the path of files."""
    try:
        return load_recipe(recipe, task, [mixer]).resolve(task, mixer).values()
    except BadInput:
        return None


def _beside_the_task(config: Config) -> dict[str, Any]:
    """The values of the recipe without those of the task; all of the config if there is no recipe."""
    try:
        recipe = load_recipe(config.recipe, config.task.name, [config.mixer.name])
        usual = recipe.resolve(config.task, config.mixer.name).values()
    except BadInput:
        return config.values()
    return {name: value for name, value in usual.items() if not name.startswith("task.")}


def _given(value: Any) -> list[str]:
    """A value as words of a command."""
    if value is None or value is True:
        return ["none"] if value is None else []
    if isinstance(value, dict):  # groups of parameters
        return [f"{group}.{key}={number}" for group, table in value.items() for key, number in table.items()]
    return [*map(str, value)] if isinstance(value, list | tuple) else [str(value)]
