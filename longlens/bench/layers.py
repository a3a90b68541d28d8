"""Time and memory of every layer on one machine: ``longlens bench layers``, the last columns of the paper's Table 2.

Forward and backward of one layer, all layers in turn, at equal width and length.
"""

from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from longlens.bench.measure import Job, check_given, peak_memory, time_interleaved, write_result
from longlens.bench.split import SplitSheet
from longlens.files import check_out
from longlens.mixers.common import check_heads
from longlens.mixers.registry import choose_mixer, find_mixer, list_mixers
from longlens.models.model import count_parameters
from longlens.options import Size
from longlens.progress import progress
from longlens.reports.sheet import Column, Sheet
from longlens.training.distributed import choose_device

BASELINE = "transformer"
Row = dict[str, Any]


def bench_layers(
    *,
    mixers: tuple[str, ...] | None = None,
    lengths: tuple[Size, ...] = (1024, 2048, 4096, 8192, 16384),
    width: Size = 128,
    heads: Size = 4,
    batch: Size = 1,
    rounds: Size = 5,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    out: Path | None = None,
) -> list[Sheet | str]:
    """Time and peak memory of every layer, forward and backward, relative to the Transformer's attention.

    Args:
        mixers: Layers to measure; by default all.
        lengths: Sequence lengths.
        width: Channels of a token.
        heads: Number of heads, for layers that have heads.
        batch: Sequences of a batch.
        rounds: Interleaved rounds; the best of each layer counts.
        device: Device to measure on; auto is a GPU if there is one.
        out: JSON file to write the figures and the environment to.
    """
    check_given(mixers=mixers, lengths=lengths)
    check_heads(width, heads)
    names = tuple(dict.fromkeys([BASELINE, *(list_mixers() if mixers is None else mixers)]))
    for name in names:
        find_mixer(name)
    where = choose_device(device)
    check_out(out)
    rows = _measure(names, sorted(set(lengths)), width, heads, batch, rounds, where)
    about = f"width {width}, batch {batch}"
    size = {"width": width, "heads": heads, "batch": batch}
    said = write_result(out, where, {"size": size, "rounds": rounds, "rows": rows})
    return [_time_table(rows, about), _memory_table(rows, about), *said]


def heads_of(name: str, heads: int) -> dict[str, Any]:
    """The option of a layer that has heads."""
    return {"heads": heads} if "heads" in find_mixer(name).options else {}


def forward_backward(layer: nn.Module, shape: tuple[int, int, int], device: torch.device) -> Job:
    """A job: the outputs of a layer, or of any module (B, L, D) -> (B, L, D), and all gradients."""
    torch.manual_seed(1)
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn_like(x)
    leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    return lambda: torch.autograd.grad(layer(x), leaves, weight, allow_unused=True)


def _measure(
    mixers: tuple[str, ...], lengths: list[int], width: int, heads: int, batch: int, rounds: int, device: torch.device
) -> list[Row]:
    """All layers at all lengths in turn, so that a slow minute of the machine does not look like a slow length."""
    layers: dict[tuple[str, int], nn.Module] = {}
    for name, length in product(mixers, lengths):
        torch.manual_seed(0)
        mixer = choose_mixer(name, **heads_of(name, heads))
        layers[name, length] = mixer.build(width, max_length=length, device=device)
    jobs = {key: forward_backward(layer, (batch, key[1], width), device) for key, layer in layers.items()}
    rows, turns = [], count(1)
    with progress("layers", len(jobs) * (rounds + 1)) as done:
        timings = time_interleaved(jobs, device, rounds, on_turn=lambda: done(next(turns)), long=10.0)
        for (name, length), layer in layers.items():
            traits = find_mixer(name).traits
            row = {"mixer": name, "length": length, "parameters": count_parameters(layer)}
            row |= {"cost": None if traits is None else traits.cost, "seconds": timings[name, length].best}
            rows.append(row | {"bytes": peak_memory(jobs[name, length], device)})
            done(next(turns), "memory")
    return rows


def growth(rows: list[Row], mixer: str, least: int = 4096) -> float | None:
    """By how much the time grows when the length doubles, at most, from ``least`` tokens on."""
    times = {row["length"]: row["seconds"] for row in rows if row["mixer"] == mixer and row["length"] >= least}
    doublings = [times[2 * length] / times[length] for length in times if 2 * length in times]
    return max(doublings, default=None)


def _time_table(rows: list[Row], about: str) -> Sheet:
    def cell(row: Row, plain: Row) -> str:
        return f"{1e3 * row['seconds']:,.1f} ms ×{_short(plain['seconds'] / row['seconds'])}"

    table = _table(f"time of forward and backward, {about}", rows, cell)
    table.notes.append("×: how many times as fast as the first line.")
    grows = [growth(rows, row[0]) for row in table.rows]
    if any(grows):
        table.columns.append(Column("2L", 1, number=True))
        for row, value in zip(table.rows, grows, strict=True):
            row.append(f"×{value:.2f}")
        table.notes.append("2L: by how much the time grows when L doubles, at most, from 4,096 on.")
    return table


def _memory_table(rows: list[Row], about: str) -> Sheet:
    def cell(row: Row, plain: Row) -> str:
        return f"{row['bytes'] / 2**20:,.1f} MiB ×{_short(row['bytes'] / max(plain['bytes'], 1))}"

    table = _table(f"peak memory, {about}", rows, cell)
    note = "×: relative to the first line. What a layer holds beyond its inputs and parameters, at its peak."
    table.notes.append(note)
    return table


def _table(title: str, rows: list[Row], cell: Callable[[Row, Row], str]) -> Sheet:
    """A line for each layer and a column for each length."""
    found = {(row["mixer"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    columns = [Column("parameters", 1, number=True), *(Column(f"{length:,}", 1, number=True) for length in lengths)]
    table = SplitSheet(title, [Column("layer"), *columns])
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        cells = [cell(found[mixer, length], found[BASELINE, length]) for length in lengths]
        table.rows.append([mixer, f"{found[mixer, lengths[-1]]['parameters']:,}", *cells])
    return table


def _short(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
