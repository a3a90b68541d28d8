"""Time and memory of every layer on one machine: ``longlens bench layers``, the last columns of the paper's Table 2.

Forward and backward of one layer, all layers in turn, at equal width and length.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from longlens.bench.measure import Job, check_counts, check_out, peak_memory, time_interleaved, write_result
from longlens.console import say
from longlens.mixers.base import mixer_class, mixer_config
from longlens.mixers.common import check_heads
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
    check_counts(**asdict(size), lengths=lengths, rounds=rounds)
    check_heads(size.width, size.heads)
    check_out(out)
    mixers = (BASELINE, *(name for name in mixers if name != BASELINE))
    for name in mixers:
        mixer_class(name)
    rows = _measure(size, mixers, tuple(sorted(set(lengths))), rounds, torch.device(device))
    console.print(_times(size, rows), _memory(size, rows), sep="\n")
    if out is not None:
        write_result(out, device, {"size": asdict(size), "rounds": rounds, "rows": rows})
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


def _measure(
    size: Size, mixers: tuple[str, ...], lengths: tuple[int, ...], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """All layers at all lengths in turn, so that a slow minute of the machine does not look like a slow length."""
    layers = {(name, length): build_layer(name, size, length, device) for name in mixers for length in lengths}
    jobs = {key: forward_backward(layer, size, key[1], device) for key, layer in layers.items()}
    rows = []
    with progress("layers", len(jobs) * (rounds + 1)) as done:
        turns = iter(range(1, len(jobs) * (rounds + 1) + 1))
        timings = time_interleaved(jobs, device, rounds, on_turn=lambda: done(next(turns)), long=10.0)
        for (name, length), layer in layers.items():
            traits = mixer_class(name).traits
            rows.append(
                {
                    "mixer": name, "length": length, "parameters": count_parameters(layer),
                    "cost": None if traits is None else traits.cost, "seconds": timings[name, length].best,
                    "bytes": peak_memory(jobs[name, length], device),
                }
            )  # fmt: skip
            done(next(turns), "memory")
    return rows


def growth(rows: list[dict[str, Any]], mixer: str, least: int = 4096) -> float | None:
    """By how much the time grows when the length doubles, at most, from ``least`` tokens on."""
    times = {row["length"]: row["seconds"] for row in rows if row["mixer"] == mixer and row["length"] >= least}
    doublings = [times[2 * length] / times[length] for length in times if 2 * length in times]
    return max(doublings, default=None)


def _times(size: Size, rows: list[dict[str, Any]]) -> Table:
    grows = {row["mixer"]: growth(rows, row["mixer"]) for row in rows}
    last = {mixer: f"×{value:.2f}" for mixer, value in grows.items() if value is not None}
    caption = "× : how many times as fast as the first line"
    caption += "; 2L: by how much the time grows when L doubles, at most, from 4,096 on." if last else "."

    def cell(row: dict[str, Any], plain: dict[str, Any]) -> str:
        return f"{1e3 * row['seconds']:,.1f} ms ×{_short(plain['seconds'] / row['seconds'])}"

    return _table(f"time of forward and backward, width {size.width}, batch {size.batch}", caption, rows, cell, last)


def _memory(size: Size, rows: list[dict[str, Any]]) -> Table:
    caption = "× : relative to the first line. What a layer holds beyond its inputs and parameters, at its peak."

    def cell(row: dict[str, Any], plain: dict[str, Any]) -> str:
        return f"{row['bytes'] / 2**20:,.1f} MiB ×{_short(row['bytes'] / plain['bytes'])}"

    return _table(f"peak memory, width {size.width}, batch {size.batch}", caption, rows, cell, {})


def _table(
    title: str,
    caption: str,
    rows: list[dict[str, Any]],
    cell: Callable[[dict[str, Any], dict[str, Any]], str],
    last: dict[str, str],
) -> Table:
    """A line for each layer, a column for each length, and a last one if there is anything in it."""
    found = {(row["mixer"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("layer", no_wrap=True)
    for name in ("parameters", *(f"{length:,}" for length in lengths), *(["2L"] if last else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        cells = [cell(found[mixer, length], found[BASELINE, length]) for length in lengths]
        cells += [last.get(mixer, "")] if last else []
        table.add_row(mixer, f"{found[mixer, lengths[-1]]['parameters']:,}", *cells)
    return table


def _short(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
