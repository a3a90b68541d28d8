"""LongLens in a few minutes: LaS attention equals its formula at the cost of attention, and a claim of the paper."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.rule import Rule
from torch.nn.functional import scaled_dot_product_attention

from longlens import api
from longlens.bench.measure import passes, time_interleaved
from longlens.cli import sentence, show
from longlens.data.generate import cores
from longlens.files import check_out, write_json
from longlens.ops.decay import decay_rates
from longlens.ops.las import las_attention
from longlens.ops.reference import las_attention_reference
from longlens.paper.figure_eld import draw_eld
from longlens.paper.page import write_page
from longlens.reports.sheet import Column, Sheet

# Table 7 of the paper, small: Select with 48 numbers instead of 512, and B·L as there.
TASK, MIXERS, SEEDS = "atomic-select", ("transformer", "las"), (0, 1, 2)
SMALL: dict[str, Any] = {
    "task.max_length": 48,
    "task.marked": 4,
    "task.sizes": (16000, 500, 2000),
    "mixer.max_rate": 0.01,
    "lr": 3e-3,
    "steps": 600,
    "evaluate_every": 200,
}
LENGTH, ROUNDS = 2048, 5  # of the comparison of times
PAPER = {"transformer": 0.971, "las": 0.783}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain attention": {},
    "L-attention": {"decay": True},
    "S-attention": {"smoothing": 5},
    "LaS attention": {"decay": True, "smoothing": 5},
    "LaS-chunk, 128": {"decay": True, "smoothing": 5, "chunk_size": 128},
    "LaS, bidirectional": {"decay": True, "smoothing": 5, "is_causal": False},
}


def demo(*, out: Path = Path("demo"), runs: Path = Path("runs")) -> list[Any]:
    """Show that LaS attention equals its formula and costs what plain attention costs, and try a claim of the paper:
    what is neither local nor smooth is harder for LaS (Table 7).

    Args:
        out: Folder for the figures and the picture.
        runs: Folder for the runs; what is finished there is not run again.
    """
    check_out(out / "demo.json")
    show([Rule("1. LaS attention equals its formula, at the cost of plain attention"), _compare_with_formula()])
    show(sentence(_compare_cost()))
    draw_eld(out=out / "eld.png")
    show(f"how scores decay with distance: {out / 'eld.png'}")
    show(Rule("2. The paper's Table 7: is LaS worse where nothing is local or smooth?"))
    show(sentence("The task: among 52 numbers, 4 are marked at random places; repeat them in order."))
    jobs = min(2, cores())
    how = {"mixers": MIXERS, "seeds": SEEDS, **SMALL, "runs": runs, "jobs": jobs, "threads": 1}
    flags = " \\\n    ".join(f"--{name.replace('_', '-')} {_flag(value)}" for name, value in how.items())
    show(f"longlens compare {TASK} \\\n    {flags}")
    comparison = api.compare(TASK, MIXERS, seeds=SEEDS, runs=runs, jobs=jobs, threads=1, **SMALL)
    write_json(out / "demo.json", comparison.rows)
    failed = [f"{outcome.config.mixer.name} failed: {outcome.error}" for outcome in comparison.failed]
    return [
        comparison.table,
        *map(sentence, [*failed, comparison.verdict, _beside_the_paper(comparison)]),
        f"written to {out / 'demo.json'}",
        write_page(out / "index.html", [outcome.folder for outcome in comparison.outcomes]),
        "all claims of the paper: longlens reproduce --list",
    ]


def _flag(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _beside_the_paper(comparison: api.Comparison) -> str:
    """What was seen, beside what the paper says."""
    if comparison.failed:
        return "Some runs failed, so that this says nothing about the paper's claim."
    scores = {name: [row["test"] for row in comparison.rows if row["mixer"] == name] for name in MIXERS}
    plain, ours = (sum(scores[name]) / len(scores[name]) for name in MIXERS)
    paper = f"The paper has R² {PAPER['transformer']} with plain attention and {PAPER['las']} with LaS, of 512 numbers"
    return f"{paper}; here it is {plain:.3f} and {ours:.3f}. LaS is made for data that are local and smooth."


def _compare_cost() -> str:
    """The best of some rounds in turn, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 8, LENGTH, 32, generator=generator) for _ in range(3)]
    rates = decay_rates(8, 1e-3)
    kinds = {
        "plain": partial(scaled_dot_product_attention, is_causal=True),
        "LaS": partial(las_attention, decay=rates, smoothing=5),
    }
    jobs = {name: passes(attend, inputs)["forward_backward"] for name, attend in kinds.items()}
    plain, ours = (1e3 * seconds for seconds in time_interleaved(jobs, torch.device("cpu"), ROUNDS).values())
    return f"{LENGTH:,} tokens, 8 heads, forward and backward: plain attention {plain:.0f} ms, LaS {ours:.0f} ms."


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
