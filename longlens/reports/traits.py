"""What the layers are made of: the paper's Table 10, for all of them, beside what can be measured.

Measured at initialization: the weight k[n] with which an output hears the input n steps back. For a convolution that
is its kernel; for any other layer it is the derivative of an output, in a random direction, by an input, in a random
direction: for attention a multiple of a row of the attention matrix, but for what goes through the scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from longlens.mixers.base import Config, list_mixers, mixer_class, sides
from longlens.mixers.common import has_kernel
from longlens.options import option_names
from longlens.progress import progress

DIRECTIONS = 8  # random directions, for layers without a kernel
STEPS = 16  # tokens after which a state is counted
NOTHING = 1e-6
DECAYS = 0.5  # a layer decays if far weights have at most this share of the near ones


@dataclass(frozen=True)
class Measured:
    """Of a layer at initialization.

    Args:
        far: the mean weight of the last quarter of the distances, relative to the first quarter.
        rate: of exponential decay, a token: the slope of log |k[n]|, as far as it is not next to nothing.
        roughness: mean |k[n + 1] - k[n]| / mean |k[n]|: 0 for a constant, 1.41 for independent numbers.
        state: numbers that are remembered after some steps; None if the layer has no step.
    """

    far: float
    rate: float
    roughness: float
    state: int | None

    @property
    def decays(self) -> bool:
        return self.far <= DECAYS


def measure_traits(name: str, *, length: int = 1024, width: int = 64, seeds: int = 3) -> Measured:
    """Build a layer with its defaults a few times, and look at it."""
    if length < 16:
        raise ValueError(f"length must be at least 16, got {length}")
    config, found = mixer_class(name)(), []
    with torch.random.fork_rng(devices=[]):
        for seed in range(seeds):
            torch.manual_seed(seed)
            found.append(response(config.build(width, max_length=length).eval(), length, width))
    weights = torch.cat(found)
    size, quarter = weights.abs().mean(0), length // 4
    far = (size[-quarter:].mean() / size[:quarter].mean()).item()
    rough = (weights.diff(dim=1).abs().mean(1) / weights.abs().mean(1).clamp(min=1e-30)).mean().item()
    return Measured(far, _decay_rate(size), rough, _state_size(type(config), width, length))


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
def _state_size(chosen: type[Config], width: int, length: int) -> int | None:
    """Of the causal form, if there is one."""
    config = chosen(**({"bidirectional": False} if "bidirectional" in option_names(chosen) else {}))
    layer = config.build(width, max_length=length).eval()
    if not hasattr(layer, "step") or config.looks_ahead() is not None:
        return None
    state, constant = None, set()
    for token in torch.randn(STEPS, 1, width):
        constant = set(map(id, _tensors(state)))  # what stays the same, as a matrix computed once, is no memory
        _, state = layer.step(token, state)  # pyright: ignore[reportCallIssue]
    changing = (tensor for tensor in _tensors(state) if id(tensor) not in constant)
    return sum(tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in changing)


def _tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of a state, whatever it is made of."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        yield from _tensors(list(state.values()))
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _tensors(part)
    elif is_dataclass(state):
        yield from _tensors([getattr(state, part.name) for part in fields(state)])
    elif hasattr(state, "__dict__"):
        yield from _tensors(vars(state))


COLUMNS = {
    "decays": "decays", "regularized": "R", "special_init": "U.I", "stable": "stable", "gated": "G", "complex": "C",
    "normalized": "N",
}  # fmt: skip


def traits_tables(length: int, width: int) -> tuple[Table, Table]:
    """Table 10 of the paper, for all layers, with what is measured beside; and what they need."""
    names, measured = list_mixers(), {}
    with progress("measuring", len(names), "layers") as done:
        for count, name in enumerate(names):
            done(count, name)
            measured[name] = measure_traits(name, length=length, width=width)
    return _design(measured, length, width), _needs(measured, width)


def _design(measured: dict[str, Measured], length: int, width: int) -> Table:
    title = f"design; far/near, rate, roughness: measured at initialization, L = {length:,}, width {width}"
    table = _table(title, DESIGN)
    first, *others = COLUMNS.values()
    for name in (first, "far/near", "rate", "roughness", *others, "non-rec."):
        table.add_column(name, justify="right" if name in ("far/near", "rate", "roughness") else "center")
    for name, found in measured.items():
        traits = mixer_class(name).traits
        said = ["?"] * 8 if traits is None else [_yes(getattr(traits, field)) for field in COLUMNS]
        said += [] if traits is None else [_yes(not traits.recurrent)]
        mark = "" if traits is None or found.decays == traits.decays else "! "
        shape = [f"{mark}{found.far:.2g}", f"{found.rate + 0.0:.1e}", f"{found.roughness:.2f}"]
        table.add_row(name, said[0], *shape, *said[1:])
    return table


def _needs(measured: dict[str, Measured], width: int) -> Table:
    table = _table("sides and costs", f"state: numbers that a step remembers; after {STEPS} tokens, width {width}.")
    for name in ("causal", "both sides", "time", "state", f"after {STEPS}"):
        table.add_column(name, justify="right" if name.startswith("after") else "left")
    for name, found in measured.items():
        chosen = mixer_class(name)
        cost, state = ("?", "?") if chosen.traits is None else (chosen.traits.cost, chosen.traits.state or "–")
        counted = "–" if found.state is None else f"{found.state:,}"
        table.add_row(name, *map(_yes, sides(chosen)), cost, state, counted)
    return table


def _table(title: str, caption: str) -> Table:
    table = Table(title=title, title_justify="left", caption=escape(caption), caption_justify="left")
    table.add_column("layer", no_wrap=True)
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "·"


DESIGN = (
    "R: explicit regularization, U.I: unique initialization, G: gating, C: complex parameters, N: normalization, "
    "non-rec.: trains without recurrence; the paper's layers as in its Table 10.\n"
    "k[n]: weight of the input n steps back. far/near: mean |k| of the last quarter of all distances over that of the "
    "first; !: not below 0.5 though the layer is said to decay, or below though it is not. rate: of exponential decay, "
    "a token. roughness: mean |k[n+1] - k[n]| / mean |k[n]|, 0 if constant, 1.41 if independent."
)
