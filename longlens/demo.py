"""LaS attention in two minutes: it equals its formula, what it costs, and what it looks like."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from longlens.bench.attention import Setting, bench_attention
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.reports.eld import draw_eld

VARIANTS = {
    "plain attention": {},
    "L-attention": {"decay": True},
    "S-attention": {"smoothing": 5},
    "LaS attention": {"decay": True, "smoothing": 5},
    "LaS-chunk, 128": {"decay": True, "smoothing": 5, "chunk_size": 128},
    "LaS, bidirectional": {"decay": True, "smoothing": 5, "is_causal": False},
}


def run_demo(out: Path, console: Console) -> None:
    """Print the comparison with the formula and the cost, and write the figures and the picture to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    console.rule("1. LaS attention equals its formula")
    console.print(_compare())
    console.rule("2. What it costs beside torch's plain attention")
    bench_attention(
        Setting(), lengths=(1024, 4096), head_dims=(32,), groups=("attention", "chunk", "layer"), rounds=5, flex=False,
        out=out / "bench_attention.json", console=console,
    )  # fmt: skip
    console.rule("3. What it looks like")
    draw_eld(out / "eld.png", heads=8, max_rate=1e-3, length=4096)
    console.print(f"the decay of scores with distance: {out / 'eld.png'}", markup=False)


def _compare() -> Table:
    """The largest difference between the fast path and Eq. 4 with its L×L matrices, outputs and gradients."""
    table = Table("", "output", "gradients", title="largest difference from Eq. 4, float64, L = 500, 8 heads")
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, 8, 500, 32, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    for name, options in VARIANTS.items():
        if options.get("decay"):
            options = options | {"decay": decay_rates(8, 1e-3)}
        outputs = [function(*inputs, **options) for function in (las_attention, las_attention_reference)]
        grads = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
        difference = max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))
        table.add_row(name, f"{(outputs[0] - outputs[1]).abs().max().item():.0e}", f"{difference:.0e}")
    return table
