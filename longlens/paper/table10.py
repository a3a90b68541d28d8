"""What the layers are made of: the paper's Table 10, for all of them, beside what can be measured.

Measured at initialization: the weight k[n] of the input n steps back in an output. For a convolution that is its
kernel; for any other layer it is the derivative of an output, in a random direction, by an input, in a random
direction: for attention a multiple of a row of the attention matrix, but for what goes through the scores.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import has_kernel
from longlens.mixers.registry import Mixer, choose_mixer, find_mixer, layer_is_causal, list_mixers, seen_sides
from longlens.models.decode import changing_tensors
from longlens.paper.index import Computed, Found
from longlens.progress import progress
from longlens.reports.sheet import Column, Sheet

DIRECTIONS = 8  # random directions, for layers without a kernel
STEPS = 16  # tokens after which a state is counted
NOTHING = 1e-6
DECAYS = 0.5  # a layer decays if far weights are at most this fraction of the near ones


class Measured(NamedTuple):
    """What a layer is like at initialization."""

    far: float  # mean weight of the last quarter of the distances, relative to the first quarter
    rate: float  # of exponential decay, a token: the slope of log |k[n]|, as far as it is not next to nothing
    roughness: float  # mean |k[n + 1] - k[n]| / mean |k[n]|: 0 for a constant, 1.41 for independent numbers
    state: int | None  # numbers that are remembered after some steps; None if the layer has no step

    @property
    def decays(self) -> bool:
        return self.far <= DECAYS


def measure_traits(name: str, *, length: int = 1024, width: int = 64, seeds: int = 3, **options: Any) -> Measured:
    """Build a layer, by default with its defaults, a few times, and look at it."""
    if length < 16:
        raise BadInput(f"length must be at least 16, got {length}")
    mixer, found = choose_mixer(name, **options), []
    with torch.random.fork_rng(devices=[]):
        for seed in range(seeds):
            torch.manual_seed(seed)
            found.append(response(mixer.build(width, max_length=length).eval(), length, width))
    weights = torch.cat(found)
    size, quarter = weights.abs().mean(0), length // 4
    far = (size[-quarter:].mean() / size[:quarter].mean()).item()
    rough = (weights.diff(dim=1).abs().mean(1) / weights.abs().mean(1).clamp(min=1e-30)).mean().item()
    return Measured(far, _decay_rate(size), rough, _state_size(mixer, width, length))


def response(layer: nn.Module, length: int, width: int) -> Tensor:
    """(examples, length): the weights k[n] of inputs n steps back."""
    if has_kernel(layer):
        with torch.no_grad():
            kernel = layer.kernel(length)  # pyright: ignore[reportCallIssue]
        return kernel[: kernel.shape[0] // 2] if getattr(layer, "bidirectional", False) else kernel
    x = torch.randn(DIRECTIONS, length, width, requires_grad=True)
    into, out = torch.randn(2, DIRECTIONS, width)
    (gradient,) = torch.autograd.grad((layer(x)[:, -1] * out).sum(), x)
    return torch.einsum("bld,bd->bl", gradient, into).flip(1)


def _decay_rate(size: Tensor) -> float:
    """The slope of log |k[n]|, by least squares, up to where it falls below a millionth of its largest value."""
    above = (size > NOTHING * size.max()).nonzero().flatten()
    size = size[: above[-1] + 1].clamp(min=NOTHING * size.max()).double()
    if len(size) < 2:
        return float("inf")
    steps = torch.arange(len(size), dtype=torch.float64)
    steps -= steps.mean()
    return -((steps * size.log()).sum() / steps.square().sum()).item()


@torch.no_grad()
def _state_size(mixer: Mixer, width: int, length: int) -> int | None:
    """The numbers in the state of the causal form, if there is one."""
    if "bidirectional" in mixer.options:
        mixer = replace(mixer, options={**mixer.options, "bidirectional": False})
    layer = mixer.build(width, max_length=length).eval()
    if not hasattr(layer, "step") or not layer_is_causal(layer):
        return None
    before = state = None
    for token in torch.randn(STEPS, 1, width):
        before, (_, state) = state, layer.step(token, state)  # pyright: ignore[reportCallIssue]
    return sum(tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in changing_tensors(state, before))


COLUMNS = {"decays": "decays", "regularized": "R", "special_init": "U.I", "stable": "stable"}
COLUMNS |= {"gated": "G", "complex": "C", "normalized": "N"}
DESIGN = (
    "R: explicit regularization, U.I: unique initialization, G: gating, C: complex parameters, N: normalization, "
    "non-rec.: trains without recurrence; the paper's layers as in its Table 10."
)
SHAPE = (
    "k[n]: weight of the input n steps back. far/near: mean |k| of the last quarter of all distances over that of the "
    "first; !: not below 0.5 though the layer is said to decay, or below though it is not. rate: of exponential decay, "
    "a token. rough: roughness, mean |k[n+1] - k[n]| / mean |k[n]|, 0 if constant, 1.41 if independent."
)


def traits_tables(length: int, width: int) -> list[Sheet]:
    """Table 10 of the paper, for all layers; what is measured of it; and what they need. Each fits 80 columns."""
    design = Sheet("design", [*map(Column, ("layer", *COLUMNS.values(), "non-rec."))], notes=[DESIGN])
    columns = [
        Column("layer"),
        Column("decays"),
        *(Column(name, number=True) for name in ("far/near", "rate", "rough")),
    ]
    shape = Sheet(f"measured at initialization, L = {length:,}, width {width}", columns, notes=[SHAPE])
    columns = [Column("layer"), Column("sides"), Column("time"), Column("state", wrap=True)]
    costs = Sheet("sides and costs", [*columns, Column(f"after {STEPS}", number=True)])
    costs.notes.append(f"state: numbers that a step remembers; after {STEPS} tokens, width {width}.")
    names = list_mixers()
    with progress("measuring", len(names), "layers") as done:
        for count, name in enumerate(names):
            done(count, name)
            found, traits = measure_traits(name, length=length, width=width), find_mixer(name).traits
            said, mark, cost, state = ["?"] * (len(COLUMNS) + 1), "", "?", "?"
            if traits is not None:
                values = [*(getattr(traits, field) for field in COLUMNS), not traits.recurrent]
                said = ["yes" if value else "·" for value in values]
                mark = "" if found.decays == traits.decays else "! "
                cost, state = traits.cost, traits.state or "–"
            numbers = [f"{mark}{found.far:.2g}", f"{found.rate + 0.0:.1e}", f"{found.roughness:.2f}"]
            counted = "–" if found.state is None else f"{found.state:,}"
            design.rows.append([name, *said])
            shape.rows.append([name, said[0], *numbers])
            costs.rows.append([name, seen_sides(name), cost, state, counted])
    return [design, shape, costs]


SUCCESSFUL = (
    "lssl",
    "s4",
    "dss",
    "gss",
    "mega",
    "s5",
    "sgconv",
    "dlr",
    "h3",
    "long-conv",
    "lru",
    "tnn",
)  # of the table


OTHERWISE = {  # what hangs on a setting, to either side
    "dlr": ("over 16,384 tokens", {"length": 16384}),
    "long-conv": ("with its authors' decaying initialization", {"init": "double-exponential"}),
    "tnn": ("with a decay of 1, that of its authors for ListOps and Pathfinder", {"decay": 1.0}),
}


def _compute(results: Path) -> tuple[list[Any], Found]:
    sheets = traits_tables(1024, 64)
    measured = {name: float(far.removeprefix("! ")) for name, _, far, *_ in sheets[1].rows}
    flat = {name: measured[name] for name in SUCCESSFUL if measured[name] > DECAYS}
    sentences = [
        f"{len(SUCCESSFUL) - len(flat)} of the {len(SUCCESSFUL)} layers have, at initialization and over 1,024 tokens, "
        f"less than {DECAYS:g} of the weight of the first quarter in the last."
    ]
    otherwise = {name: measure_traits(name, **options).far for name, (_, options) in OTHERWISE.items()}
    for name, (how, _) in OTHERWISE.items():
        sentences.append(f"{name} has {measured[name]:.2g}, and {otherwise[name]:.2g} {how}.")
    because = f"{len(SUCCESSFUL) - len(flat)} of {len(SUCCESSFUL)} do at initialization over 1,024 tokens"
    hang = [name for name, far in otherwise.items() if (far > DECAYS) != (name in flat)]
    because += f", and not {' and '.join(flat)}" if flat else ""
    because += f"; with other settings it is the other way round for {', '.join(hang)}" if hang else ""
    verdict = "holds" if not flat else "not decided" if flat.keys() <= set(hang) else "does not hold"
    return sheets, Found(verdict, because, sentences)


STUDY = Computed(
    name="table10",
    title="Layers and their design",
    place="Table 10, Appendix E",
    claim="All successful long-range layers have a decaying structure.",
    compute=_compute,
)
