"""Every recipe with which a layer was published says where it is from, resolves, builds and trains."""

import re
import tomllib

import pytest
import torch

from longlens.data.datasets import Batch
from longlens.errors import BadInput
from longlens.mixers.registry import find_mixer
from longlens.models.model import Model, check_mixer_builds, count_parameters
from longlens.tasks.base import Spec
from longlens.training.config import Config, load_recipe, published_recipes
from longlens.training.machine import Processes
from longlens.training.step import Schedule, make_optimizer, set_learning_rate, train_step

ALL = sorted(published_recipes())
EVERY = pytest.mark.parametrize(("mixer", "task"), ALL, ids=["/".join(pair) for pair in ALL])
ARENA = ("listops", "text", "retrieval", "image", "pathfinder", "path-x")
SYMBOLS = {"text": 134, "retrieval": 98}  # of data that is not there; bytes are 256 and 3 more
PARAMETERS = {("mega-chunk", "image"): 2.82e6}  # where a source states them


def resolve(mixer: str, task: str, changes: dict | None = None) -> Config:
    return load_recipe("published", task, [mixer]).resolve(task, mixer, changes)


def spec_of(config: Config, length: int | None = None) -> Spec:
    """The spec of the task, which for some needs data; if it is to be short, of a square image, too."""
    task = config.task
    if task.name not in SYMBOLS:
        spec = task.spec
    else:
        symbols = 259 if task.values().get("level") == "bytes" else SYMBOLS[task.name]
        spec = Spec("tokens", symbols, task.values()["max_length"], task.head, 2, task.metric)
    if length is None:
        return spec
    side = round(length**0.5)
    return Spec(
        *(spec.inputs, spec.size, length, spec.head, spec.outputs, spec.metric),
        shape=None if spec.shape is None else (side, side),
    )


def test_there_are_recipes():
    assert {mixer for mixer, _ in ALL} >= {"s5", "mega", "mega-chunk", "transformer"}
    for mixer in ("s5", "mega", "mega-chunk"):
        assert [task for known, task in ALL if known == mixer] == sorted(ARENA)
    for mixer in (
        "transformer",
        "local",
        "linformer",
        "performer",
        "reformer-arena",
        "bigbird",
    ):  # Path-X: none published
        assert [task for known, task in ALL if known == mixer] == sorted(set(ARENA) - {"path-x"})


@EVERY
def test_it_says_where_it_is_from_and_what_is_left(mixer, task):
    recipe = load_recipe("published", task, [mixer])
    assert task in ARENA
    assert find_mixer(mixer).module.startswith("longlens.")
    assert re.match(r"\S+/\S+ @ [0-9a-f]{7}: \S+|LaS Table|.+, Table \d", recipe.source), recipe.source
    assert recipe.published is not None
    assert 10 < recipe.published < 100
    assert all(re.match(r"[A-Z].*\.$", line) for line in recipe.differs)
    values = tomllib.loads(published_recipes()[mixer, task].read_text())
    assert not {"tasks", "mixers"} & values.keys()


@EVERY
def test_it_resolves_and_builds(mixer, task):
    config = resolve(mixer, task)
    assert config.recipe == "published"
    assert config.training.precision == "float32"
    assert Config.from_json(config.to_json(), "it") == config
    check_mixer_builds(config.task, config.mixer, config.model)
    with torch.device("meta"):
        model = Model(spec_of(config), config.mixer, config.model)
        make_optimizer(model, config.training)  # which knows all groups
    stated = PARAMETERS.get((mixer, task))
    assert stated is None or count_parameters(model) == pytest.approx(stated, rel=2e-3)


@EVERY
def test_its_options_are_those_of_the_layer(mixer, task):
    """None is left out because the layer has no such option, as one for several mixers would be."""
    values = tomllib.loads(published_recipes()[mixer, task].read_text())
    config = resolve(mixer, task)
    for name, value in values.get("mixer", {}).items():
        assert config.mixer.options[name] == value
    for section, found in (("model", config.model), ("training", config.training), ("task", config.task)):
        for name, value in values.get(section, {}).items():
            assert found.values()[name] == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("mixer", ["s4-v1", "s4-v2", "s4d", "s5", "sgconv", "long-conv"])
def test_a_rate_of_dropout_has_two_places_in_s4_and_its_successors(mixer):
    """Inside of the layer and on what it returns; nowhere on the embedding."""
    rates = {}
    for task in (task for known, task in ALL if known == mixer):
        config = resolve(mixer, task)
        rates[task] = config.mixer.options["dropout"]
        assert config.model.dropout == rates[task]
        assert config.model.dropout == 0 or config.model.embedding_dropout == 0
        assert mixer != "long-conv" or config.mixer.options["channels"] == 2
    assert rates["listops"] == 0
    assert rates["image"] == (0.2 if mixer in ("s4-v1", "sgconv") else 0.1)


@pytest.mark.slow
@EVERY
def test_it_trains_three_steps(mixer, task):
    """On short random sequences, with as many channels, blocks and samples as fit into seconds."""
    changes = {"depth": 2, "batch_size": 4, "steps": 3, "accumulate": 1, "warmup": 1}
    changes |= {"mixer.chunk_size": 16} if "chunk_size" in find_mixer(mixer).options else {}
    config = resolve(mixer, task, changes)
    spec, training = spec_of(config, length=64), config.training
    torch.manual_seed(0)
    model = Model(spec, config.mixer, config.model)
    optimizer, schedule = make_optimizer(model, training), Schedule(training, 3, higher_is_better=True)
    shape = (4, 2, 64) if spec.head == "match" else (4, 64)
    given = torch.randint(spec.size, shape) if spec.inputs == "tokens" else torch.rand(*shape, spec.size)
    lengths = torch.full(shape[:-1], 64)
    if spec.inputs == "tokens":
        lengths[1] = 9
    batch = Batch(given, lengths, torch.randint(spec.outputs, (4,)), torch.arange(4), 4)
    losses = []
    for step in range(3):
        set_learning_rate(optimizer, schedule.factor(step))
        losses.append(train_step(model, spec, optimizer, batch, training, Processes(0, 1, torch.device("cpu"))).item())
    assert all(0 < loss < 100 for loss in losses)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_each_of_several_mixers_has_its_own():
    together = load_recipe("published", "listops", ["s5", "mega"])
    for mixer in ("s5", "mega"):
        assert together.resolve("listops", mixer, {"seed": 3}, others=["s5", "mega"]) == resolve(
            mixer, "listops", {"seed": 3}
        )
    common = together.common("model", ["s5", "mega"])
    assert (common["depth"], common["positions"], common["pooling"]) == (None, "none", "mean")


def test_a_layer_without_a_recipe_is_told_which_have_one():
    message = "recipe published of listops: mixer 'las' has no such recipe; choose from .*mega, mega-chunk, .*s5"
    with pytest.raises(BadInput, match=message):
        load_recipe("published", "listops", ["s5", "las"])
    with pytest.raises(
        BadInput, match="recipe published of text8: mixer 's5' has no such recipe; choose from other tasks"
    ):
        load_recipe("published", "text8", ["s5"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sauce = 'x'", "a recipe has no option 'sauce'; did you mean 'source'"),
        ("own = {}", "a recipe has no option 'own'"),
        ("published = 101", "published must be a number from 0 to 100 or none, got 101"),
        ("gpu_hours = -1", "gpu_hours must be a number of at least 0 or none, got -1"),
        ("differs = 'all'", "differs must be a list, each a text, got all"),
        ("[training.groups.ssm]\nlrr = 1", "group 'ssm' has no option 'lrr'; did you mean 'lr'"),
        ("[training.groups]\nssm = 1", "groups must be a table of tables"),
    ],
)
def test_what_nobody_knows_is_refused(tmp_path, line, message):
    path = tmp_path / "own.toml"
    path.write_text(f"{line}\n[training]\nsteps = 5\n" if "[" not in line else f"[training]\nsteps = 5\n{line}\n")
    with pytest.raises(BadInput, match=re.escape(message)):
        load_recipe(str(path), "listops", ["s5"]).resolve("listops", "s5")


def test_a_published_recipe_is_strict_about_the_options_of_its_layer(monkeypatch):
    class File:
        def read_text(self):
            return "[mixer]\nwindow = 3\n[training]\nsteps = 5\n"

    monkeypatch.setitem(published_recipes(), ("s5", "listops"), File())
    with pytest.raises(BadInput, match="recipe published of listops: mixer 's5' has no option 'window'"):
        load_recipe("published", "listops", ["s5"])


def test_groups_of_a_flag_are_added_to_those_of_the_recipe(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[training]\nsteps = 5\n[training.groups.dt]\nlr = 0.5\nweight_decay = 0.25\n")
    recipe = load_recipe(str(path), "listops", ["s5"])
    changed = recipe.resolve("listops", "s5", {"groups": ["dt.lr=0.125", "b.lr=1"]}).training.groups
    assert changed == {"dt": {"lr": 0.125, "weight_decay": 0.25}, "b": {"lr": 1.0}}
    assert recipe.resolve("listops", "s5").training.groups == {"dt": {"lr": 0.5, "weight_decay": 0.25}}
