"""LongLens in a few minutes: LaS attention equals its formula, and three models learn ListOps at the same budget."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.rule import Rule

from longlens import api
from longlens.cli import sentence, show
from longlens.files import check_out, write_json
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.paper.figure_eld import draw_eld
from longlens.reports.sheet import Column, Sheet

TASK, MIXERS = "listops", ("transformer", "las", "las-chunk")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain attention": {},
    "L-attention": {"decay": True},
    "S-attention": {"smoothing": 5},
    "LaS attention": {"decay": True, "smoothing": 5},
    "LaS-chunk, 128": {"decay": True, "smoothing": 5, "chunk_size": 128},
    "LaS, bidirectional": {"decay": True, "smoothing": 5, "is_causal": False},
}


def demo(*, out: Path = Path("results"), runs: Path = Path("runs")) -> list[Any]:
    """Show that LaS attention equals its formula, and train LaS, LaS-chunk and a Transformer on ListOps at the same
    budget.

    Args:
        out: Folder for the figures and the picture.
        runs: Folder for the runs; what is finished there is not run again.
    """
    check_out(out / "demo.json")
    show([Rule("1. LaS attention equals its formula"), _compare_with_formula()])
    draw_eld(out=out / "eld.png")
    show(
        [
            f"how scores decay with distance: {out / 'eld.png'}",
            Rule("2. Three models learn ListOps, at the same budget"),
        ]
    )
    show(f"longlens compare {TASK} --mixers {' '.join(MIXERS)} --runs {runs}")
    comparison = api.compare(TASK, MIXERS, runs=runs)
    write_json(out / "demo.json", comparison.rows)
    test = comparison.outcomes[0].config.task.split("test")
    answers = np.bincount(test.take(np.arange(len(test))).targets)
    failed = [f"{outcome.config.mixer.name} failed: {outcome.error}" for outcome in comparison.failed]
    commonest = f"the commonest answer alone is right in {100 * answers.max() / len(test):.1f} % of the cases"
    said = map(sentence, [*failed, comparison.verdict, commonest])
    return [comparison.table, *said, f"written to {out / 'demo.json'}"]


def _compare_with_formula() -> Sheet:
    """The largest difference between the fast path and Eq. 4 with its L×L matrices, outputs and gradients."""
    columns = [Column("variant"), Column("output", 0, True), Column("gradients", 0, True)]
    sheet = Sheet("largest difference from Eq. 4, float64, L = 500, 8 heads", columns)
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
        sheet.rows.append([name, f"{(outputs[0] - outputs[1]).abs().max().item():.0e}", f"{difference:.0e}"])
    return sheet
