"""Figure 4: attention maps by layer, of trained language models with LaS and with plain attention.

The paper shows pictures. Here two numbers decide, of the mean map over the heads of a layer: its *reach*, the mean
distance of a query to its keys by their weights; and its *roughness*, how much the weights of neighboring keys differ,
relative to their size. Both are means over test samples, for each seed. A window of P that smooths to the past alone
moves all weights by (P - 1) / 2, which is no reach that was learned: LaS must reach farther by more than that.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longlens.files import write_json
from longlens.paper import appendix_c
from longlens.paper.records import Records, record_name
from longlens.paper.run import runs_of
from longlens.paper.study import Cell, Claim, Scale, Study, option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from longlens.training.config import Config, Runtime

ROWS = ("Transformer", "LaS")
SAMPLES = 16  # of the test set, whose maps are measured


def cells(scale: Scale) -> list[Cell]:
    """The same runs as those of Appendix C, at the learning rates that were chosen there."""
    return [cell for cell in appendix_c.cells(scale) if cell.row in ROWS]


def claims(scale: Scale) -> list[Claim]:
    layers = range(cells(scale)[0].config(scale, 0, None).model.depth)
    moved = (option(scale, appendix_c.task(scale), "window") - 1) / 2

    def lead(what: str, more: str, less: str, layer: int) -> list[tuple[float, str, str]]:
        return [(1.0, _name(more, layer), what), (-1.0, _name(less, layer), what)]

    smoother = [
        (f"maps of LaS are smoother in layer {n}", lead("roughness", "Transformer", "LaS", n), 0.0) for n in layers
    ]
    by = f"by more than the {moved:g} of its smoothing"
    farther = [
        (f"LaS reaches farther than a Transformer in layer {n}, {by}", lead("reach", "LaS", "Transformer", n), moved)
        for n in layers
    ]
    return [Claim(text, [], measures=measures, least=least) for text, measures, least in (*smoother, *farther)]


def _name(row: str, layer: int) -> str:
    return f"{row}, layer {layer}"


def draw(scale: Scale, records: Records, runtime: "Runtime", out: Path) -> str:
    """Measure the maps of all seeds, write that beside the picture, and draw those of a sample and the first seed. A
    model of which there is a record only is trained again."""
    from longlens.reports.pictures import save_picture  # and torch: not for a list of artifacts

    drawn: dict[str, list[np.ndarray]] = {}
    measures: dict[str, dict[str, list[float]]] = {}
    names = []
    for cell in cells(scale):
        for record in runs_of(cell, scale, records):
            names.append(record_name(record.config))
            maps = mean_maps(record.config, runtime)  # of samples, of layers
            drawn.setdefault(cell.row, maps[0])
            for layer, found in enumerate(np.array([[measure_map(m) for m in sample] for sample in maps]).mean(axis=0)):
                kept = measures.setdefault(_name(cell.row, layer), {"reach": [], "roughness": []})
                for values, value in zip(kept.values(), found, strict=True):
                    values.append(float(f"{value:.6g}"))
    write_json(out.with_suffix(".json"), {"runs": names, "samples": SAMPLES, "measures": measures})
    return save_picture(_draw_maps(drawn, measures), out)


def mean_maps(config: "Config", runtime: "Runtime") -> list[list[np.ndarray]]:
    """The mean map (L, L) over heads, of each test sample that is measured and of each layer."""
    from longlens.api import train_config
    from longlens.data.datasets import Batches
    from longlens.reports.attention import attention_maps
    from longlens.training.evaluate import load_model
    from longlens.training.step import evaluated_part

    model = load_model(train_config(config, runtime).folder)
    samples = Batches(evaluated_part(config.task.split("test"), SAMPLES), 1)
    return [[weights.mean(axis=0) for weights in attention_maps(model, batch.inputs)] for batch in samples]


def measure_map(weights: np.ndarray) -> tuple[float, float]:
    """The reach and the roughness of a map (L, L), over the second half of the queries, which have enough keys."""
    length = len(weights)
    rows = weights[length // 2 :]
    distance = np.arange(length // 2, length)[:, None] - np.arange(length)
    seen = distance > 0
    reach = float((rows * distance).sum() / rows.sum())
    steps = np.abs(np.diff(rows, axis=1))[seen[:, 1:]]
    return reach, float(steps.mean() / np.abs(rows[seen]).mean())


def _draw_maps(drawn: Mapping[str, list[np.ndarray]], measures: Mapping[str, dict[str, list[float]]]) -> "Figure":
    from matplotlib.figure import Figure

    from longlens.reports.attention import EXPLAINED, draw_map

    depth = min(len(found) for found in drawn.values())
    figure = Figure(figsize=(max(6.5, 3.2 * depth), 0.7 + 3.4 * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), depth, squeeze=False)
    for line, (row, found) in zip(panels, drawn.items(), strict=True):
        for layer, (axes, weights) in enumerate(zip(line, found, strict=False)):
            draw_map(axes, weights)
            means = (f"{what} {np.mean(values):.3g}" for what, values in measures[_name(row, layer)].items())
            axes.set_title(f"{_name(row, layer)}\n{', '.join(means)}")
    figure.supxlabel(f"rows: queries, columns: keys, {EXPLAINED}", fontsize=11)
    return figure


STUDY = Study(
    name="figure4",
    title="Attention maps of trained language models: perplexity",
    place="Figure 4, Appendix D",
    claim="LaS gives smoother maps, which reach farther back, especially in the upper layers.",
    note="The maps of LaS are those after smoothing, which alone makes them smoother.",
    cells=cells,
    claims=claims,
    draw=draw,
)
