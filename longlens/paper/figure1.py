"""Kernels of long convolutions as they are at initialization, in one picture (Figure 1 of the LaS paper, which has S4,
MEGA and SGConv)."""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from matplotlib.figure import Figure
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import has_kernel
from longlens.mixers.registry import choose_mixer, create_mixer, layer_is_causal, list_mixers
from longlens.options import Is, Seed, Several, Size
from longlens.paper.index import Computed, Found
from longlens.reports.pictures import check_picture, ramp, save_picture, styled
from longlens.training.saved import load_run


def draw_kernels(
    *,
    out: Path = Path("figures/kernels.png"),
    mixers: tuple[str, ...] = ("s4", "mega", "sgconv"),
    length: Several = 1024,
    width: Size = 64,
    channels: Annotated[int, Ge(1), Le(12), Is("a whole number from 1 to 12")] = 4,
    seed: Seed = 0,
    run: Path | None = None,
    theme: Literal["light", "dark"] = "light",
) -> str:
    """Draw kernels of long-range layers: random ones at initialization, as in the paper's Figure 1, or those that a run
    has learned.

    A row for each layer, with the kernels of some of its channels, evenly spaced from the first to the last. Weights of
    later inputs are left of 0.

    Args:
        out: Picture to write (.png, .pdf or .svg).
        mixers: Layers to draw; any that is a convolution or contains one.
        length: Kernel length.
        width: Layer width.
        channels: Kernels per layer, at most 12.
        seed: Seed of the initialization.
        run: Folder of a run whose layers are drawn as they were trained, instead of new ones of --mixers.
        theme: Dark ink on white, for print, or light ink on a dark background, for talks.
    """
    if run is not None:
        drawn, title = trained_kernels(run, length)
    elif mixers:
        drawn = {name: initial_kernels(name, length=length, width=width, seed=seed) for name in mixers}
        title = f"Kernels at initialization, $k_l$ / max |$k$|: length {length:,}, width {width}, seed {seed}"
    else:
        raise BadInput("mixers must name at least one mixer, got none")
    check_picture(out)
    with styled(theme):
        return save_picture(_draw(drawn, min(channels, *(len(k) for _, k in drawn.values())), title), out)


def _draw(drawn: dict[str, tuple[Tensor, Tensor]], channels: int, title: str) -> Figure:
    figure = Figure(figsize=(max(11.0, 2.0 * channels), 1.0 + 1.5 * len(drawn)), layout="constrained")
    rows = figure.subplots(len(drawn), channels, sharex="row", sharey=True, squeeze=False)
    above: list[int] = []
    for row, (name, (steps, kernels)) in zip(rows, drawn.items(), strict=True):
        shown = torch.linspace(0, len(kernels) - 1, channels).round().long().tolist()
        end = _draw_row(row, steps, kernels[shown])
        row[0].set_ylabel(f"{name}\n{'±' if steps[0] < 0 else '0 to '}{end:,.0f}")
        if shown != above:  # said once for all rows below that have the same
            for axes, channel in zip(row, shown, strict=True):
                axes.set_title(f"channel {channel}")
        above = shown
    figure.suptitle(title)
    note = "a row ends where its kernels fall below 1 %, at the distance beside its name"
    figure.supxlabel(f"position $l$: steps back, negative for later inputs ({note})", fontsize=11)
    return figure


def initial_kernels(name: str, *, length: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """The positions 0, 1, … steps back, and negative ones for later inputs; and a new layer's kernels (channels,
    positions)."""
    mixer = choose_mixer(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layer = mixer.build(width, max_length=length, dtype=torch.float64).eval()
        return _kernels_of(layer, name, length)


def trained_kernels(run: Path, length: int) -> tuple[dict[str, tuple[Tensor, Tensor]], str]:
    """The same of each layer of a trained model, by their names, and a title."""
    found = load_run(run)
    name = found.config.mixer.name
    with torch.no_grad():
        layers: list[Any] = [block.mixer for block in found.model().blocks]
        drawn = {f"layer {number}": _kernels_of(layer, name, length) for number, layer in enumerate(layers)}
    return drawn, f"Kernels of {name} trained on {found.config.task.name}, $k_l$ / max |$k$|: length {length:,}"


def _kernels_of(layer: nn.Module, name: str, length: int) -> tuple[Tensor, Tensor]:
    if not has_kernel(layer):
        others = [other for other in list_mixers() if has_kernel(create_mixer(other, 64, device="meta"))]
        raise BadInput(f"mixer {name!r} has no kernel to draw; those that have one are {', '.join(others)}")
    kernels: Tensor = layer.kernel(length)  # pyright: ignore[reportCallIssue, reportAssignmentType]
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
    for axes, kernel, color in zip(row, kernels, ramp(len(row)), strict=True):
        axes.axhline(0, color="tab:gray", linewidth=0.6)
        axes.plot(steps, kernel, color=color, linewidth=1.2)
        axes.set_ylim(-1.08, 1.08)
        axes.set_yticks([-1, 0, 1])
        axes.set_xlim(0, end)
        if steps[0] < 0:
            axes.set_xlim(-end, end)
            axes.axvline(0, color="tab:gray", linewidth=0.6, linestyle=":")
    return end


def _compute(results: Path) -> tuple[list[Any], Found]:
    from longlens.paper.table10 import measure_traits

    names = ("s4", "mega", "sgconv")
    written = draw_kernels(out=results / "figure1.png", mixers=names)
    found, attention = {name: measure_traits(name) for name in names}, measure_traits("transformer")
    sentences = [
        f"{name}: the mean weight of the last quarter of 1,024 steps is {traits.far:.2g} of that of the first, and "
        f"neighbors differ by {traits.roughness:.2f} of their size."
        for name, traits in found.items()
    ]
    sentences.append(f"Smooth is below plain attention: {attention.roughness:.2f} (1.41 if independent).")
    smooth = all(found[name].roughness < attention.roughness for name in ("s4", "mega"))
    holds = smooth and all(traits.decays for traits in found.values())
    return [written], Found("holds" if holds else "does not hold", "", sentences)


STUDY = Computed(
    name="figure1",
    title="Kernels of long-range layers",
    place="Figure 1",
    claim="Kernels of S4, MEGA and SGConv decay, and those of S4 and MEGA are smooth.",
    compute=_compute,
)
