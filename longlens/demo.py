"""LongLens in a few minutes: LaS attention equals its formula, and three models learn ListOps at the same budget."""

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from longlens.console import say
from longlens.flags import Many
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.reports.eld import draw_eld
from longlens.training.commands import compare_mixers
from longlens.training.config import resolve
from longlens.training.runtime import Runtime

TASK, MIXERS = "listops", ("transformer", "las", "las-chunk")

VARIANTS = {
    "plain attention": {},
    "L-attention": {"decay": True},
    "S-attention": {"smoothing": 5},
    "LaS attention": {"decay": True, "smoothing": 5},
    "LaS-chunk, 128": {"decay": True, "smoothing": 5, "chunk_size": 128},
    "LaS, bidirectional": {"decay": True, "smoothing": 5, "is_causal": False},
}


def run_demo(out: Path, runs: Path, console: Console) -> None:
    """Print the comparison with the formula and the one of the models; leave a picture and the run folders."""
    out.mkdir(parents=True, exist_ok=True)
    console.rule("1. LaS attention equals its formula")
    console.print(_compare())
    draw_eld(out / "eld.png", heads=8, max_rate=1e-3, length=4096)
    say(console, f"how scores decay with distance: {out / 'eld.png'}")
    console.rule("2. Three models learn ListOps, at the same budget")
    say(console, f"longlens compare {TASK} --mixers {' '.join(MIXERS)} --runs {runs}")
    configs = [resolve("mini", TASK, mixer) for mixer in MIXERS]
    compare_mixers(configs, Runtime(runs=runs), Many(out=out / "demo.json"), console)
    test = configs[0].create_task().split("test")
    answers = np.bincount(test.take(np.arange(len(test))).targets)
    say(console, f"the commonest answer alone is right in {100 * answers.max() / len(test):.1f} % of the cases")


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
