"""``longlens list``, ``longlens recipe show`` and ``longlens data list``: what there is."""

import re
from pathlib import Path
from typing import Any

from longlens.cli import sentence
from longlens.data import store
from longlens.errors import BadInput
from longlens.mixers import registry as mixers
from longlens.options import REQUIRED, Size, nearest, options_of
from longlens.reports.sheet import Column, Sheet
from longlens.reports.tables import runs_tables
from longlens.tasks import base as tasks
from longlens.training.config import PUBLISHED, SCALES, load_recipe, published_recipes, shipped_recipes


def list_tasks() -> list[Any]:
    """List the tasks, where their data comes from, and which sets are prepared."""
    columns = [Column("task"), Column("what", wrap=True), Column("head", 2), Column("metric", 3)]
    known = Sheet("", [*columns, Column("data", 1), Column("default set")])
    for name in tasks.list_tasks():
        found = tasks.find_task(name)
        needs = any(option.default is REQUIRED for option in options_of(found).values())
        task = None if needs else tasks.create_task(name)
        stored = isinstance(task, tasks.StoredTask)
        ready = "–" if not stored else "prepared" if task.is_prepared() else "not prepared"
        known.rows.append([name, found.summary, found.head, found.metric, found.origin, ready])
    columns = [Column("prepared set"), Column("train / valid / test"), Column("MB", 1, number=True)]
    sets = Sheet("", [*columns, Column("note", wrap=True)])
    for folder in store.prepared_sets():
        sets.rows.append([folder.name, *_describe(folder)])
    for folder in store.unfinished_sets():
        size = sum(file.stat().st_size for file in folder.iterdir())
        sets.rows.append([folder.name, "", f"{size / 1e6:,.0f}", "unfinished: the same command resumes"])
    return [known, sets if sets.rows else None, f"cache folder: {store.home()} (LONGLENS_HOME)"]


def _describe(folder: Path) -> tuple[str, str, str]:
    """Sizes, megabytes and a note about a set."""
    try:
        prepared = store.Prepared(folder)
        sizes = prepared.details["sizes"]
        shown = " / ".join(f"{sizes[split]:,}" if split in sizes else "–" for split in tasks.SPLITS)
        details = prepared.details
        note = details.get("stand_in") or details.get("warning") or "; ".join(details.get("warnings", ()))
        return shown, f"{prepared.size() / 1e6:,.0f}", str(note)
    except (store.CacheError, BadInput, KeyError, TypeError, ValueError, AttributeError):
        return "", "", "damaged: make it again with --force"


def list_mixers(name: str = "", *, traits: bool = False, length: Size = 1024, width: Size = 64) -> list[Any]:
    """List the mixers: the layers that mix the tokens of a sequence. With a name, describe one of them, or those whose
    names contain it.

    Args:
        name: Name of a mixer, or a part of names.
        traits: Show what the layers are made of, as the paper's Table 10, beside what can be measured of it.
        length: Length of the sequences with which traits are measured.
        width: Width of the layers of which traits are measured.
    """
    if traits:
        from longlens.paper.table10 import traits_tables

        return list(traits_tables(length, width))
    names = [known for known in mixers.list_mixers() if name in known]
    if name in names or not names:
        preset = mixers.find_mixer(name)
        sheet = Sheet(f"{name}: {preset.summary}", [Column("option"), Column("default"), Column("meaning", wrap=True)])
        for option in preset.options.values():
            sheet.rows.append([option.name, "none" if option.default is None else str(option.default), option.help])
        fixed = ", ".join(f"{option}={value}" for option, value in preset.fixed.items())
        code = f"in Python: create_mixer({name!r}, d_model=…)"
        if name in mixers.REGISTRY.modules:
            code += f", or from longlens.mixers import {preset.layer_name}"
        return [sheet, sentence(f"fixed: {fixed}") if fixed else None, sentence(code)]
    sheet = Sheet("", [Column("mixer"), Column("sides"), Column("what", wrap=True), Column("cost", 1)])
    for known in names:
        preset, side = mixers.find_mixer(known), mixers.seen_sides(known)
        sheet.rows.append([known, side, preset.summary, "–" if preset.traits is None else preset.traits.cost])
    return [sheet, "'longlens list mixers NAME' shows the options of one, --traits their designs"]


def list_runs(*, runs: Path = Path("runs")) -> list[Sheet]:
    """List the runs of a folder: finished ones with their results, and those that can be resumed.

    Args:
        runs: Folder of the runs.
    """
    return runs_tables(runs)


def list_recipes(task: str = "") -> list[Any]:
    """List the recipes that come with the package: the numbers of a task at a scale, and those with which layers were
    published (--recipe published).

    Args:
        task: Name of a task; by default all.
    """
    if task:
        tasks.find_task(task)
    sheet = Sheet("", [Column("task"), Column("recipe"), Column("about", wrap=True)])
    for name in [task] if task else tasks.list_tasks():
        for scale in SCALES:
            if {(scale, name), (scale, "*")} & shipped_recipes().keys():
                about = load_recipe(scale, name).about
                sheet.rows.append([name, scale, about if task else re.split(r"[:;] |\. (?=[A-Z])|\.$", about)[0]])
    numbers = [Column("accuracy", number=True), Column("GPU hours", 1, number=True)]
    published = Sheet("published", [Column("mixer"), Column("task"), *numbers, Column("source", wrap=True)])
    order = tasks.list_tasks().index
    for mixer, name in sorted(published_recipes(), key=lambda pair: (pair[0], order(pair[1]))):
        if name == task or not task:
            recipe = load_recipe(PUBLISHED, name, [mixer])
            shown = [f"{recipe.published:.2f}", "–" if recipe.gpu_hours is None else f"{recipe.gpu_hours:g}"]
            source = recipe.source if task else recipe.source.partition(": ")[0]
            published.rows.append([mixer, name, *shown, source])
    more = "'longlens recipe show TASK SCALE' prints one, 'list recipes TASK' says more"
    return [sheet, published if published.rows else None, more]


def show_recipe(task: str, scale: str = "mini", *, mixer: str = "las") -> str:
    """Print a recipe as TOML: save it as a file, change it, and train with --recipe FILE.toml.

    Args:
        task: Name of the task.
        scale: Scale of the recipe: smoke, mini, paper or published.
        mixer: Name of the mixer whose published recipe it is.
    """
    tasks.find_task(task)
    if scale == PUBLISHED:
        load_recipe(scale, task, [mixer])  # which says what is wrong
        return published_recipes()[mixer, task].read_text().rstrip()
    if scale not in SCALES:
        raise BadInput(f"unknown scale {scale!r}; {nearest(scale, (*SCALES, PUBLISHED))}")
    path = shipped_recipes().get((scale, task)) or shipped_recipes().get((scale, "*"))
    if path is None:
        raise BadInput(f"{task} has no recipe {scale!r}; 'longlens list recipes' shows all")
    return path.read_text().rstrip()
