"""What LaS attention costs beside plain attention: ``longlens bench attention``."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from longlens.bench.measure import check_out, peak_memory, time_interleaved, write_result
from longlens.console import say
from longlens.mixers.las import LaSAttention
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.ops.smoothing import smooth_values

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """What all candidates of a run have in common."""

    heads: int = 8
    batch: int = 1
    window: int = 5
    max_rate: float = 1e-3
    chunk_size: int = 128
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("batch", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        LaSAttention(self.heads, self.heads, max_rate=self.max_rate, window=self.window)  # checks the rest
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be cpu: this torch finds no CUDA device")

    @property
    def rates(self) -> list[float]:
        return decay_rates(self.heads, self.max_rate).tolist()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPES[self.dtype])


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


def _attention(setting: Setting, length: int, head_dim: int, flex: bool) -> list[Candidate]:
    """The operator: plain, LaS, LaS by its formula, in linear time, and on FlexAttention."""
    inputs = tuple(setting.normal(setting.batch, setting.heads, length, head_dim) for _ in range(3))
    options = {"decay": setting.rates, "smoothing": setting.window}
    candidates = [
        Candidate("sdpa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs),
        Candidate("las", lambda q, k, v: las_attention(q, k, v, **options), inputs),
        Candidate(
            "las formula",
            lambda q, k, v: las_attention_reference(q, k, v, **options),
            inputs,
            skipped=_too_large(setting.batch * setting.heads * length**2, setting.device),
        ),
        Candidate("las linear", lambda q, k, v: las_attention(q, k, v, **options, backend="linear"), inputs),
    ]
    return [*candidates, _flex(setting, length, inputs)] if flex else candidates


def _chunk(setting: Setting, length: int, head_dim: int, flex: bool) -> list[Candidate]:
    """The operator in chunks; plain attention gets them as a view, without a copy."""
    size = setting.chunk_size
    if length <= size or length % size != 0:
        return []
    shape = (setting.batch, setting.heads, length, head_dim)
    inputs = tuple(setting.normal(*shape) for _ in range(3))

    def plain(query, key, value):
        views = (x.unflatten(2, (-1, size)).flatten(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(*views, is_causal=True).view(shape)

    def las(query, key, value):
        return las_attention(query, key, value, decay=setting.rates, smoothing=setting.window, chunk_size=size)

    return [Candidate(f"sdpa, chunks of {size}", plain, inputs), Candidate(f"las, chunks of {size}", las, inputs)]


def _layer(setting: Setting, length: int, head_dim: int, flex: bool) -> list[Candidate]:
    """The whole layer with its projections, and the same layer on plain attention."""
    layer = LaSAttention(
        setting.heads * head_dim, setting.heads, max_rate=setting.max_rate, window=setting.window,
        device=setting.device, dtype=DTYPES[setting.dtype],
    )  # fmt: skip

    def plain(x):
        query, key, value = layer.in_proj(x).unflatten(-1, (3, setting.heads, head_dim)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return layer.out_proj(attended.transpose(1, 2).flatten(2))

    inputs, parameters = (setting.normal(setting.batch, length, layer.embed_dim),), tuple(layer.parameters())
    return [Candidate("sdpa layer", plain, inputs, parameters), Candidate("las layer", layer, inputs, parameters)]


def _flex(setting: Setting, length: int, inputs: tuple[Tensor, ...]) -> Candidate:
    """The same by FlexAttention: compiled for each length, on CPU without a backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rates = torch.tensor(setting.rates, device=setting.device)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=setting.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def function(query, key, value):
        def decay(score, b, h, i, j):
            return score * torch.exp(-rates[h] * (i - j))

        return compiled(query, key, smooth_values(value, setting.window), score_mod=decay, block_mask=mask)

    candidate = Candidate("las on flex", function, inputs, has_backward=setting.device != "cpu")
    try:
        candidate.forward()
    except Exception as error:  # no compiler, or a shape that it does not take: say so, and measure the others
        candidate.skipped = f"does not run here: {str(error).splitlines()[0][:60]}"
    return candidate


GROUPS = {"attention": _attention, "chunk": _chunk, "layer": _layer}
"""Each group's first candidate is what the others are compared with."""


def bench_attention(
    setting: Setting,
    *,
    lengths: tuple[int, ...],
    head_dims: tuple[int, ...],
    groups: tuple[str, ...],
    rounds: int,
    flex: bool,
    out: Path | None,
    console: Console,
) -> list[dict]:
    """Measure, print a table for each head width, write ``out``, and return the rows."""
    for name, numbers in (("lengths", lengths), ("head_dims", head_dims), ("rounds", (rounds,))):
        if min(numbers, default=0) < 1:
            raise ValueError(f"{name} must be at least 1, got {', '.join(map(str, numbers)) or 'none'}")
    if not groups:
        raise ValueError(f"groups must name at least one of {', '.join(GROUPS)}")
    check_out(out)
    rows: list[dict] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(head_dims) * len(lengths) * len(groups))
        for head_dim in head_dims:
            table = _table(f"H = {setting.heads}, d = {head_dim}, B = {setting.batch}, {setting.dtype}")
            for length in lengths:
                for group in groups:
                    progress.update(task, description=f"d = {head_dim}, L = {length}, {group}")
                    if not console.is_terminal:
                        console.print(f"measuring d = {head_dim}, L = {length}, {group}")
                    cells = _measure(GROUPS[group](setting, length, head_dim, flex), rounds, setting.device, progress)
                    for cell in cells:
                        rows.append({"group": group, "length": length, "head_dim": head_dim} | cell)
                        table.add_row(*_columns(rows[-1]))
                    progress.advance(task)
                table.add_section()
                if out is not None:  # after each length, so that nothing is lost when it is interrupted
                    write_result(out, setting.device, {"settings": asdict(setting) | {"rounds": rounds}, "rows": rows})
            console.print(table)
    if out is not None:
        say(console, f"written to {out}")
    return rows


def _measure(candidates: list[Candidate], rounds: int, device_name: str, progress: Progress) -> list[dict]:
    """Time and memory of the candidates of a group, and their ratios to the first one."""
    device = torch.device(device_name)
    running = [c for c in candidates if c.skipped is None]
    forward = {c.name: c.forward for c in running}
    both = {c.name: c.forward_backward for c in running if c.has_backward}
    task = progress.add_task("  rounds", total=rounds * (len(forward) + len(both)) + len(running))
    advance = lambda: progress.advance(task)  # noqa: E731
    forward_times = time_interleaved(forward, device, rounds, on_turn=advance)
    both_times = time_interleaved(both, device, rounds, on_turn=advance)
    cells: list[dict] = []
    for candidate in candidates:
        name, cell = candidate.name, {"name": candidate.name, "skipped": candidate.skipped}
        cell["forward_s"] = forward_times[name].best if name in forward else None
        cell["forward_backward_s"] = both_times[name].best if name in both else None
        cell["forward_peak_bytes"] = peak_memory(forward[name], device) if name in forward else None
        cell["forward_backward_peak_bytes"] = peak_memory(both[name], device) if name in both else None
        advance()
        for field in ("forward_s", "forward_peak_bytes", "forward_backward_s", "forward_backward_peak_bytes"):
            first = (cells or [cell])[0][field]
            cell[field.rpartition("_")[0] + "_ratio"] = cell[field] / first if cell[field] else None
        cells.append(cell)
    progress.remove_task(task)
    return cells


def _too_large(scores: int, device: str) -> str | None:
    """Whether about twelve L×L tensors of the formula, forward and backward, would fill half of the memory."""
    needed = 12 * 4 * scores
    if device == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"needs {needed / 2**30:.0f} GiB" if needed > total / 2 else None


def _table(title: str) -> Table:
    table = Table(title=title, caption="× : relative to the first line of each group; best of the interleaved rounds")
    table.add_column("L", justify="right")
    table.add_column("")
    for part in ("forward", "forward + backward"):
        for name in (f"{part} ms", "×", "MiB", "×"):
            table.add_column(name, justify="right")
    return table


def _columns(row: dict) -> list[str]:
    if row["skipped"]:
        return [str(row["length"]), row["name"], row["skipped"], *[""] * 7]

    def show(number: float | None, form: str, unit: float = 1.0) -> str:
        return "–" if number is None else format(number * unit, form)

    columns = [str(row["length"]), row["name"]]
    for part in ("forward", "forward_backward"):
        columns += [show(row[f"{part}_s"], ".2f", 1e3), show(row[f"{part}_ratio"], ".2f")]
        columns += [show(row[f"{part}_peak_bytes"], ".1f", 2.0**-20), show(row[f"{part}_peak_ratio"], ".2f")]
    return columns
