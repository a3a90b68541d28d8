"""What LaS attention costs beside plain attention: ``longlens bench attention``."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from longlens.bench.measure import environment, peak_memory, time_interleaved
from longlens.mixers.las import LaSAttention
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.ops.smoothing import smooth_values

GROUPS = ("attention", "chunk", "layer")


class Candidate(NamedTuple):
    name: str
    group: str  # its first member is what the others are compared with
    run: Callable[..., Tensor]
    has_backward: bool = True
    skipped: str | None = None  # why, if it cannot run


def bench_attention(
    *,
    lengths: tuple[int, ...],
    head_dims: tuple[int, ...],
    groups: tuple[str, ...],
    heads: int,
    batch: int,
    window: int,
    max_rate: float,
    chunk_size: int,
    rounds: int,
    flex: bool,
    device: str,
    dtype: str,
    out: Path | None,
    console: Console,
) -> list[dict]:
    """Measure, print a table for each head width, write ``out``, and return the rows."""
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise ValueError(f"groups must be of {', '.join(GROUPS)}, got {', '.join(unknown)}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    for name, numbers in (
        ("lengths", lengths),
        ("head_dims", head_dims),
        ("batch", (batch,)),
        ("chunk_size", (chunk_size,)),
    ):
        if min(numbers, default=0) < 1:
            raise ValueError(f"{name} must be at least 1, got {min(numbers, default='none')}")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"out must be a file in a folder that exists, got {out}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu: this torch finds no CUDA device")
    place = torch.device(device)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    rows: list[dict] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("bench attention", total=None)
        for head_dim in head_dims:
            table = _table(f"H = {heads}, d = {head_dim}, B = {batch}, {dtype}, window {window}, max_rate {max_rate}")
            for length in lengths:
                progress.update(task, description=f"d = {head_dim}, L = {length}")
                candidates = _candidates(
                    length, head_dim, heads, batch, window, max_rate, chunk_size, flex, place, kind
                )
                cells = _measure([c for c in candidates if c.group in groups], rounds, place, progress)
                for cell in cells:
                    cell |= {"length": length, "head_dim": head_dim}
                    table.add_row(*_columns(cell))
                table.add_section()
                rows += cells
            console.print(table)
    if out is not None:
        settings = {"heads": heads, "batch": batch, "window": window, "max_rate": max_rate, "chunk_size": chunk_size}
        result = {"environment": environment(place), "settings": settings | {"dtype": dtype, "rounds": rounds}}
        out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
        console.print(f"written to {out}")
    return rows


def _candidates(length, head_dim, heads, batch, window, max_rate, chunk_size, flex, device, dtype) -> list[Candidate]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, length, head_dim)
    query, key, value, grad = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
    rates = decay_rates(heads, max_rate).tolist()
    inputs = tuple(x.requires_grad_() for x in (query, key, value))

    def job(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda backward: _forward(lambda: function(*inputs), grad, inputs, backward)

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def las(q, k, v):
        return las_attention(q, k, v, decay=rates, smoothing=window)

    def formula(q, k, v):
        return las_attention_reference(q, k, v, decay=rates, smoothing=window)

    def sdpa_chunk(q, k, v):
        split = [x.unflatten(2, (-1, chunk_size)).flatten(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*split, is_causal=True).view(shape)

    def las_chunk(q, k, v):
        return las_attention(q, k, v, decay=rates, smoothing=window, chunk_size=chunk_size)

    candidates = [
        Candidate("sdpa", "attention", job(sdpa)),
        Candidate("las", "attention", job(las)),
        Candidate("las formula", "attention", job(formula), skipped=_too_large(batch * heads * length**2, device)),
    ]
    if flex:
        function, has_backward = _flex(torch.tensor(rates, device=device), window, length, device)
        candidates.append(Candidate("las on flex", "attention", job(function), has_backward))
    if length > chunk_size and length % chunk_size == 0:
        candidates.append(Candidate(f"sdpa, chunks of {chunk_size}", "chunk", job(sdpa_chunk)))
        candidates.append(Candidate(f"las, chunks of {chunk_size}", "chunk", job(las_chunk)))

    width = heads * head_dim
    las_layer = LaSAttention(width, heads, max_rate=max_rate, window=window, device=device, dtype=dtype)
    x = torch.randn(batch, length, width, generator=generator, device=device, dtype=dtype, requires_grad=True)
    parameters = (x, *las_layer.parameters())

    def sdpa_layer(x):
        q, k, v = las_layer.in_proj(x).unflatten(-1, (3, heads, head_dim)).permute(2, 0, 3, 1, 4)
        return las_layer.out_proj(sdpa(q, k, v).transpose(1, 2).flatten(2))

    for name, layer in (("sdpa layer", sdpa_layer), ("las layer", las_layer)):
        run = lambda backward, layer=layer: _forward(lambda: layer(x), torch.ones_like(x), parameters, backward)  # noqa: E731
        candidates.append(Candidate(name, "layer", run))
    return candidates


def _forward(function: Callable[[], Tensor], grad: Tensor, inputs: tuple[Tensor, ...], backward: bool) -> Tensor:
    if not backward:
        with torch.no_grad():
            return function()
    output = function()
    torch.autograd.grad(output, inputs, grad)
    return output


def _flex(rates: Tensor, window: int, length: int, device: torch.device):
    """The same by FlexAttention: compiled for each length, and on CPU without a backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device.type)

    def function(q, k, v):
        def decay(score, b, h, i, j):
            return score * torch.exp(-rates[h] * (i - j))

        return compiled(q, k, smooth_values(v, window), score_mod=decay, block_mask=mask)

    return function, device.type != "cpu"


def _too_large(scores: int, device: torch.device) -> str | None:
    """Whether about twelve L×L tensors of the formula, forward and backward, fit into half of the memory."""
    needed = 12 * 4 * scores
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"needs {needed / 2**30:.0f} GiB" if needed > total / 2 else None


def _measure(candidates: list[Candidate], rounds: int, device: torch.device, progress: Progress) -> list[dict]:
    running = [c for c in candidates if c.skipped is None]
    forward = {c.name: (lambda c=c: c.run(False)) for c in running}
    both = {c.name: (lambda c=c: c.run(True)) for c in running if c.has_backward}
    task = progress.add_task("  rounds", total=rounds * (len(forward) + len(both)) + len(running))
    results = []
    for jobs in (forward, both):
        results.append(time_interleaved(jobs, device, rounds, on_turn=lambda: progress.advance(task)))
    cells = []
    for candidate in candidates:
        name = candidate.name
        cell: dict = {"name": name, "group": candidate.group, "skipped": candidate.skipped}
        cell["forward_s"] = results[0][name].best if name in forward else None
        cell["forward_backward_s"] = results[1][name].best if name in both else None
        if candidate.skipped is None:
            cell["peak_bytes"] = peak_memory((both if candidate.has_backward else forward)[name], device)
            progress.advance(task)
        else:
            cell["peak_bytes"] = None
        cells.append(cell)
    progress.remove_task(task)
    for cell in cells:  # relative to the first of the group
        base = next(c for c in cells if c["group"] == cell["group"])
        for field in ("forward_s", "forward_backward_s"):
            cell[field.removesuffix("_s") + "_ratio"] = cell[field] / base[field] if cell[field] else None
        comparable = cell["peak_bytes"] and cell["forward_backward_s"]
        cell["peak_ratio"] = cell["peak_bytes"] / base["peak_bytes"] if comparable else None
    return cells


def _table(title: str) -> Table:
    table = Table(title=title, caption="× : relative to the first line of each group; best of the interleaved rounds")
    table.add_column("L", justify="right")
    table.add_column("")
    for name in ("forward ms", "×", "forward + backward ms", "×", "peak MiB", "×"):
        table.add_column(name, justify="right")
    return table


def _columns(cell: dict) -> list[str]:
    if cell["skipped"]:
        return [str(cell["length"]), cell["name"], cell["skipped"], *[""] * 5]

    def show(number: float | None, form: str, unit: float = 1.0) -> str:
        return "–" if number is None else format(number * unit, form)

    return [
        str(cell["length"]),
        cell["name"],
        show(cell["forward_s"], ".2f", 1e3),
        show(cell["forward_ratio"], ".2f"),
        show(cell["forward_backward_s"], ".2f", 1e3),
        show(cell["forward_backward_ratio"], ".2f"),
        show(cell["peak_bytes"], ".1f", 2.0**-20),
        show(cell["peak_ratio"], ".2f"),
    ]
