"""Time and memory of every layer on one machine: ``longlens bench layers``, the last columns of the paper's Table 2.

Forward and backward of one layer, all layers in turn, at equal width and length.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longlens.bench.measure import Job, Row, begin, make_table, passes, peak_memory, time_interleaved, write_result
from longlens.mixers.common import check_heads
from longlens.mixers.registry import choose_mixer, find_mixer, list_mixers
from longlens.models.model import count_parameters
from longlens.options import Device, Size
from longlens.progress import progress
from longlens.reports.sheet import Sheet

BASELINE = "transformer"


def bench_layers(
    *,
    mixers: tuple[str, ...] | None = None,
    lengths: tuple[Size, ...] = (1024, 2048, 4096, 8192, 16384),
    width: Size = 128,
    heads: Size = 4,
    batch: Size = 1,
    rounds: Size = 5,
    device: Device = "cpu",
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
    check_heads(width, heads)
    names = tuple(dict.fromkeys([BASELINE, *(list_mixers() if mixers is None else mixers)]))
    for name in names:
        find_mixer(name)
    where = begin(device, out, mixers=mixers, lengths=lengths)
    rows = _measure(names, sorted(set(lengths)), width, heads, batch, rounds, where)
    about = f"width {width}, batch {batch}"
    size = {"width": width, "heads": heads, "batch": batch}
    said = write_result(out, where, size=size, rounds=rounds, rows=rows)
    more = {"2L": "×{growth:.2f}"} if growth(rows, BASELINE) else {}
    times = table_by_length(f"time of forward and backward, {about}", rows, _time, *NOTES[: 1 + len(more)], **more)
    return [times, table_by_length(f"peak memory, {about}", rows, _memory, NOTES[2]), *said]


def heads_of(name: str, heads: int) -> dict[str, Any]:
    """The option of a layer that has heads."""
    return {"heads": heads} if "heads" in find_mixer(name).options else {}


def forward_backward(layer: nn.Module, shape: tuple[int, int, int], device: torch.device) -> Job:
    """A job: the outputs of a layer, or of any module (B, L, D) -> (B, L, D), and all gradients."""
    torch.manual_seed(1)
    learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return passes(layer, [torch.randn(shape, device=device)], learned)["forward_backward"]


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
    rows: list[Row] = []
    with progress("layers", len(jobs) * (rounds + 1)) as done:
        seconds = time_interleaved(jobs, device, rounds, on_turn=done, long=10.0)
        for (name, length), layer in layers.items():
            traits = find_mixer(name).traits
            row = {"mixer": name, "length": length, "parameters": count_parameters(layer)}
            row |= {"cost": None if traits is None else traits.cost, "seconds": seconds[name, length]}
            rows.append(row | {"bytes": peak_memory(jobs[name, length], device)})
            done(len(jobs) * rounds + len(rows), "memory")
    return rows


def growth(rows: list[Row], mixer: str) -> float | None:
    """By how much the time grows when the length doubles, at most, from 4,096 tokens on."""
    times = {row["length"]: row["seconds"] for row in rows if row["mixer"] == mixer and row["length"] >= 4096}
    doublings = [times[2 * length] / times[length] for length in times if 2 * length in times]
    return max(doublings, default=None)


def table_by_length(title: str, rows: list[Row], cell: Callable[[Row, Row], str], *notes: str, **columns: str) -> Sheet:
    """A line for each layer and a column for each length, in which a cell shows a row beside that of attention."""
    plain = {row["length"]: row for row in rows if row["mixer"] == BASELINE}
    lines: dict[str, Row] = {}
    for row in rows:
        shown = {f"at_{row['length']}": cell(row, plain[row["length"]]), "growth": growth(rows, row["mixer"])}
        lines.setdefault(row["mixer"], {}).update(row | shown)
    columns = {f"{length:,}": f"{{at_{length}}}" for length in plain} | columns
    return make_table(title, lines.values(), {"layer": "{mixer}", "parameters": "{parameters:,}", **columns}, *notes)


def _time(row: Row, plain: Row) -> str:
    return f"{1e3 * row['seconds']:,.1f} ms ×{short(plain['seconds'] / row['seconds'])}"


def _memory(row: Row, plain: Row) -> str:
    return f"{row['bytes'] / 2**20:,.1f} MiB ×{short(row['bytes'] / max(plain['bytes'], 1))}"


def short(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"


NOTES = (
    "×: how many times as fast as the first line.",
    "2L: by how much the time grows when L doubles, at most, from 4,096 on.",
    "×: relative to the first line. What a layer holds beyond its inputs and parameters, at its peak.",
)
