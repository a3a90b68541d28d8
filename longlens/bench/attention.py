"""What LaS attention costs beside plain attention: ``longlens bench attention``."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.bench.measure import check_given, peak_memory, time_interleaved, write_result
from longlens.bench.split import SplitSheet
from longlens.files import check_out
from longlens.mixers.las import LaSAttention
from longlens.ops.checks import AttentionOptions
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.ops.smoothing import smooth_values
from longlens.options import NonNegative, Odd, Size
from longlens.progress import progress
from longlens.reports.sheet import Column, Sheet
from longlens.training.distributed import choose_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEASURES = {  # what is measured: the name of its column, the factor to its unit, and how it is shown
    "forward_s": ("forward", 1e3, "{:,.2f} ms"),
    "forward_backward_s": ("both", 1e3, "{:,.2f} ms"),
    "forward_peak_bytes": ("memory, forward", 2.0**-20, "{:,.1f} MiB"),
    "forward_backward_peak_bytes": ("memory, both", 2.0**-20, "{:,.1f} MiB"),
}


def bench_attention(
    *,
    lengths: tuple[Size, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    head_dims: tuple[Size, ...] = (32, 64),
    groups: tuple[Literal["attention", "chunk", "layer"], ...] = ("attention", "chunk", "layer"),
    heads: Size = 8,
    batch: Size = 1,
    window: Odd = 5,
    max_rate: NonNegative = 1e-3,
    chunk_size: Size = 128,
    rounds: Size = 5,
    flex: bool = True,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    out: Path | None = None,
) -> list[Sheet | str]:
    """Time and peak memory of LaS attention beside torch's plain attention, the formula and FlexAttention.

    Args:
        lengths: Sequence lengths.
        head_dims: Widths of a head.
        groups: Comparisons to make: the operator, the operator in chunks, the whole layer.
        heads: Number of heads.
        batch: Sequences of a batch.
        window: Odd window of the smoothing.
        max_rate: Largest decay rate.
        chunk_size: Length of a chunk.
        rounds: Interleaved rounds; the best of each candidate counts.
        flex: Include FlexAttention, which is compiled for each length.
        device: Device to measure on; auto is a GPU if there is one.
        dtype: Data type of the inputs.
        out: JSON file to write the figures and the environment to.
    """
    check_given(lengths=lengths, head_dims=head_dims, groups=groups)
    where = choose_device(device)
    check_out(out)
    settings = {"heads": heads, "batch": batch, "window": window, "max_rate": max_rate, "chunk_size": chunk_size}
    settings |= {"device": where.type, "dtype": dtype, "rounds": rounds}
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    turns = count()
    with progress("attention", len(head_dims) * len(lengths) * len(groups)) as done:
        for head_dim in head_dims:
            options = {"max_rate": max_rate, "window": window, "device": where, "dtype": DTYPES[dtype]}
            layer = LaSAttention(heads * head_dim, heads, **options)
            for length in lengths:
                for group in groups:
                    on_turn = partial(done, next(turns), f"d = {head_dim}, L = {length:,}, {group}")
                    on_turn()
                    measured = _measure(
                        _candidates(group, layer, batch, length, chunk_size, flex), rounds, where, on_turn
                    )
                    rows += [{"group": group, "length": length, "head_dim": head_dim} | cell for cell in measured]
                # After each length, so that nothing is lost when it is interrupted.
                said = write_result(out, where, {"settings": settings, "rows": rows})
    about = f"batch {batch}, {dtype}"
    tables = [_table(f"{heads} heads of {d}, {about}", [r for r in rows if r["head_dim"] == d]) for d in head_dims]
    return [*tables, *said]


@dataclass
class Candidate:
    """A function of tensors to measure, or the reason why it is not."""

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()
    has_backward: bool = True
    skipped: str | None = None

    def forward(self) -> None:
        with torch.no_grad():
            self.function(*self.inputs)

    def forward_backward(self) -> None:
        leaves = [x.requires_grad_() for x in (*self.inputs, *self.parameters)]
        output = self.function(*self.inputs)
        torch.autograd.grad(output, leaves, torch.ones_like(output))
        for x in self.inputs:
            x.requires_grad_(False)


def _candidates(
    group: str, layer: LaSAttention, batch: int, length: int, chunk_size: int, flex: bool
) -> list[Candidate]:
    """What a group compares, for the sizes of a layer; the first is what the others are compared with."""
    weight, heads = layer.in_proj.weight, layer.num_heads
    if group == "layer":
        return _layer(layer, torch.randn(batch, length, layer.embed_dim, device=weight.device, dtype=weight.dtype))
    shape = (batch, heads, length, layer.embed_dim // heads)
    inputs = tuple(torch.randn(shape, device=weight.device, dtype=weight.dtype) for _ in range(3))
    if group == "chunk":
        return _chunk(layer, inputs, chunk_size)
    options: AttentionOptions = {"decay": layer.rates, "smoothing": layer.window}
    skipped = _too_large(batch * heads * length**2, weight.device)
    formula = Candidate("las formula", partial(las_attention_reference, **options), inputs, skipped=skipped)
    return [
        Candidate("sdpa", partial(F.scaled_dot_product_attention, is_causal=True), inputs),
        Candidate("las", partial(las_attention, **options), inputs),
        formula,
        Candidate("las linear", partial(las_attention, **options, backend="linear"), inputs),
        *([_flex(layer, inputs)] if flex else []),
    ]


def _chunk(layer: LaSAttention, inputs: tuple[Tensor, ...], size: int) -> list[Candidate]:
    """The operator in chunks; plain attention gets them as a view, without a copy."""
    shape = inputs[0].shape
    if shape[2] <= size or shape[2] % size != 0:
        return []

    def plain(*inputs: Tensor) -> Tensor:
        query, key, value = (x.unflatten(2, (-1, size)).flatten(1, 2) for x in inputs)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).view(shape)

    las = partial(las_attention, decay=layer.rates, smoothing=layer.window, chunk_size=size)
    return [Candidate(f"sdpa, chunks of {size}", plain, inputs), Candidate(f"las, chunks of {size}", las, inputs)]


def _layer(layer: LaSAttention, x: Tensor) -> list[Candidate]:
    """The whole layer with its projections, and the same layer on plain attention."""

    def plain(x: Tensor) -> Tensor:
        query, key, value = layer.in_proj(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return layer.out_proj(attended.transpose(1, 2).flatten(2))

    parameters = tuple(layer.parameters())
    return [Candidate("sdpa layer", plain, (x,), parameters), Candidate("las layer", layer, (x,), parameters)]


def _flex(layer: LaSAttention, inputs: tuple[Tensor, ...]) -> Candidate:
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

    candidate = Candidate("las on flex", function, inputs, has_backward=device.type != "cpu")
    try:
        candidate.forward()
    except Exception as error:  # no compiler, or a shape that it does not take: say so, and measure the others
        candidate.skipped = f"does not run here: {str(error).splitlines()[0][:60]}"
    return candidate


def _measure(
    candidates: list[Candidate], rounds: int, device: torch.device, on_turn: Callable[[], object]
) -> list[dict[str, Any]]:
    """Time and memory of the candidates of a group, and their ratios to the first one."""
    running = [candidate for candidate in candidates if candidate.skipped is None]
    cells: list[dict[str, Any]] = [{"name": candidate.name, "skipped": candidate.skipped} for candidate in candidates]
    for part, jobs in (
        ("forward", {c.name: c.forward for c in running}),
        ("forward_backward", {c.name: c.forward_backward for c in running if c.has_backward}),
    ):
        times = time_interleaved(jobs, device, rounds, on_turn=on_turn)
        for cell in cells:
            job = jobs.get(cell["name"])
            cell[f"{part}_s"] = None if job is None else times[cell["name"]].best
            cell[f"{part}_peak_bytes"] = None if job is None else peak_memory(job, device)
            on_turn()
    for measure, cell in product(MEASURES, cells):
        number, first = cell[measure], cells[0][measure]
        cell[measure.rpartition("_")[0] + "_ratio"] = number / first if number and first else None
    return cells


def _too_large(scores: int, device: torch.device) -> str | None:
    """Whether about twelve L×L tensors of the formula, forward and backward, would fill half of the memory."""
    needed = 12 * 4 * scores
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"needs {needed / 2**30:.0f} GiB" if needed > total / 2 else None


def _table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    columns = [Column(name, 1, number=True) for name, _, _ in MEASURES.values()]
    table = SplitSheet(title, [Column("L", number=True), Column("attention"), *columns])
    for row in rows:
        table.rows.append([f"{row['length']:,}", row["name"], *(_with_ratio(row, measure) for measure in MEASURES)])
    table.notes.append("both: forward and backward. ×: relative to the first line of each group; best of all rounds.")
    table.notes += [f"{row['name']} at L = {row['length']:,}: {row['skipped']}" for row in rows if row["skipped"]]
    return table


def _with_ratio(row: dict[str, Any], measure: str) -> str:
    (_, factor, form), number = MEASURES[measure], row[measure]
    if number is None:
        return "–"
    ratio = row[measure.rpartition("_")[0] + "_ratio"]
    return form.format(number * factor) + ("" if ratio is None else f" ×{ratio:.2f}")
