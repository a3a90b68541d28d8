"""What LaS attention costs beside plain attention: ``longlens bench attention``."""

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.bench.long import LENGTHS as LONG
from longlens.bench.long import bench_long
from longlens.bench.measure import (
    Passes,
    Row,
    begin,
    make_table,
    passes,
    peak_memory,
    time_interleaved,
    write_result,
)
from longlens.errors import first_line
from longlens.mixers.las import LaSAttention
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.ops.smoothing import smooth_values
from longlens.options import Device, NonNegative, Odd, Positive, Size
from longlens.progress import progress
from longlens.reports.sheet import Sheet

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEASURES = ("forward_s", "forward_backward_s", "forward_peak_bytes", "forward_backward_peak_bytes")
COLUMNS = {
    "L": "{length:,}",
    "attention": "{name}",
    "forward": "{forward_ms:,.2f} ms ×{forward_ratio:.2f}",
    "both": "{forward_backward_ms:,.2f} ms ×{forward_backward_ratio:.2f}",
    "memory, forward": "{forward_mib:,.1f} MiB ×{forward_peak_ratio:.2f}",
    "memory, both": "{forward_backward_mib:,.1f} MiB ×{forward_backward_peak_ratio:.2f}",
}


def bench_attention(
    *,
    lengths: tuple[Size, ...] | None = None,
    head_dims: tuple[Size, ...] = (32, 64),
    groups: tuple[Literal["attention", "chunk", "layer", "last"], ...] = ("attention", "chunk", "layer", "last"),
    heads: Size = 8,
    batch: Size = 1,
    window: Odd = 5,
    max_rate: NonNegative = 1e-3,
    chunk_size: Size = 128,
    rounds: Size = 5,
    flex: bool = True,
    long: bool = False,
    tolerance: Positive = 1e-3,
    device: Device = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    out: Path | None = None,
) -> list[Sheet | str]:
    """Time and peak memory of LaS attention beside torch's plain attention, the formula and FlexAttention.

    Args:
        lengths: Sequence lengths; by default 128 to 16,384, doubled each time, or 32,768 to 131,072 with --long.
        head_dims: Widths of a head.
        groups: Comparisons to make: the operator, the operator in chunks, the whole layer, a last query by itself.
        heads: Number of heads.
        batch: Sequences of a batch.
        window: Odd window of the smoothing.
        max_rate: Largest decay rate.
        chunk_size: Length of a chunk.
        rounds: Interleaved rounds; the best of each candidate counts.
        flex: Include FlexAttention, which is compiled for each length.
        long: Measure linear time beside plain attention instead, in long sequences of heads of width 32 that all decay,
            and up to a million tokens by itself.
        tolerance: Largest error of linear time in long sequences, relative to the largest value.
        device: Device to measure on; auto is a GPU if there is one.
        dtype: Data type of the inputs.
        out: JSON file to write the figures and the environment to.
    """
    where = begin(device, out, lengths=lengths, head_dims=head_dims, groups=groups)
    if long:
        return bench_long(lengths or LONG, tolerance, rounds, where, out)
    lengths = lengths or LENGTHS
    settings = {"heads": heads, "batch": batch, "window": window, "max_rate": max_rate, "chunk_size": chunk_size}
    settings |= {"device": where.type, "dtype": dtype, "rounds": rounds}
    options = {"max_rate": max_rate, "window": window, "device": where, "dtype": DTYPES[dtype]}
    rows: list[Row] = []
    said: list[str] = []
    cells = list(product(head_dims, lengths, groups))
    with progress("attention", len(cells)) as done:
        for count, (head_dim, length, group) in enumerate(cells):
            note = f"d = {head_dim}, L = {length:,}, {group}"
            done(count, note)
            layer = LaSAttention(heads * head_dim, heads, **options)
            candidates = _candidates(group, layer, batch, length, chunk_size, flex)
            about = {"group": group, "length": length, "head_dim": head_dim}
            measured = _measure(candidates, rounds, where, lambda _, now=(count, note): done(*now))
            rows += [about | row for row in measured]
            # After each group, so that nothing is lost when it is interrupted.
            said = write_result(out, where, settings=settings, rows=rows)
    about = f"batch {batch}, {dtype}"
    tables = [_table(f"{heads} heads of {d}, {about}", [r for r in rows if r["head_dim"] == d]) for d in head_dims]
    return [*tables, *said]


def _candidates(
    group: str, layer: LaSAttention, batch: int, length: int, size: int, flex: bool
) -> dict[str, Passes | str]:
    """What a group compares, or why it is not measured; the first is what the others are compared with."""
    weight, heads, dim = layer.in_proj.weight, layer.num_heads, layer.embed_dim // layer.num_heads
    draw = partial(torch.randn, device=weight.device, dtype=weight.dtype)
    las = partial(las_attention, decay=layer.rates, smoothing=layer.window)
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)

    def plain_layer(x: Tensor) -> Tensor:
        query, key, value = layer.in_proj(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return layer.out_proj(sdpa(query, key, value).transpose(1, 2).flatten(2))

    def plain_chunks(*inputs: Tensor) -> Tensor:  # as a view, without a copy
        query, key, value = (x.unflatten(2, (-1, size)).flatten(1, 2) for x in inputs)
        return sdpa(query, key, value).view(inputs[0].shape)

    if group == "layer":
        x, parameters = [draw(batch, length, layer.embed_dim)], list(layer.parameters())
        return {"sdpa layer": passes(plain_layer, x, parameters), "las layer": passes(layer, x, parameters)}
    inputs = [draw(batch, heads, length, dim) for _ in range(3)]
    if group == "last":  # as in decoding
        inputs[0] = inputs[0][..., -1:, :].clone()
        plain = passes(partial(sdpa, is_causal=False), inputs)
        return {"sdpa, one query": plain, "las, one query": passes(las, inputs)}
    if group == "chunk" and (length <= size or length % size):
        return {}
    if group == "chunk":
        plain, ours = passes(plain_chunks, inputs), passes(partial(las, chunk_size=size), inputs)
        return {f"sdpa, chunks of {size}": plain, f"las, chunks of {size}": ours}
    formula = partial(las_attention_reference, decay=layer.rates, smoothing=layer.window)
    found: dict[str, Passes | str] = {
        "sdpa": passes(sdpa, inputs),
        "las": passes(las, inputs),
        "las formula": _too_large(batch * heads * length**2, weight.device) or passes(formula, inputs),
        "las linear": passes(partial(las, backend="linear"), inputs),
    }
    return found | ({"las on flex": _flex(layer, inputs)} if flex else {})


def _flex(layer: LaSAttention, inputs: list[Tensor]) -> Passes | str:
    """The same by FlexAttention: compiled for each length, on CPU without a backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, length = inputs[0].device, inputs[0].shape[2]
    rates = torch.tensor(layer.rates, device=device)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Any:
        def decay(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * torch.exp(-rates[h] * (i - j))

        smoothed = value if layer.window is None else smooth_values(value, layer.window)
        return compiled(query, key, smoothed, score_mod=decay, block_mask=mask)

    if device.type == "cpu":  # refuses inputs that ask for gradients, even where none are computed
        jobs: Passes = {"forward": torch.no_grad()(partial(function, *(x.detach() for x in inputs)))}
    else:
        jobs = passes(function, inputs)
    try:
        jobs["forward"]()
    except Exception as error:  # no compiler, or a shape that it does not take: say so, and measure the others
        return f"does not run here: {first_line(error)[:60]}"
    return jobs


def _too_large(scores: int, device: torch.device) -> str | None:
    """Whether about twelve L×L tensors of the formula, forward and backward, would fill half of the memory."""
    needed = 12 * 4 * scores
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"needs {needed / 2**30:.0f} GiB" if needed > total / 2 else None


def _measure(
    candidates: dict[str, Passes | str], rounds: int, device: torch.device, on_turn: Callable[[int], object]
) -> list[Row]:
    """Time and memory of the candidates of a group, and their ratios to the first one."""
    running = {name: jobs for name, jobs in candidates.items() if not isinstance(jobs, str)}
    rows: list[Row] = [{"name": name, "skipped": None if name in running else why} for name, why in candidates.items()]
    for part in ("forward", "forward_backward"):
        jobs = {name: found[part] for name, found in running.items() if part in found}
        seconds = time_interleaved(jobs, device, rounds, on_turn=on_turn)
        for row in rows:
            job = jobs.get(row["name"])
            row[f"{part}_s"] = seconds.get(row["name"])
            row[f"{part}_peak_bytes"] = None if job is None else peak_memory(job, device)
    for measure, row in product(MEASURES, rows):
        number, first = row[measure], rows[0][measure]
        row[measure.rpartition("_")[0] + "_ratio"] = number / first if number and first else None
    return rows


def _table(title: str, rows: list[Row]) -> Sheet:
    note = "both: forward and backward. ×: relative to the first line of each group; best of all rounds."
    skipped = [f"{row['name']} at L = {row['length']:,}: {row['skipped']}" for row in rows if row["skipped"]]
    shown = [dict(row) for row in rows]
    for row, part in product(shown, ("forward", "forward_backward")):
        if row[f"{part}_s"] is not None:
            row[f"{part}_ms"], row[f"{part}_mib"] = 1e3 * row[f"{part}_s"], row[f"{part}_peak_bytes"] / 2**20
    return make_table(title, shown, COLUMNS, note, *skipped)
