"""``longlens list`` and ``longlens recipe show``: everything is there, at any width."""

import json
import shutil
import tomllib

import pytest

from longlens.mixers.registry import find_mixer, list_mixers, seen_sides
from longlens.tasks.base import find_task, list_tasks
from longlens.training.config import SCALES, load_recipe, published_recipes

WIDTHS = pytest.mark.parametrize("columns", [80, 120])


@pytest.fixture
def show(longlens):
    """A list on a terminal; nothing of it is cut or wider than the terminal."""

    def call(*arguments, columns):
        said = longlens("list", *arguments, columns=columns)
        assert (said.code, said.err) == (0, "")
        assert "…" not in said.out.replace("d_model=…", "")
        assert max(map(len, said.out.splitlines())) <= columns
        return said

    return call


@WIDTHS
def test_every_mixer_is_listed(show, columns):
    said = show("mixers", columns=columns)
    for name in list_mixers():
        assert f"│ {name} " in said.out
        assert f" {name} {seen_sides(name)} {find_mixer(name).summary.split()[0]}" in said.words
    assert len(said.out.splitlines()) < len(list_mixers()) + 20, "a line for each, but for some that are long"


@WIDTHS
@pytest.mark.parametrize("name", ["s4d", "las", "las-bidirectional", "l-attention", "mega-chunk"])
def test_a_mixer_is_described(show, name, columns):
    said = show("mixers", name, columns=columns)
    preset = find_mixer(name)
    assert preset.summary in said.words
    for option in preset.options.values():
        assert f"│ {option.name} " in said.out
    for option, value in preset.fixed.items():
        assert f"{option}={value}" in said.words
    assert f"create_mixer('{name}', d_model=…)" in said.words
    assert f"from longlens.mixers import {preset.layer_name}" in said.words


def test_a_part_of_a_name_is_a_filter(show):
    said = show("mixers", "chunk", columns=80)
    assert "│ las-chunk " in said.out
    assert "│ mega-chunk " in said.out
    assert "│ s4d " not in said.out


@pytest.mark.slow
@WIDTHS
def test_the_traits_of_every_mixer(longlens, columns):
    said = longlens("list", "mixers", "--traits", "--length", 16, "--width", 16, columns=columns)
    assert said.code == 0, said.err
    assert "…" not in said.out
    assert max(map(len, said.out.splitlines())) <= columns
    for name in list_mixers():
        assert said.out.count(f"│ {name} ") >= 2


@WIDTHS
@pytest.mark.parametrize("command", ["list tasks", "data list"])
def test_every_task_is_listed(longlens, command, columns, home):
    said = longlens(*command.split(), columns=columns)
    assert said.code == 0
    lines = said.out.splitlines()
    assert all(len(line) <= columns for line in lines if not line.startswith("cache folder"))
    assert "…" not in said.out
    for name in list_tasks():
        assert f"│ {name} " in said.out
    assert lines[-1] == f"cache folder: {home} (LONGLENS_HOME)"


def test_a_task_says_what_it_is(longlens):
    said = longlens("list", "tasks", columns=200)
    for name in list_tasks():
        task = find_task(name)
        assert f"{name} {task.summary} {task.head} {task.metric} {task.origin}" in said.words


@WIDTHS
def test_every_recipe_is_listed(show, columns):
    said = show("recipes", columns=columns)
    for name in list_tasks():
        for scale in SCALES:
            assert f"│ {name} " in said.out
            assert f" {name} {scale} " in said.words


@pytest.mark.parametrize("task", ["listops", "text8"])
def test_the_recipes_of_a_task_are_described(show, task):
    said = show("recipes", task, columns=80)
    for scale in SCALES:
        assert f"{task} {scale} {load_recipe(scale, task).about[:30]}" in said.words.replace("  ", " ")
    assert "image" not in said.out


@WIDTHS
def test_every_published_recipe_is_listed(show, columns):
    """The layer, the task, the published result, the hours if there is an estimate, and the source."""
    said = show("recipes", columns=columns)
    for mixer, task in published_recipes():
        recipe = load_recipe("published", task, [mixer])
        hours = "–" if recipe.gpu_hours is None else f"{recipe.gpu_hours:g}"
        assert f" {mixer} {task} {recipe.published:.2f} {hours} {recipe.source[:9]}" in said.words
    of_task = show("recipes", "image", columns=columns)
    assert "mega image 90.44 – facebookresearch/mega" in of_task.words
    assert "mega listops" not in of_task.words
    assert "accuracy" not in show("recipes", "text8", columns=columns).words


@pytest.mark.parametrize(("mixer", "task"), sorted(published_recipes())[::5])
def test_a_published_recipe_can_be_printed_and_used(longlens, here, mixer, task):
    (here / "my.toml").write_text(longlens("recipe", "show", task, "published", "--mixer", mixer).out)
    mine, shipped = (load_recipe(name, task, [mixer]).resolve(task, mixer) for name in ("my.toml", "published"))
    assert mine.values() == shipped.values()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("task", list_tasks())
def test_a_recipe_can_be_printed_and_used(longlens, here, task, scale):
    said = longlens("recipe", "show", task, scale, columns=80)
    values = tomllib.loads(said.out)
    (here / "my.toml").write_text(said.out)
    shipped, mine = load_recipe(scale, task), load_recipe("my.toml", task)
    assert values["about"] == shipped.about
    for section in ("task", "model", "training", "mixer", "mixers"):
        assert getattr(mine, section) == getattr(shipped, section)


def test_the_mini_recipe_is_printed_by_default(longlens):
    assert longlens("recipe", "show", "listops").out == longlens("recipe", "show", "listops", "mini").out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of runs: two learning rates, two seeds, another mixer, one that is not finished."""
    from longlens.api import train

    runs = tmp_path_factory.mktemp("trained") / "runs"
    tiny = {"recipe": "smoke", "task.max_length": 16, "task.sizes": [32, 8, 8], "steps": 2, "threads": 1, "runs": runs}
    train("atomic-cumsum", "las", lr=0.125, **tiny)
    train("atomic-cumsum", "las", lr=0.25, **tiny)
    train("atomic-cumsum", "las", lr=0.25, seed=1, **tiny)
    train("atomic-cumsum", "las-bidirectional", lr=0.25, **tiny)
    unfinished = train("atomic-cummax", "las", **tiny).folder
    (unfinished / "result.json").unlink()
    return runs


@pytest.fixture
def runs(trained, here):
    shutil.copytree(trained, here / "runs")
    return here / "runs"


def rows(said):
    """The words of each row, by the folder of the run."""
    found: dict[str, str] = {}
    folder = name = ""
    for line in said.out.splitlines():
        if line.startswith("│"):
            name = line.split("│")[1].strip() or name
            text = " ".join(line.replace("│", " ").split()).removeprefix(name).strip()
            found[f"{folder}/{name}"] = f"{found.get(f'{folder}/{name}', '')} {text}".strip()
        elif "/" in line:
            folder = line.split("/")[-1].strip()
    return found


@WIDTHS
def test_runs_are_told_apart_by_what_differs(show, runs, columns):
    found = rows(show("runs", columns=columns))
    assert len(found) == 5
    las = [text for name, text in found.items() if name.startswith("atomic-cumsum/las/")]
    assert sorted("lr=0.125" in text for text in las) == [False, False, True]
    assert sorted("seed=1" in text for text in las) == [False, False, True]
    assert all("seed=" in text and "lr=" in text for text in las)
    assert all("depth" not in text for text in found.values())
    (other,) = (text for name, text in found.items() if name.startswith("atomic-cummax/las/"))
    assert "saved at step 2" in other
    assert "lr=" not in other, "it is the only run of its task"
    assert sum("finished" in text for text in found.values()) == 4


@WIDTHS
def test_a_damaged_run_is_a_line_and_hides_no_other(show, runs, columns):
    config, result, *_ = sorted(runs.glob("*/las/*"), reverse=True)
    (config / "config.json").write_text("{")
    (result / "result.json").write_text("[]")
    said = show("runs", columns=columns)
    found = rows(said)
    assert len(found) == 5
    for folder in (config, result):
        assert found[str(folder.relative_to(runs))] == "cannot be read"
        assert f"{folder.parent.name}/{folder.name} cannot be read: " in said.words
    assert sum("finished" in text for text in found.values()) >= 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("config.json", "\0"),
        ("environment.json", "[" * 100_000),
        ("environment.json", '"text"'),
        ("environment.json", "[1]"),
        ("environment.json", "{}"),
        ("result.json", "[" * 100_000),
        ("result.json", '{"metric": 3}'),
        ("result.json", ""),
        ("identity.json", "[]"),
        ("identity.json", "[" * 100_000),
        ("metrics.jsonl", "[" * 100_000),
    ],
    ids=lambda value: value[:20],
)
def test_no_damage_is_a_traceback(show, runs, file, content):
    first = min(runs.glob("*/las/*"))
    (first / file).write_text(content)
    assert len(rows(show("runs", columns=80))) == 5


@WIDTHS
def test_names_are_no_markup(longlens, show, runs, here, tiny, columns):
    (here / "[").mkdir()
    (here / "[/red].toml").write_text(longlens("recipe", "show", "atomic-cumsum", "smoke").out)
    flags = [*"--task.max-length 16 --task.sizes 32 8 8 --steps 3 --threads 1".split()]
    said = longlens("train", "atomic-cumsum", "--recipe", "[/red].toml", *flags, "--runs", "[/red]")
    assert said.code == 0, said.err
    assert "run folder: [/red]/atomic-cumsum/las/" in said.out
    assert "[/red].toml" in show("runs", "--runs", "[/red]", columns=120).out
    assert len(rows(show("runs", "--runs", "[/red]", columns=columns))) == 1


def test_the_date_of_a_run_is_shown(show, runs):
    first = min(runs.glob("*/las/*"))
    entries = json.loads((first / "environment.json").read_text())
    assert entries[0]["date"] in show("runs", columns=160).out
