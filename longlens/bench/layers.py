"""Time and memory of every layer on one machine: ``longlens bench layers``, the last columns of the paper's Table 2.

Forward and backward of one layer, all layers in turn, at equal width and length.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from longlens.bench.measure import Job, check_out, peak_memory, time_interleaved, write_result
from longlens.console import say
from longlens.mixers.base import mixer_class, mixer_config
from longlens.models.model import count_parameters
from longlens.options import option_names
from longlens.progress import progress

BASELINE = "transformer"


@dataclass(frozen=True)
class Size:
    """What all layers have in common."""

    width: int = 128
    heads: int = 4
    batch: int = 1


def bench_layers(
    size: Size,
    *,
    mixers: tuple[str, ...],
    lengths: tuple[int, ...],
    rounds: int,
    device: str,
    out: Path | None,
    console: Console,
) -> list[dict[str, Any]]:
    """Measure, print two tables, write ``out``, and return a row for each layer and length."""
    if min(*asdict(size).values(), *lengths, rounds) < 1:
        raise ValueError(f"all of {size}, lengths = {lengths} and rounds = {rounds} must be at least 1")
    check_out(out)
    mixers = (BASELINE, *(name for name in mixers if name != BASELINE))
    for name in mixers:
        mixer_class(name)
    rows: list[dict[str, Any]] = []
    lengths = tuple(sorted(set(lengths)))
    with progress("layers", len(lengths) * len(mixers) * (rounds + 1)) as done:
        for length in lengths:
            rows += _measure(size, mixers, length, rounds, torch.device(device), done, len(rows) * (rounds + 1))
            if out is not None:
                write_result(out, device, {"size": asdict(size), "rounds": rounds, "rows": rows})
    console.print(_table(size, rows, "seconds", "time of forward and backward", lambda s: f"{1e3 * s:,.1f} ms"))
    console.print(_table(size, rows, "bytes", "peak memory", lambda b: f"{b / 2**20:,.1f} MiB"))
    if out is not None:
        say(console, f"written to {out}")
    return rows


def build_layer(name: str, size: Size, length: int, device: torch.device) -> nn.Module:
    """A layer with its defaults, but for the heads."""
    options = {"heads": size.heads} if "heads" in option_names(mixer_class(name)) else {}
    torch.manual_seed(0)
    return mixer_config(name, **options).build(size.width, max_length=length, device=device)


def forward_backward(layer: nn.Module, size: Size, length: int, device: torch.device) -> Job:
    """A job: the outputs of a layer, or of any module (B, L, D) -> (B, L, D), and all gradients."""
    torch.manual_seed(1)
    x = torch.randn(size.batch, length, size.width, device=device, requires_grad=True)
    weight = torch.randn_like(x)
    leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    return lambda: torch.autograd.grad(layer(x), leaves, weight, allow_unused=True)


def _measure(size, mixers, length, rounds, device, done, before) -> list[dict[str, Any]]:
    layers = {name: build_layer(name, size, length, device) for name in mixers}
    jobs = {name: forward_backward(layer, size, length, device) for name, layer in layers.items()}
    turns = iter(range(before, before + len(mixers) * (rounds + 1) + 1))

    def turn() -> None:
        done(next(turns), f"L = {length:,}")

    timings = time_interleaved(jobs, device, rounds, on_turn=turn, long=10.0)
    rows = []
    for name in mixers:
        traits = mixer_class(name).traits
        rows.append(
            {
                "mixer": name, "length": length, "parameters": count_parameters(layers[name]),
                "cost": None if traits is None else traits.cost,
                "seconds": timings[name].best, "bytes": peak_memory(jobs[name], device),
            }
        )  # fmt: skip
        turn()
    return rows


def growth(rows: list[dict[str, Any]], mixer: str, least: int = 4096) -> float | None:
    """By how much the time grows when the length doubles, at most, from ``least`` tokens on."""
    times = {row["length"]: row["seconds"] for row in rows if row["mixer"] == mixer and row["length"] >= least}
    doublings = [times[2 * length] / times[length] for length in times if 2 * length in times]
    return max(doublings, default=None)


def _table(size: Size, rows: list[dict[str, Any]], field: str, title: str, show: Any) -> Table:
    lengths = sorted({row["length"] for row in rows})
    title = f"{title}, width {size.width}, batch {size.batch}; × : {BASELINE} = 1"
    table = Table(title=title, title_justify="left")
    table.add_column("layer", no_wrap=True)
    for name in ["parameters", *(f"{length:,}" for length in lengths), *(["2L"] if field == "seconds" else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    cells = {(row["mixer"], row["length"]): row for row in rows}
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        line = [f"{cells[mixer, lengths[-1]]['parameters']:,}"]
        for length in lengths:
            value, plain = cells[mixer, length][field], cells[BASELINE, length][field]
            ratio = plain / value if field == "seconds" else value / plain
            line.append(f"{show(value)} ×{ratio:.2g}" if ratio < 10 else f"{show(value)} ×{ratio:.0f}")
        if field == "seconds":
            grows = growth(rows, mixer)
            line.append("" if grows is None else f"×{grows:.2f}")
        table.add_row(mixer, *line)
    caption = {
        "seconds": "× : how many times as fast; 2L: by how much the time grows when L doubles, at most, from 4,096 on.",
        "bytes": "× : share of the memory; what a layer holds beyond its inputs and parameters, at its peak.",
    }
    table.caption, table.caption_justify = caption[field], "left"
    return table
