"""Recipes: TOML of all kinds, shipped ones with other keys, values and types, and files that are no TOML."""

import datetime
import math
import tomllib
from pathlib import Path
from typing import Any

from fuzz.cases import dry, fuzz, new_case
from fuzz.damage import PLACES, _mutated, damages, json_values, make_beside, wild_texts
from fuzz.lines import fitting
from hypothesis import strategies as st

from longlens.training.config import section_options, shipped_recipes

TINY = "--task.max-length 8 --task.sizes 8 4 4 --steps 1 --batch-size 4 --depth 1 --width 8 --threads 1".split()

dates = st.sampled_from([datetime.date(2024, 5, 1), datetime.time(1, 2), datetime.datetime(2024, 5, 1, 1, 2)])
toml_values = st.one_of(json_values, dates, st.lists(dates, max_size=2), st.just({"a": {"b": {"c": [1, [2, [3]]]}}}))
shipped = sorted(shipped_recipes())
sections = st.sampled_from(
    ["task", "model", "training", "mixer", "mixers", "about", "tasks", "name", "modle", "recipe"]
)


def to_toml(tree: dict[str, Any]) -> str:
    """Tables in one line each: all that TOML can say."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in tree.items() if value is not None)


def _key(key: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in key) + '"'


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _key(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return '"none"' if value is None else repr(value)


@st.composite
def mutated_recipes(draw: st.DrawFn) -> tuple[str, str]:
    """A task, and a recipe of it in which one to three entries are others."""
    scale, task = draw(st.sampled_from(shipped))
    tree: Any = tomllib.loads(shipped_recipes()[scale, task].read_text())
    task = "listops" if task == "*" else task
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):  # anything anywhere
            tree = _mutated(tree, draw(PLACES), draw(toml_values))
            tree = tree if isinstance(tree, dict) else {draw(sections): tree}
            continue
        section = draw(st.sampled_from(["task", "model", "training", "mixer"]))
        options = section_options(section, task, ["las", "s4"])
        name = draw(st.sampled_from(list(options)))
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section][name] = draw(fitting(options[name].hint).map(_as_value))
    return task, to_toml(tree)


def _as_value(words: list[str]) -> Any:
    """What the words of a flag are in TOML."""
    values = [_number(word) for word in words]
    return values[0] if len(values) == 1 else values


def _number(word: str) -> Any:
    try:
        return int(word) if word.lstrip("-").isdecimal() else float(word)
    except ValueError:
        return word


random_recipes = st.dictionaries(sections, toml_values, max_size=4).map(to_toml)


@fuzz(250, recipe=mutated_recipes())
def test_a_recipe_with_other_entries(recipe):
    task, text = recipe
    with new_case("recipes") as case, dry():
        Path("my.toml").write_text(text)
        case.longlens("train", task, "--recipe", "my.toml")


@fuzz(80, text=random_recipes)
def test_any_toml(text):
    with new_case("recipes") as case, dry():
        Path("my.toml").write_text(text)
        said = case.longlens("compare", "atomic-cumsum", "--recipe", "my.toml", "--mixers", "las", "lstm")
        assert said.code == 2 or "steps" in text or "epochs" in text, said


@fuzz(120, which=st.sampled_from(shipped), damage=st.lists(damages(to_json=False), min_size=1, max_size=3))
def test_a_damaged_file(which, damage):
    """A flipped bit may make another recipe; nobody can know that."""
    scale, task = which
    with new_case("recipes") as case, dry():
        path = Path("my.toml")
        path.write_text(shipped_recipes()[scale, task].read_text())
        beside = make_beside(case.folder / "beside")
        for how in damage:
            how.apply(path.absolute(), beside)
        case.longlens("train", task if task != "*" else "listops", "--recipe", "my.toml")


@fuzz(
    60,
    text=st.one_of(st.text(max_size=60), st.text("[]{}=\"'.,#\n ab1", max_size=60), wild_texts),
    name=wild_texts,
)
def test_no_toml(text, name):
    with new_case("recipes") as case, dry():
        Path("my.toml").write_text(text)
        case.longlens("train", "listops", "--recipe", "my.toml")
        case.longlens("train", "listops", "--recipe", f"{name}.toml")


@st.composite
def small_recipes(draw: st.DrawFn) -> str:
    """The smoke recipe, in which some value of the model, the mixer or the training is another one that is not slow."""
    tree: Any = tomllib.loads(shipped_recipes()["smoke", "atomic-cumsum"].read_text())
    names = ["lr", "clip", "betas", "schedule", "warmup", "factor", "patience", "weight_decay", "kernel_lr", "seed"]
    place = draw(st.sampled_from([*(("training", name) for name in names), ("model", "dropout"), ("mixer", "window")]))
    tree[place[0]][place[1]] = draw(toml_values)
    return to_toml(tree)


@fuzz(60, text=small_recipes())
def test_a_recipe_is_trained(text):
    with new_case("recipes") as case:
        Path("my.toml").write_text(text)
        case.longlens("train", "atomic-cumsum", "--recipe", "my.toml", *TINY)
