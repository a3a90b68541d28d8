"""What a run is: typed configs, recipes, and the one resolved config that names its folder. No torch here."""

import hashlib
import json
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from longlens.mixers.base import Config as MixerConfig
from longlens.mixers.base import list_mixers, mixer_class, mixer_config, mixer_options
from longlens.models.config import ModelConfig, Strict, check_fit
from longlens.naming import nearest
from longlens.options import option_names, required_options
from longlens.tasks.base import Task, create_task, list_tasks, task_class, task_options

SCALES = ("smoke", "mini", "paper")


class TrainingConfig(Strict):
    """How a model is trained. All of it decides the result."""

    seed: Annotated[int, Field(ge=0, description="of the weights, the order of the samples and dropout.")] = 0
    batch_size: Annotated[int, Field(ge=1, description="samples in a step, in all processes together.")] = 32
    epochs: Annotated[float | None, Field(gt=0, description="passes over the training set; or else steps.")] = None
    steps: Annotated[int | None, Field(ge=1, description="steps of training; or else epochs.")] = None
    lr: Annotated[float, Field(gt=0, description="peak learning rate of AdamW.")] = 1e-3
    special_lr: Annotated[
        float, Field(gt=0, description="the most for parameters of state spaces, which also do not decay.")
    ] = 1e-3
    weight_decay: Annotated[float, Field(ge=0, description="of matrices; never of norms and biases.")] = 0.0
    betas: Annotated[tuple[float, float], Field(description="of AdamW.")] = (0.9, 0.999)
    schedule: Annotated[
        Literal["constant", "cosine", "plateau"],
        Field(description="of the learning rate: cosine falls to 0; plateau falls when validation stops improving."),
    ] = "cosine"
    warmup: Annotated[float, Field(ge=0, lt=1, description="cosine: share of the steps in which the rate rises.")] = 0.1
    patience: Annotated[
        int, Field(ge=0, description="plateau: evaluations without improvement before the rate falls.")
    ] = 10
    factor: Annotated[float, Field(gt=0, lt=1, description="plateau: what the rate is multiplied by.")] = 0.2
    clip: Annotated[float | None, Field(gt=0, description="largest norm of the gradient.")] = None
    accumulate: Annotated[
        int, Field(ge=1, description="parts in which a batch is computed, to save memory; batch norm then sees parts.")
    ] = 1
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Field(description="auto is bfloat16 autocast on GPUs that have it, float32 elsewhere."),
    ] = "auto"
    evaluate_every: Annotated[
        int | None, Field(ge=1, description="steps between evaluations on validation; by default an epoch.")
    ] = None
    valid_samples: Annotated[
        int | None, Field(ge=1, description="validation samples in an evaluation; by default all.")
    ] = None
    test_samples: Annotated[int | None, Field(ge=1, description="test samples at the end; by default all.")] = None
    group_by_length: Annotated[bool, Field(description="put samples of similar length into a batch.")] = True

    @model_validator(mode="after")
    def _one_length(self) -> "TrainingConfig":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs is {self.epochs} and steps is {self.steps}; give one of them")
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate is {self.accumulate}; it can be at most the batch_size, {self.batch_size}")
        return self


class Recipe(Strict):
    """The numbers of a task at a scale: one TOML file."""

    about: str = ""  # where the numbers come from
    task: dict[str, Any] = Field(default_factory=dict)
    model: ModelConfig = ModelConfig()
    training: TrainingConfig
    mixer: dict[str, Any] = Field(default_factory=dict)  # for every mixer that has such an option
    mixers: dict[str, dict[str, Any]] = Field(default_factory=dict)  # for one mixer, by its name


class Config(Strict):
    """A run, resolved: every number that decides its result, and nothing else but the name of its recipe."""

    recipe: str
    task: str
    task_options: dict[str, Any]
    mixer: str
    mixer_options: dict[str, Any]
    model: ModelConfig
    training: TrainingConfig

    def create_task(self) -> Task:
        return create_task(self.task, **self.task_options)

    def create_mixer(self) -> MixerConfig:
        return mixer_config(self.mixer, **self.mixer_options)

    def values(self) -> dict[str, Any]:
        """All that decides the result, by dotted names: ``training.lr``."""
        flat = {}
        for name, value in self.model_dump(mode="json", exclude={"recipe"}).items():
            if isinstance(value, dict):
                flat |= {f"{name.removesuffix('_options')}.{key}": entry for key, entry in value.items()}
            else:
                flat[name] = value
        return flat

    def digest(self, fingerprint: str) -> str:
        """The name of its folder: another one if any number or the data is another."""
        text = json.dumps([self.values(), fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def make_config(
    recipe: str, task: Task, mixer: MixerConfig, model: ModelConfig, training: TrainingConfig
) -> Config:  # fmt: skip
    return Config(
        recipe=recipe, task=task.name, task_options=task_options(task), mixer=mixer.name,
        mixer_options=mixer_options(mixer), model=model, training=training,
    )  # fmt: skip


def load_recipe(name: str, task: str) -> Recipe:
    """The recipe of a task at a scale (smoke, mini or paper), or that of a TOML file."""
    if task not in list_tasks():
        raise ValueError(f"there is no task {task!r}; {nearest(task, list_tasks())}")
    if name in SCALES:
        path = files("longlens.recipes") / name / f"{task}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        raise ValueError(
            f"there is no recipe {name!r}; {nearest(name, list(SCALES))}; a file of your own must end in .toml"
        )
    if not path.is_file():
        where = f"{task} has no recipe {name!r}: give a file of your own" if name in SCALES else f"{name} is not a file"
        raise ValueError(where)
    try:
        recipe = Recipe.model_validate(tomllib.loads(path.read_text()))
        for mixer, options in recipe.mixers.items():
            mixer_config(mixer, **options)
        known = {option for mixer in list_mixers() for option in option_names(mixer_class(mixer))}
        for option in recipe.mixer:
            if option not in known:
                raise ValueError(f"no mixer has an option {option!r}; {nearest(option, sorted(known))}")
    except ValidationError as error:
        raise ValueError(f"recipe {name} of {task}: {explain(error)}") from None
    except ValueError as error:  # of TOML, or of the options
        raise ValueError(f"recipe {name} of {task}: {error}") from None
    return recipe


def recipe_mixer(recipe: Recipe, mixer: str) -> MixerConfig:
    """The options of a mixer in a recipe: the shared ones that it has, then its own."""
    known = option_names(mixer_class(mixer))
    shared = {option: value for option, value in recipe.mixer.items() if option in known}
    return mixer_config(mixer, **(shared | recipe.mixers.get(mixer, {})))


def resolve(recipe: str, task: str, mixer: str, changes: dict[str, Any] | None = None) -> Config:
    """A run by the names of its recipe, task and mixer, with other values of some fields.

    ``changes`` are by dotted or plain names: ``{"training.lr": 1e-4, "depth": 2, "task.max_length": 512}``.
    """
    found = load_recipe(recipe, task)
    if any(option not in found.task for option in required_options(task_class(task))):
        options = {k.removeprefix("task."): v for k, v in (changes or {}).items() if k.startswith("task.")}
        found = found.model_copy(update={"task": found.task | options})
    config = make_config(
        recipe, create_task(task, **found.task), recipe_mixer(found, mixer), found.model, found.training
    )  # fmt: skip
    return change(config, changes or {})


def change(config: Config, changes: dict[str, Any]) -> Config:
    """The config with other values of some fields, by dotted or plain names."""
    values = config.model_dump()
    for name, value in changes.items():
        section, field = _place(name, values)
        values[section] = values[section] | {field: value}
    for field, other in (("steps", "epochs"), ("epochs", "steps")):
        given = {name.removeprefix("training.") for name in changes}
        if field in given and other not in given:
            values["training"][other] = None
    try:
        changed = Config.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error)) from None
    task, mixer = changed.create_task(), changed.create_mixer()
    check_fit(task.head, mixer, changed.model)  # before any data is prepared
    return make_config(config.recipe, task, mixer, changed.model, changed.training)


SECTIONS = {"task": "task_options", "mixer": "mixer_options", "model": "model", "training": "training"}


def _place(name: str, values: dict[str, Any]) -> tuple[str, str]:
    """The section and the field that a dotted or plain name means. A plain name is never an option of the task."""
    known = [f"{short}.{field}" for short, section in SECTIONS.items() for field in values[section]]
    plain = [entry.partition(".")[2] for entry in known if not entry.startswith("task.")]
    wanted = [name] if "." in name else [f"{short}.{name}" for short in ("training", "model", "mixer")]
    for entry in wanted:
        if entry in known:
            short, _, field = entry.partition(".")
            return SECTIONS[short], field
    raise ValueError(f"there is no field {name!r}; {nearest(name, known if '.' in name else plain)}")


def differences(before: Config, now: Config) -> list[str]:
    """The fields in which two configs differ: ``training.lr: 0.001, now 0.01``."""
    old, new = before.values(), now.values()
    missing = "not there"
    return [
        f"{name}: {old.get(name, missing)}, now {new.get(name, missing)}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name, missing) != new.get(name, missing)
    ]


def explain(error: ValidationError) -> str:
    """The first complaint of pydantic, as a sentence."""
    first = min(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")  # a typo explains what is missing
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *path, unknown = first["loc"]
        fields = _fields_at(path)
        return f"there is no field {name!r}; {nearest(str(unknown), fields)}" if fields else f"no field {name!r}"
    if first["type"] == "value_error":  # of our own validators
        return str(first.get("ctx", {})["error"])
    reason = first["msg"][0].lower() + first["msg"][1:]
    return f"{name} is {first['input']!r}: {reason}" if name else reason


def _fields_at(path: list[Any]) -> list[str]:
    sections: dict[str, type[Strict]] = {"model": ModelConfig, "training": TrainingConfig}
    return list((sections[path[-1]] if path and path[-1] in sections else Recipe).model_fields)
