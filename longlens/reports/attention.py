"""Attention maps of trained models: by which weights each position adds up the values of the others."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor, nn

from longlens.data.datasets import Batches, Subset
from longlens.errors import BadInput
from longlens.mixers.common import has_attention, has_kernel
from longlens.mixers.registry import create_mixer, list_mixers
from longlens.models.model import Model
from longlens.options import Count, Size
from longlens.reports.pictures import check_picture, evenly, plain, save_picture, styled, without_frame
from longlens.tasks.base import SplitName, Task
from longlens.training.saved import load_run

MOST_LAYERS, MOST_HEADS = 6, 8  # that are drawn unless they are named


def draw_attention(
    run: Path,
    *,
    sample: Count = 0,
    split: Literal["train", "valid", "test"] = "test",
    layers: tuple[Count, ...] = (),
    heads: tuple[Count, ...] = (),
    length: Size = 1024,
    checkpoint: str = "best",
    out: Path = Path("figures/attention.png"),
    theme: Literal["light", "dark"] = "light",
) -> str:
    """Draw attention maps of a trained model on a sample: for each layer the mean over its heads, and the heads.

    A row of a map is a position that attends, a column one that is attended to. Maps have the weights with which values
    are added up, so those of LaS are after smoothing. Every layer with queries, keys and values has them.

    Args:
        run: Folder of the run.
        sample: Number of the sample in the split, counted from 0 as in 'longlens data show'.
        split: Split of the sample.
        layers: Numbers of layers, counted from 0; by default all, or six of them.
        heads: Numbers of heads, counted from 0; by default all, or eight of them.
        length: Tokens of the sample, from its begin, if it has more.
        checkpoint: Checkpoint to use: best, last, or a step.
        out: Picture to write (.png, .pdf or .svg).
        theme: Dark ink on white, for print, or light ink on a dark background, for talks.
    """
    check_picture(out)
    found = load_run(run)
    task, mixer = found.config.task, found.config.mixer.name
    with found.opened(checkpoint, "cpu") as model:
        chosen = _choose("layers", layers, len(model.blocks), MOST_LAYERS)
        _check_attention(model, mixer, run)
        maps = attention_maps(model, sample_inputs(task, split, sample)[:, :length], chosen)
    shown = _choose("heads", heads, len(maps[0]), MOST_HEADS)
    title = f"{mixer} on {task.name}, {split} sample {sample:,}"
    with styled(theme):
        return save_picture(draw_maps(dict(zip(chosen, maps, strict=True)), shown, title), out)


def _choose(name: str, given: Sequence[int], count: int, most: int) -> list[int]:
    """The given numbers, or some of all."""
    for number in given:
        if number >= count:
            raise BadInput(f"{name} must be below {count}, as they are counted from 0, got {number}")
    return list(dict.fromkeys(given)) or evenly(count, most)


def _check_attention(model: Model, mixer: str, run: Path) -> None:
    layer = model.blocks[0].mixer
    assert isinstance(layer, nn.Module)
    if has_attention(layer):
        return
    if has_kernel(layer):
        raise BadInput(f"{mixer} has no attention weights: 'longlens figures kernels --run {run}' draws its kernels")
    others = [name for name in list_mixers() if has_attention(create_mixer(name, 64, device="meta"))]
    raise BadInput(f"{mixer} has no attention weights to draw; layers that have them are {', '.join(others)}")


def sample_inputs(task: Task, split: SplitName, sample: int) -> Tensor:
    """(1, L) or (1, L, C): a sample; of a pair, the first."""
    samples = task.split(split)
    if sample >= len(samples):
        raise BadInput(f"sample must be at most {len(samples) - 1:,}, the last of {split}, got {sample:,}")
    (batch,) = Batches(Subset(samples, np.array([sample])), 1)
    return batch.inputs[:, 0, : batch.lengths[0, 0]] if batch.lengths.ndim == 2 else batch.inputs


@torch.no_grad()
def attention_maps(model: Model, inputs: Tensor, layers: Sequence[int] | None = None) -> list[np.ndarray]:
    """(H, L, L) of each layer, or of some: the weights that multiply the values of the first of ``inputs``, without
    padding."""
    maps: dict[int, np.ndarray] = {}

    def look(number: int, layer: Any, arguments: tuple[Any, ...]) -> None:
        maps[number] = layer.attention_weights(arguments[0])[0].cpu().numpy()

    wanted = range(len(model.blocks)) if layers is None else layers
    mixers: list[Any] = [block.mixer for block in model.blocks]
    hooks = [mixers[number].register_forward_pre_hook(partial(look, number)) for number in wanted]
    x = model.embedding(inputs[:1])
    for block in model.blocks:
        x = block(x)
    for hook in hooks:
        hook.remove()
    return [maps[number] for number in wanted]


def draw_maps(maps: Mapping[int, np.ndarray], heads: Sequence[int], title: str) -> Figure:
    """A row for each layer: the mean over all heads, and the chosen ones."""
    size = max(1.3, min(2.4, 15 / (1 + len(heads))))
    figure = Figure(figsize=(max(6.5, 0.5 + size * (1 + len(heads))), 1.1 + size * len(maps)), layout="constrained")
    panels = figure.subplots(len(maps), 1 + len(heads), squeeze=False)
    for row, (layer, weights) in zip(panels, maps.items(), strict=True):
        for axes, found in zip(row, [weights.mean(axis=0), *weights[list(heads)]], strict=True):
            draw_map(axes, found)
        row[0].set_ylabel(f"layer {layer}")
    for axes, name in zip(panels[0], ["mean of heads", *(f"head {head}" for head in heads)], strict=True):
        axes.set_title(name)
    figure.suptitle(plain(title), wrap=True)
    figure.supxlabel(f"rows: queries, columns: keys, {EXPLAINED}", fontsize=11)
    return figure


EXPLAINED = "each row from 0 to its largest weight"


def draw_map(axes: Axes, weights: np.ndarray) -> None:
    """One map (L, L). Each row is relative to its largest weight, as early rows have few keys to choose from. Roots are
    shown, so that more is seen than the largest. Keys without any weight have no color."""
    rows = weights / np.maximum(weights.max(axis=1, keepdims=True), np.finfo(weights.dtype).tiny)
    shown = np.ma.masked_equal(rows, 0.0)
    axes.imshow(shown, cmap="magma", norm=PowerNorm(0.5, 0, 1))
    axes.set_xticks([])
    axes.set_yticks([])
    without_frame(axes)
