"""Every shipped recipe says what it should, resolves, and, if its task makes its own data, trains."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from support.data import home  # noqa: F401 (a fixture)

import longlens.recipes
from longlens.errors import BadInput
from longlens.mixers.registry import find_mixer, list_mixers
from longlens.models.model import Model, check_mixer_builds
from longlens.tasks.base import Spec, create_task, find_task, list_tasks
from longlens.training.config import SCALES, Config, Runtime, load_recipe, shipped_recipes
from longlens.training.loop import train_run

FOLDER = Path(next(iter(longlens.recipes.__path__)))
LANGUAGES = ("text8", "enwik8", "wikitext-2", "wikitext-103")
CAUSAL = ("transformer", "l-attention", "s-attention", "las", "las-chunk")
GENERATED = ("listops", "pathfinder", "path-x", "atomic-select", "atomic-cummax", "atomic-cumsum")

# Table 9 of the paper, and the patience of the S4 recipes that it builds on.
COLUMNS = ("depth", "width", "norm", "prenorm", "lr", "batch_size", "epochs", "weight_decay", "window", "max_rate")
TABLE_9 = {
    "listops": (6, 256, "batch", False, 1e-3, 50, 50, 0.01, 5, 0.001),
    "text": (4, 64, "batch", True, 1e-4, 50, 20, 0.0, 5, 0.0001),
    "retrieval": (6, 256, "batch", True, 0.002, 64, 20, 0.0, 5, 0.001),
    "image": (6, 256, "layer", False, 1e-3, 50, 100, 0.01, 3, 0.001),
    "pathfinder": (6, 256, "batch", True, 0.004, 64, 100, 0.0, 3, 0.001),
}
PATIENCE = {"listops": 5, "text": 10, "retrieval": 20, "image": 10, "pathfinder": 10, "path-x": 40}


def resolve(scale: str, task: str, mixer: str, changes: dict | None = None) -> Config:
    return load_recipe(scale, task, [mixer]).resolve(task, mixer, changes)


def resolved(scale: str, task: str, mixer: str) -> Config:
    return resolve(scale, task, mixer, {"task.path": "sequences"} if task == "files" else {})


def some_spec(task: str) -> Spec:
    """A spec of the kind that the task has: the true one may need data that is not there."""
    kind = find_task(task)
    return Spec("tokens", 32, 64, kind.head, 32 if kind.head == "language" else 10, kind.metric)


def flat(config: Config) -> dict:
    return {**config.mixer.options, **config.model.values(), **config.training.values()}


@pytest.mark.parametrize("scale", SCALES)
def test_every_task_has_a_recipe_and_every_recipe_a_task(scale):
    served = [task for known, task in shipped_recipes() if known == scale and task != "*"]
    assert set(served) <= set(list_tasks())
    for task in list_tasks():
        assert load_recipe(scale, task).name == scale
    used = {shipped_recipes().get((scale, task), shipped_recipes().get((scale, "*"))) for task in list_tasks()}
    assert {str(path) for path in used} == {str(path) for path in (FOLDER / scale).glob("*.toml")}


def test_no_task_has_two_recipes_of_a_scale():
    for scale in SCALES:
        served = [
            task
            for path in (FOLDER / scale).glob("*.toml")
            for task in tomllib.loads(path.read_text()).get("tasks", [path.stem])
        ]
        assert len(served) == len(set(served))


def test_no_recipe_is_a_copy_of_another():
    texts = [path.read_text() for path in FOLDER.glob("*/*.toml")]
    assert len(set(texts)) == len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("task", list_tasks())
@pytest.mark.parametrize("scale", SCALES)
def test_it_resolves_for_every_mixer_that_fits(scale, task):
    recipe, refused = load_recipe(scale, task, list_mixers()), []
    for mixer in list_mixers():
        config = recipe.resolve(task, mixer, {"task.path": "sequences"} if task == "files" else {})
        try:
            check_mixer_builds(config.task, config.mixer, config.model)
        except BadInput as error:
            if "needs a causal mixer" not in str(error):
                raise
            refused.append(mixer)
    if find_task(task).head == "language":
        assert "las-bidirectional" in refused
        assert not set(CAUSAL) & set(refused)
    else:
        assert not refused


@pytest.mark.slow
@pytest.mark.parametrize("task", list_tasks())
@pytest.mark.parametrize("scale", SCALES)
def test_its_model_can_be_built(scale, task):
    config = resolved(scale, task, "las-chunk")
    with torch.device("meta"):  # no memory, however large it is
        model = Model(some_spec(task), config.mixer, config.model)
    assert len(model.blocks) == config.model.depth


@pytest.mark.parametrize("task", list_tasks())
@pytest.mark.parametrize("scale", SCALES)
def test_it_says_where_its_numbers_come_from(scale, task):
    recipe = load_recipe(scale, task)
    assert len(recipe.about) > 40
    assert recipe.about.endswith(".")
    assert not {"stand_in", "release", "path"} & set(recipe.task)  # whose data it is, is for the user to say
    head = find_task(task).head
    assert recipe.mixer["side"] == ("centered" if head in ("classify", "match") else "past")


@pytest.mark.parametrize("task", TABLE_9)
def test_the_paper_recipes_are_table_9(task):
    config = resolve("paper", task, "las")
    values = flat(config)
    assert {name: values[name] for name in COLUMNS} == dict(zip(COLUMNS, TABLE_9[task], strict=True))


@pytest.mark.parametrize("task", PATIENCE)
def test_the_paper_recipes_follow_the_plateau_of_s4(task):
    training = resolve("paper", task, "las").training
    assert (training.schedule, training.patience, training.factor) == ("plateau", PATIENCE[task], 0.2)
    assert training.evaluate_every is None  # each epoch
    assert (training.valid_samples, training.test_samples) == (None, None)  # all of them


@pytest.mark.parametrize("task", list_tasks())
def test_what_all_experiments_of_the_paper_share(task):
    config = resolved("paper", task, "las")
    values = flat(config)
    values |= {"dropout": config.model.dropout, "mixer dropout": config.mixer.options["dropout"]}
    shared = {"heads": 8, "dropout": 0.0, "mixer dropout": 0.0}
    shared |= {"betas": (0.9, 0.999), "clip": None, "positions": "sinusoidal", "pooling": "mean"}
    shared |= {"ffn": "none" if task.startswith("atomic") else "plain", "ffn_ratio": 4.0}
    assert {name: values[name] for name in shared} == shared
    assert config.mixer.options["schedule"] == "exp-uniform"


def test_the_sizes_of_the_paper():
    text = resolve("paper", "text", "las").task.values()
    assert (text["max_length"], text["validation"]) == (4096, "train")
    for task in LANGUAGES:
        config = resolve("paper", task, "las")
        assert (config.model.depth, config.model.width) == (12 if task == "wikitext-103" else 6, 768)
        assert (config.model.norm, config.task.values()["max_length"]) == ("layer", 512)
    for task in list_tasks():
        chunk = resolved("paper", task, "las-chunk").mixer.options["chunk_size"]
        assert chunk == (4096 if task == "path-x" else 128)
    # Where the paper has a size for a generated set, the recipe leaves it as the task has it.
    for task in GENERATED:
        assert resolve("paper", task, "las").task == find_task(task)()


STEPS = "[training]\nsteps = 5\n"


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        (STEPS + "lerning_rate = 1e-3\n", "'lerning_rate'", " lr,"),
        (STEPS + "batch_sise = 8\n", "'batch_sise'", "did you mean 'batch_size'"),
        (STEPS + "[model]\nwidht = 8\n", "'widht'", "did you mean 'width'"),
        (STEPS + "[modle]\nwidth = 8\n", "'modle'", "did you mean 'model'"),
        (STEPS + "[mixer]\nhedas = 8\n", "'hedas'", "did you mean 'heads'"),
        (STEPS + "[mixers.las-chunck]\nchunk_size = 8\n", "'las-chunck'", "did you mean 'las-chunk'"),
        (STEPS + "[mixers.las-chunk]\nchunk_sise = 8\n", "'chunk_sise'", "did you mean 'chunk_size'"),
        (STEPS + "[task]\nmax_lenght = 8\n", "'max_lenght'", "did you mean 'max_length'"),
        (STEPS + '[model]\nnorm = "bach"\n', "norm must be one of layer, batch, scale, rms, got bach", "batch"),
        ("[training]\nlr = 1e-3\n", "one of epochs, steps and minutes must be given", "got none"),
        ("[training\nsteps = 5\n", "line 1", "']'"),
    ],
)
def test_a_mistake_gives_one_sentence_that_names_it(tmp_path, text, wrong, right):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(wrong)) as caught:
        resolve(str(path), "atomic-cumsum", "las")
    assert right in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_of_your_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(STEPS + "[task]\nmax_length = 16\n[mixer]\nheads = 2\nwindow = 3\n[mixers.las]\nwindow = 7\n")
    las, transformer = (resolve(str(path), "atomic-cumsum", mixer) for mixer in ("las", "transformer"))
    assert (las.mixer.options["heads"], las.mixer.options["window"]) == (2, 7)  # its own before the shared one
    assert transformer.mixer.options["heads"] == 2
    assert "window" not in transformer.mixer.options  # it has no such option
    assert las.task.values()["max_length"] == 16


def test_a_shared_option_never_changes_what_a_name_means(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(STEPS + '[mixer]\nwindow = 9\nbidirectional = true\nside = "centered"\n')
    for name in ("l-attention", "las", "las-bidirectional"):
        mixer = resolve(str(path), "atomic-cumsum", name).mixer
        assert not mixer.options.keys() & find_mixer(name).fixed.keys()


def test_old_names_of_options_are_understood(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(STEPS + "[task]\nlength = 16\n")
    assert resolve(str(path), "atomic-cumsum", "las").task.values()["max_length"] == 16
    changed = resolve(str(path), "atomic-cumsum", "las", {"task.length": 8})
    assert changed == resolve(str(path), "atomic-cumsum", "las", {"max_length": 8})


def test_a_task_that_is_given_keeps_its_options_but_those_that_are_changed(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(STEPS + "[task]\nmax_length = 64\nseed = 7\n")
    recipe, task = load_recipe(str(path), "atomic-cumsum"), create_task("atomic-cumsum", max_length=16, sizes=(8, 4, 4))
    assert recipe.resolve(task, "las").task is task
    assert recipe.resolve(task, "las", {"max_length": 16}).task is task
    changed = recipe.resolve(task, "las", {"task.length": 20, "task.seed": 3}).task
    assert changed == create_task("atomic-cumsum", max_length=20, sizes=(8, 4, 4), seed=3)
    assert recipe.resolve(changed, "las").digest("") == recipe.resolve(
        task, "las", {"length": 20, "task.seed": 3}
    ).digest("")


def test_a_task_that_cannot_be_changed_so_is_refused():
    task = create_task("files", path="sequences", folds=3)
    with pytest.raises(BadInput, match="test_share must be left out, as one of 3 folds is the test set"):
        load_recipe("smoke", "files").resolve(task, "las", {"task.test_share": 0.3})


def test_a_config_is_the_same_after_json():
    config = resolve("smoke", "listops", "las", {"lr": 0.5, "mixer.window": 3, "task.seed": 4})
    again = Config.from_json(json.loads(json.dumps(config.to_json())), "it")
    assert again == config
    assert again.digest("data") == config.digest("data")
    assert config.digest("data") != config.digest("other data")


def test_a_changed_field_is_another_run():
    configs = [resolve("smoke", "listops", "las", changes) for changes in ({}, {"lr": 0.5}, {"seed": 1}, {"window": 3})]
    assert len({config.digest("data") for config in configs}) == 4


def test_steps_replace_epochs_and_epochs_steps():
    training = resolve("paper", "listops", "las", {"steps": 5}).training
    assert (training.steps, training.epochs) == (5, None)
    training = resolve("smoke", "listops", "las", {"epochs": 2}).training
    assert (training.steps, training.epochs) == (None, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lerning_rate": 1}, "there is no option 'lerning_rate'"),
        ({"training.lrr": 1}, "there is no option 'training.lrr'; did you mean 'training.lr'"),
        ({"lr": 1, "training.lr": 2}, "training.lr is given twice"),
        ({"lr": 0}, "lr must be a number above 0, got 0"),
        ({"task.length": 8, "task.max_length": 8}, "task.max_length is given twice"),
    ],
)
def test_a_wrong_change_is_refused(changes, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        resolve("smoke", "atomic-cumsum", "las", changes)


@pytest.mark.slow
@pytest.mark.parametrize("task", GENERATED)
def test_the_smoke_recipes_train(task, tmp_path):
    result = train_run(resolve("smoke", task, "las"), Runtime(folder=tmp_path / "run", log_every=5, threads=1))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    last = losses[len(losses) // 2 :]
    assert sum(last) / len(last) < losses[0]
    assert result["steps"] == load_recipe("smoke", task).training["steps"]
    assert result["test"] is not None
