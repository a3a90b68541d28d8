"""Kernels of long convolutions as they are at initialization, in one picture (Figure 1 of the LaS paper, which has S4,
MEGA and SGConv)."""

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from longlens.mixers.base import Config, create_mixer, list_mixers, mixer_config
from longlens.mixers.common import has_kernel
from longlens.reports.pictures import check_picture, save_picture


def draw_kernels(path: Path, *, mixers: tuple[str, ...], length: int, width: int, channels: int, seed: int) -> None:
    """Write the picture to ``path``; the ending decides the format. A row for each mixer, with the kernels of
    ``channels`` of its channels, evenly spaced from the first to the last; what is ahead is left of 0, and what is too
    far away to be seen is left out."""
    check_picture(path)
    if not mixers:
        raise ValueError("mixers must name at least one")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")
    if channels < 1:
        raise ValueError(f"channels must be at least 1, got {channels}")
    drawn = {name: initial_kernels(name, length=length, width=width, seed=seed) for name in mixers}
    fewest = min(len(kernels) for _, kernels in drawn.values())
    channels = min(channels, fewest)

    figure = Figure(figsize=(11, 0.9 + 1.55 * len(drawn)), layout="constrained")
    rows = figure.subplots(len(drawn), channels, sharex="row", sharey=True, squeeze=False)
    for row, (name, (steps, kernels)) in zip(rows, drawn.items(), strict=True):
        _draw_row(row, steps, kernels)
        row[0].set_ylabel(name, fontsize=11)
    figure.suptitle(f"kernels at initialization: length {length}, width {width}, seed {seed}", fontsize=11)
    figure.supxlabel("position l: steps back, or ahead if negative (a row ends where it falls below 1 %)", fontsize=10)
    figure.supylabel("$k_l$ / max |$k$|", fontsize=10)
    save_picture(figure, path)


def initial_kernels(name: str, *, length: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """A new layer's kernels (channels, positions), and the positions: 0, 1, … steps back, and negative for what is
    ahead."""
    config = mixer_config(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layer = config.build(width, max_length=length, dtype=torch.float64).eval()
        if not has_kernel(layer):
            others = [other for other in list_mixers() if has_kernel(create_mixer(other, 64, device="meta"))]
            raise ValueError(f"mixer {name!r} has no kernel to draw; those that have one are {', '.join(others)}")
        return _both_sides(config, layer.kernel(length))  # pyright: ignore[reportCallIssue]


def _both_sides(config: Config, kernels: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(kernels.shape[-1])
    if config.looks_ahead() is None:
        return steps, kernels
    back, ahead = kernels.chunk(2)
    return torch.cat([-1 - steps.flip(0), steps]), torch.cat([ahead.flip(1), back], dim=1)


def _draw_row(row, steps: Tensor, kernels: Tensor) -> None:
    channels = torch.linspace(0, len(kernels) - 1, len(row)).round().long()
    shown = kernels[channels]
    shown = shown / shown.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(shown.dtype).tiny)  # it may be 0
    visible = steps[(shown.abs() >= 0.01).any(dim=0)].abs().tolist()
    end = min(steps[-1].item(), max([8, *(1.1 * step for step in visible)]))
    colors = matplotlib.colormaps["viridis"](torch.linspace(0, 0.8, len(row)).numpy())
    for axes, channel, kernel, color in zip(row, channels.tolist(), shown, colors, strict=True):
        axes.axhline(0, color="tab:gray", linewidth=0.6)
        axes.plot(steps, kernel, color=color, linewidth=1.1)
        axes.set_title(f"channel {channel}", fontsize=8)
        axes.set_ylim(-1.08, 1.08)
        axes.set_yticks([-1, 0, 1])
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, end)
        if steps[0] < 0:
            axes.set_xlim(-end, end)
            axes.axvline(0, color="tab:gray", linewidth=0.6, linestyle=":")
