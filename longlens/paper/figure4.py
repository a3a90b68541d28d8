"""Figure 4: attention maps by layer, of trained language models with LaS and with plain attention."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longlens.paper import appendix_c
from longlens.paper.records import Records
from longlens.paper.run import chosen_rate
from longlens.paper.study import Cell, Claim, Scale, Study

if TYPE_CHECKING:
    from torch import Tensor

    from longlens.models.model import Model

ROWS = ("Transformer", "LaS")


def cells(scale: Scale) -> list[Cell]:
    """The same runs as those of Appendix C, at the learning rates that were chosen there."""
    return [cell for cell in appendix_c.cells(scale) if cell.row in ROWS]


def claims(scale: Scale) -> list[Claim]:
    return []


def draw(scale: Scale, records: Records, runs: Path, out: Path) -> str:
    """Maps of the first test sample: the mean over heads, from its least to its largest value, as the paper has them.
    A model of which there is a record only is trained again."""
    import torch  # and matplotlib: not for a list of artifacts
    from matplotlib.figure import Figure

    from longlens.api import train_config
    from longlens.reports.pictures import save_picture
    from longlens.training.config import Runtime
    from longlens.training.evaluate import load_model

    maps = {}
    for cell in cells(scale):
        config = cell.config(scale, 0, chosen_rate(cell, scale, records))
        folder = train_config(config, Runtime(runs=runs)).folder
        sample = config.task.split("test").take(np.arange(1))
        maps[cell.row] = attention_maps(load_model(folder), torch.from_numpy(sample.inputs))
    depth = min(len(found) for found in maps.values())
    figure = Figure(figsize=(2.6 * depth, 2.9 * len(maps)), layout="constrained")
    panels = figure.subplots(len(maps), depth, squeeze=False)
    for line, (row, found) in zip(panels, maps.items(), strict=True):
        for number, (axes, weights) in enumerate(zip(line, found, strict=False)):
            axes.imshow((weights - weights.min()) / (np.ptp(weights) or 1), cmap="magma", vmin=0, vmax=1)
            reach, rough = measure_map(weights)
            axes.set_title(f"{row}, layer {number + 1}\nreach {reach:.0f}, roughness {rough:.2f}", fontsize=9)
            axes.set_xticks([])
            axes.set_yticks([])
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    return save_picture(figure, out)


def measure_map(weights: np.ndarray) -> tuple[float, float]:
    """The mean distance of a query (L, L) to its keys, by their weights, over the second half of the queries; and how
    much the weights of neighboring keys differ, relative to their size."""
    length = len(weights)
    rows = weights[length // 2 :]
    distance = np.arange(length // 2, length)[:, None] - np.arange(length)
    seen = distance > 0
    reach = float((rows * distance).sum() / rows.sum())
    steps = np.abs(np.diff(rows, axis=1))[seen[:, 1:]]
    return reach, float(steps.mean() / np.abs(rows[seen]).mean())


def attention_maps(model: "Model", inputs: "Tensor") -> list[np.ndarray]:
    """(L, L) for each layer: the mean over heads of the weights that multiply the values."""
    import torch

    from longlens.ops.reference import las_attention_reference

    maps: list[np.ndarray] = []

    def look(layer: Any, arguments: tuple[Any, ...], outputs: Any) -> None:
        x = arguments[0]
        if hasattr(layer, "attention_weights"):
            weights = layer.attention_weights(x)
        else:  # plain attention, which is LaS without decay and smoothing
            _, weights = las_attention_reference(*layer._project(x), return_weights=True)
        maps.append(weights[0].mean(dim=0).cpu().numpy())

    layers: list[Any] = [block.mixer for block in model.blocks]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return maps


STUDY = Study(
    name="figure4",
    title="Attention maps of trained language models: perplexity",
    place="Figure 4, Appendix D",
    claim="LaS gives smoother maps, which reach farther back in the upper layers.",
    cells=cells,
    claims=claims,
    draw=draw,
)
