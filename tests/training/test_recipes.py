"""Every shipped recipe says what it should, resolves, and, if its task makes its own data, trains."""

import json
import re
from pathlib import Path

import pytest
import torch
from longlens.mixers.base import list_mixers

import longlens.recipes
from longlens.models.model import Model
from longlens.tasks.base import Spec, list_tasks, task_class
from longlens.training.config import SCALES, Config, load_recipe, resolve
from longlens.training.loop import train
from longlens.training.runtime import Runtime

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


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "home"
    monkeypatch.setenv("LONGLENS_HOME", str(folder))
    return folder


def resolved(scale: str, task: str, mixer: str) -> Config:
    return resolve(scale, task, mixer, {"task.path": "sequences"} if task == "files" else {})


def some_spec(task: str) -> Spec:
    """A spec of the kind that the task has: the true one may need data that is not there."""
    kind = task_class(task)
    return Spec("tokens", 32, 64, kind.head, 32 if kind.head == "language" else 10, kind.metric)


def flat(config: Config) -> dict:
    return config.mixer_options | config.model.model_dump() | config.training.model_dump()


@pytest.mark.parametrize("scale", SCALES)
def test_every_task_has_a_recipe_and_every_recipe_a_task(scale):
    assert sorted(path.stem for path in (FOLDER / scale).glob("*.toml")) == sorted(list_tasks())


@pytest.mark.parametrize("task", list_tasks())
@pytest.mark.parametrize("scale", SCALES)
def test_it_resolves_for_every_mixer_that_fits(scale, task):
    refused = []
    for mixer in list_mixers():
        try:
            resolved(scale, task, mixer)
        except ValueError as error:
            if "needs a causal mixer" not in str(error):
                raise
            refused.append(mixer)
    if task_class(task).head == "language":
        assert "las-bidirectional" in refused
        assert not set(CAUSAL) & set(refused)
    else:
        assert not refused


@pytest.mark.parametrize("task", list_tasks())
@pytest.mark.parametrize("scale", SCALES)
def test_its_model_can_be_built(scale, task):
    config = resolved(scale, task, "las-chunk")
    with torch.device("meta"):  # no memory, however large it is
        model = Model(some_spec(task), config.create_mixer(), config.model)
    assert len(model.blocks) == config.model.depth


@pytest.mark.parametrize("task", list_tasks())
@pytest.mark.parametrize("scale", SCALES)
def test_it_says_where_its_numbers_come_from(scale, task):
    recipe = load_recipe(scale, task)
    assert len(recipe.about) > 40
    assert recipe.about.endswith(".")
    assert not {"stand_in", "release", "path"} & set(recipe.task)  # whose data it is, is for the user to say
    head = task_class(task).head
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
    shared = {"heads": 8, "dropout": 0.0, "attention_dropout": 0.0}
    shared |= {"betas": (0.9, 0.999), "clip": None, "positions": "sinusoidal", "pooling": "mean"}
    shared |= {"ffn": "none" if task.startswith("atomic") else "gelu", "ffn_ratio": 4.0}
    assert {name: values[name] for name in shared} == shared
    assert config.mixer_options["schedule"] == "exp-uniform"


def test_the_sizes_of_the_paper():
    text = resolve("paper", "text", "las").task_options
    assert (text["max_length"], text["validation"]) == (4096, "train")
    for task in LANGUAGES:
        config = resolve("paper", task, "las")
        assert (config.model.depth, config.model.width) == (12 if task == "wikitext-103" else 6, 768)
        assert (config.model.norm, config.task_options["context"]) == ("layer", 512)
    for task in list_tasks():
        chunk = resolved("paper", task, "las-chunk").mixer_options["chunk_size"]
        assert chunk == (4096 if task == "path-x" else 128)
    # Where the paper has a size for a generated set, the recipe leaves it as the task has it.
    for task in GENERATED:
        options = resolve("paper", task, "las").create_task()
        assert options == task_class(task)()


STEPS = "[training]\nsteps = 5\n"


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        (STEPS + "lerning_rate = 1e-3\n", "'training.lerning_rate'", " lr,"),
        (STEPS + "batch_sise = 8\n", "'training.batch_sise'", "did you mean 'batch_size'"),
        (STEPS + "[model]\nwidht = 8\n", "'model.widht'", "did you mean 'width'"),
        (STEPS + "[modle]\nwidth = 8\n", "'modle'", "did you mean 'model'"),
        (STEPS + "[mixer]\nhedas = 8\n", "'hedas'", "did you mean 'heads'"),
        (STEPS + "[mixers.las-chunck]\nchunk_size = 8\n", "'las-chunck'", "did you mean 'las-chunk'"),
        (STEPS + "[mixers.las-chunk]\nchunk_sise = 8\n", "'chunk_sise'", "did you mean 'chunk_size'"),
        (STEPS + "[task]\nlenght = 8\n", "'lenght'", "did you mean 'length'"),
        (STEPS + '[model]\nnorm = "bach"\n', "'bach'", "'batch'"),
        ("[training]\nlr = 1e-3\n", "steps is None", "give one of them"),
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
    path.write_text(STEPS + "[task]\nlength = 16\n[mixer]\nheads = 2\nwindow = 3\n[mixers.las]\nwindow = 7\n")
    las, transformer = (resolve(str(path), "atomic-cumsum", mixer) for mixer in ("las", "transformer"))
    assert (las.mixer_options["heads"], las.mixer_options["window"]) == (2, 7)  # its own before the shared one
    assert transformer.mixer_options["heads"] == 2
    assert "window" not in transformer.mixer_options  # it has no such option
    assert las.task_options["length"] == 16


@pytest.mark.parametrize("task", GENERATED)
def test_the_smoke_recipes_train(task, tmp_path):
    result = train(resolve("smoke", task, "las"), Runtime(folder=tmp_path / "run", log_every=5))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    last = losses[len(losses) // 2 :]
    assert sum(last) / len(last) < losses[0]
    assert result["steps"] == load_recipe("smoke", task).training.steps
    assert result["test"] is not None
