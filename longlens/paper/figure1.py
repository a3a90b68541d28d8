"""Kernels of long convolutions as they are at initialization, in one picture (Figure 1 of the LaS paper, which has S4,
MEGA and SGConv)."""

from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
from annotated_types import Ge, Le
from matplotlib.figure import Figure
from torch import Tensor

from longlens.errors import BadInput
from longlens.mixers.common import has_kernel
from longlens.mixers.registry import choose_mixer, create_mixer, layer_is_causal, list_mixers
from longlens.options import Is, Seed, Several, Size
from longlens.paper.index import Computed, Found
from longlens.reports.pictures import check_picture, save_picture

SMOOTH = 1.0  # the roughness of a smooth kernel is below it: neighbors differ by less than their size


def draw_kernels(
    *,
    out: Path = Path("figures/kernels.png"),
    mixers: tuple[str, ...] = ("s4", "mega", "sgconv"),
    length: Several = 1024,
    width: Size = 64,
    channels: Annotated[int, Ge(1), Le(12), Is("a whole number from 1 to 12")] = 4,
    seed: Seed = 0,
) -> str:
    """Draw random kernels of long-range layers at initialization, as the paper's Figure 1 does.

    A row for each layer, with the kernels of some of its channels, evenly spaced from the first to the last. Weights of
    later inputs are left of 0.

    Args:
        out: Picture to write (.png, .pdf or .svg).
        mixers: Layers to draw; any that is a convolution or contains one.
        length: Kernel length.
        width: Layer width.
        channels: Kernels per layer, at most 12.
        seed: Seed of the initialization.
    """
    if not mixers:
        raise BadInput("mixers must name at least one mixer, got none")
    drawn = {name: initial_kernels(name, length=length, width=width, seed=seed) for name in mixers}
    check_picture(out)
    channels = min(channels, *(len(kernels) for _, kernels in drawn.values()))

    figure = Figure(figsize=(max(11.0, 2.0 * channels), 1.0 + 1.5 * len(drawn)), layout="constrained")
    rows = figure.subplots(len(drawn), channels, sharex="row", sharey=True, squeeze=False)
    above: list[int] = []
    for row, (name, (steps, kernels)) in zip(rows, drawn.items(), strict=True):
        shown = torch.linspace(0, len(kernels) - 1, channels).round().long().tolist()
        end = _draw_row(row, steps, kernels[shown])
        row[0].set_ylabel(f"{name}\n{'±' if steps[0] < 0 else '0 to '}{end:,.0f}", fontsize=10)
        if shown != above:  # said once for all rows below that have the same
            for axes, channel in zip(row, shown, strict=True):
                axes.set_title(f"channel {channel}", fontsize=9)
        above = shown
    title = f"Kernels at initialization, $k_l$ / max |$k$|: length {length:,}, width {width}, seed {seed}"
    figure.suptitle(title, fontsize=12)
    note = "a row ends where its kernels fall below 1 %, at the distance beside its name"
    figure.supxlabel(f"position $l$: steps back, negative for later inputs ({note})", fontsize=10)
    return save_picture(figure, out)


def initial_kernels(name: str, *, length: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """The positions 0, 1, … steps back, and negative ones for later inputs; and a new layer's kernels (channels,
    positions)."""
    mixer = choose_mixer(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layer = mixer.build(width, max_length=length, dtype=torch.float64).eval()
        if not has_kernel(layer):
            others = [other for other in list_mixers() if has_kernel(create_mixer(other, 64, device="meta"))]
            raise BadInput(f"mixer {name!r} has no kernel to draw; those that have one are {', '.join(others)}")
        kernels = layer.kernel(length)  # pyright: ignore[reportCallIssue]
    steps = torch.arange(kernels.shape[-1])
    if layer_is_causal(layer):
        return steps, kernels
    back, later = kernels.chunk(2)
    return torch.cat([-1 - steps.flip(0), steps]), torch.cat([later.flip(1), back], dim=1)


def _draw_row(row: Any, steps: Tensor, kernels: Tensor) -> float:
    """Draw the kernels, each relative to its largest weight, as far as any of them is seen; return how far."""
    kernels = kernels / kernels.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(kernels.dtype).tiny)  # or it is 0
    visible = steps[(kernels.abs() >= 0.01).any(dim=0)].abs().tolist()
    end = min(steps[-1].item(), max([8, *(1.1 * step for step in visible)]))
    colors = matplotlib.colormaps["viridis"](torch.linspace(0, 0.8, len(row)).numpy())
    for axes, kernel, color in zip(row, kernels, colors, strict=True):
        axes.axhline(0, color="tab:gray", linewidth=0.6)
        axes.plot(steps, kernel, color=color, linewidth=1.1)
        axes.set_ylim(-1.08, 1.08)
        axes.set_yticks([-1, 0, 1])
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, end)
        if steps[0] < 0:
            axes.set_xlim(-end, end)
            axes.axvline(0, color="tab:gray", linewidth=0.6, linestyle=":")
    return end


def _compute(results: Path) -> tuple[list[Any], Found]:
    from longlens.paper.table10 import measure_traits

    names = ("s4", "mega", "sgconv")
    written = draw_kernels(out=results / "figure1.png", mixers=names)
    found = {name: measure_traits(name) for name in names}
    sentences = [
        f"{name}: the mean weight of the last quarter of 1,024 steps is {traits.far:.2g} of that of the first, and "
        f"neighbors differ by {traits.roughness:.2f} of their size (1.41 if they were independent)."
        for name, traits in found.items()
    ]
    holds = all(traits.decays and traits.roughness < SMOOTH for traits in found.values())
    return [written], Found("holds" if holds else "does not hold", "", sentences)


STUDY = Computed(
    name="figure1",
    title="Kernels of long-range layers",
    place="Figure 1",
    claim="Random kernels of S4, MEGA and SGConv decay, and are smooth.",
    compute=_compute,
)
