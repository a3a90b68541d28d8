"""Pictures of runs: what is in them, and one sentence for what cannot be drawn."""

import json
import shutil
from pathlib import Path
from statistics import mean, stdev

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from longlens.api import train
from longlens.errors import BadInput
from longlens.paper import figure1
from longlens.reports import attention, learning, sweeps
from longlens.reports.pictures import COLORS, DASHES, PAPER, line_look, styled
from longlens.training.config import load_recipe
from longlens.training.many import Outcome
from longlens.training.run import read_metrics
from longlens.training.saved import load_run

TINY = {"recipe": "smoke", "task.max_length": 16, "task.sizes": [32, 8, 8], "steps": 4, "evaluate_every": 2}
TINY |= {"log_every": 2, "threads": 1, "depth": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two seeds of a layer at two rates, another layer, one run that is not finished, and another task."""
    runs = tmp_path_factory.mktemp("figures") / "runs"
    for lr in (0.01, 0.1):
        for seed in (0, 1):
            train("atomic-cumsum", "las", lr=lr, seed=seed, runs=runs, **TINY)
    train("atomic-cumsum", "s4d", lr=0.01, runs=runs, **TINY)
    unfinished = train("atomic-cummax", "transformer", runs=runs, **TINY).folder
    (unfinished / "result.json").unlink()
    return runs


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws without writing: what would have been written is looked at instead."""
    figures = []
    for module in (attention, figure1, learning, sweeps):
        monkeypatch.setattr(module, "save_picture", lambda figure, out: figures.append(figure) or "written")

    def draw(function, *arguments, **options):
        said = function(*arguments, out=tmp_path / "x.png", **options)
        return figures[-1], said

    return draw


def folders(runs, task="atomic-cumsum", mixer="las"):
    return sorted((runs / task / mixer).iterdir())


def test_lines_are_means_over_seeds_in_bands(made, drawn):
    figure, _ = drawn(learning.draw_learning, (made / "atomic-cumsum",))
    loss, metric = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["las lr=0.01", "las lr=0.1", "s4d lr=0.01"]
    seeds = [f for f in folders(made) if load_run(f).config.training.lr == 0.01]
    values = [[line["loss"] for line in read_metrics(f) if line["split"] == "train"] for f in seeds]
    assert loss.lines[0].get_ydata().tolist() == pytest.approx([mean(both) for both in zip(*values, strict=True)])
    (band,) = (band for band in loss.collections if band is loss.collections[0])
    top = max(point[1] for point in band.get_paths()[0].vertices if point[0] == 2)
    assert top == pytest.approx(mean(v[0] for v in values) + stdev(v[0] for v in values))
    assert (len(loss.lines), len(loss.collections)) == (3, 2), "one seed has no band"
    assert metric.get_ylabel() == "validation r2"
    assert "deviation over seeds" in figure.get_supxlabel()


def test_what_is_not_finished_is_a_line_with_an_open_end(made, drawn, tmp_path):
    runs = tmp_path / "some"
    shutil.copytree(made, runs)
    first, second = (f for f in folders(runs) if load_run(f).config.training.lr == 0.01)
    (second / "result.json").unlink()
    lines = (second / "metrics.jsonl").read_text().splitlines()
    (second / "metrics.jsonl").write_text("\n".join([*lines[:1], '{"split": "train", "step": 3, "loss": NaN}']))
    figure, _ = drawn(learning.draw_learning, (first, second))
    whole, begun, end = figure.axes[0].lines
    assert len(whole.get_xdata()) == 2
    assert begun.get_xdata() == end.get_xdata() == [2], "what is not a number is not drawn"
    assert begun.get_color() == whole.get_color()
    assert "○: not finished" in figure.get_supxlabel()
    (second / "metrics.jsonl").unlink()
    figure, _ = drawn(learning.draw_learning, (second,))
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["nothing yet"] * 2


def test_a_row_for_each_task_and_one_look_for_a_layer(made, drawn):
    figure, _ = drawn(learning.draw_learning, (made,), theme="dark")
    assert [axes.get_title() for axes in figure.axes] == ["atomic-cummax"] * 2 + ["atomic-cumsum"] * 2
    assert to_hex(figure.get_facecolor()) == PAPER["dark"]
    assert matplotlib.rcParams["figure.facecolor"] == "white", "only inside"


def test_a_damaged_run_is_left_out_and_named(made, drawn, tmp_path):
    shutil.copytree(made / "atomic-cumsum", tmp_path / "runs")
    broken, *_ = sorted((tmp_path / "runs" / "las").iterdir())
    (broken / "config.json").write_text("{")
    _, said = drawn(learning.draw_learning, (tmp_path / "runs",))
    assert said[0].startswith("left out: ")
    assert said[-1] == "written"


def test_35_lines_differ():
    with styled():
        looks = {(line_look(n)["color"], line_look(n)["linestyle"]) for n in range(35)}
    assert len(looks) == 35
    assert len(COLORS["light"]) == len(COLORS["dark"]) == 7
    assert len(DASHES) == 5


def test_maps_are_those_of_the_model(made, drawn):
    run = folders(made)[0]
    figure, _ = drawn(attention.draw_attention, run, sample=3, heads=(1,), layers=(1,))
    mean_map, head = figure.axes
    assert (head.get_title(), mean_map.get_ylabel()) == ("head 1", "layer 1")
    model = load_run(run).model()
    inputs = attention.sample_inputs(load_run(run).config.task, "test", 3)
    weights = attention.attention_maps(model, inputs)[1]
    shown = head.images[0].get_array().filled(0)
    np.testing.assert_allclose(shown, weights[1] / weights[1].max(axis=1, keepdims=True))
    assert (shown[np.triu_indices(16, 1)] == 0).all(), "causal"


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("s4d", {}, "s4d has no attention weights: 'longlens figures kernels --run .*' draws its kernels"),
        ("las", {"layers": (2,)}, "layers must be below 2, as they are counted from 0, got 2"),
        ("las", {"heads": (5,)}, "heads must be below 2"),
        ("las", {"sample": 8}, "sample must be at most 7, the last of test, got 8"),
    ],
)
def test_what_has_no_map_is_one_sentence(made, drawn, mixer, options, message):
    with pytest.raises(BadInput, match=message):
        drawn(attention.draw_attention, folders(made, mixer=mixer)[0], **options)


def test_kernels_of_a_run_are_those_that_were_trained(made, drawn):
    run = folders(made, mixer="s4d")[0]
    figure, _ = drawn(figure1.draw_kernels, run=run, length=16, channels=1)
    kernel = load_run(run).model().blocks[1].mixer.kernel(16).detach().numpy()[0]
    assert figure.axes[1].get_ylabel().startswith("layer 1")
    curve = max((line.get_ydata() for line in figure.axes[1].lines), key=len)
    np.testing.assert_allclose(curve, kernel / np.abs(kernel).max(), rtol=1e-5)


def test_a_sweep_of_one_field_is_a_line_for_each_layer(made, drawn):
    figure, said = drawn(sweeps.draw_sweep, (made / "atomic-cumsum",))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "lr"
    assert axes.get_xscale() == "log"
    results = [json.loads((f / "result.json").read_text())["valid"] for f in folders(made)]
    lines = [line for line in axes.lines if line.get_marker() == "o"]
    assert lines[0].get_xdata().tolist() == [0.01, 0.1]
    assert sum(lines[0].get_ydata()) == pytest.approx(sum(results) / 2)
    assert said == ["written"]


def test_two_fields_are_a_heat_map(made, drawn):
    figure, _ = drawn(sweeps.draw_sweep, (made / "atomic-cumsum",), by=("lr", "mixer"), score="test")
    cells = figure.axes[0].images[0].get_array()
    assert cells.shape == (2, 2)
    assert [text.get_text() for text in figure.axes[0].texts].count("–") == 1, "s4d has one rate"
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["las", "s4d"]


def ended(*settings):
    """Finished runs of smoke recipes, with these layers and options."""
    result = {"metric": "r2", "valid": 0.5, "test": 0.5}
    recipe = load_recipe("smoke", "atomic-cumsum")
    return [Outcome(recipe.resolve("atomic-cumsum", name, values), Path(), result) for name, values in settings]


def test_layers_that_share_no_option_are_one_sentence(drawn, monkeypatch):
    runs = [("las", {"mixer.window": 3}), ("las", {"mixer.window": 5})]
    runs += [("linformer", {"mixer.projected": 8}), ("linformer", {"mixer.projected": 16})]
    monkeypatch.setattr(sweeps, "collect_runs", lambda places: (ended(*runs), []))
    with pytest.raises(BadInput, match="no run has results by window and projected: name runs of one layer"):
        drawn(sweeps.draw_sweep)
    _, said = drawn(sweeps.draw_sweep, by=("window",))
    assert said == ["left out: linformer, without window", "written"]


def test_learning_rates_of_groups_are_a_field(drawn, monkeypatch):
    runs = [("s4", {"groups": {"kernel": {"lr": lr}}}) for lr in (1e-3, 1e-4)]
    monkeypatch.setattr(sweeps, "collect_runs", lambda places: (ended(*runs), []))
    figure, _ = drawn(sweeps.draw_sweep)
    assert figure.axes[0].get_xlabel() == "groups"


@pytest.mark.parametrize(
    ("places", "options", "message"),
    [
        (
            ("",),
            {},
            "runs must be of one task, got atomic-cummax, atomic-cumsum: name a folder such as .*atomic-cummax",
        ),
        (("atomic-cummax",), {}, "none of the 1 runs is finished yet"),
        (("atomic-cumsum/s4d",), {}, "the runs differ in nothing but the seed"),
        (
            ("atomic-cumsum",),
            {"by": ("lrr",)},
            "by must name fields in which the runs differ, got 'lrr'; did you mean 'lr'",
        ),
        (("nowhere",), {}, "there is no run in .*nowhere"),
    ],
)
def test_what_is_no_sweep_is_one_sentence(made, drawn, places, options, message):
    with pytest.raises(BadInput, match=message):
        drawn(sweeps.draw_sweep, tuple(made / place for place in places), **options)
