"""The last columns of Table 2: speed and memory of every layer, on one machine."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longlens.paper.index import Computed, Found

LENGTH = 4096  # that of the paper's columns
PAPER = {"reformer": (0.8, 0.24), "linformer": (5.5, 0.10), "bigbird": (1.1, 0.30), "performer": (5.7, 0.11)}
PAPER |= {"luna": (4.9, 0.16), "mega": (2.9, 0.31), "mega-chunk": (5.5, 0.13)}


def _compute(results: Path) -> tuple[list[Any], Found]:
    from longlens.bench.layers import bench_layers  # torch
    from longlens.files import read_json

    with TemporaryDirectory() as folder:
        out = Path(folder) / "layers.json"
        printed = bench_layers(lengths=(LENGTH,), out=out)[:-1]  # without the line that says where it is
        rows = {row["mixer"]: row for row in read_json(out)["rows"]}
    plain = rows["transformer"]
    faster = {name: plain["seconds"] / rows[name]["seconds"] for name in PAPER}
    smaller = {name: rows[name]["bytes"] / plain["bytes"] for name in PAPER}
    agree = [name for name, (speed, memory) in PAPER.items() if (faster[name] > 1) == (speed > 1) and smaller[name] < 1]
    figures = [
        f"{name} ×{faster[name]:.1f} as fast (paper ×{speed:g}), ×{smaller[name]:.2f} of the memory (paper ×{memory:g})"
        for name, (speed, memory) in PAPER.items()
    ]
    sentences = [
        f"Forward and backward of one layer at {LENGTH:,} tokens, beside torch's, which stores no L×L matrix:",
        f"{'; '.join(figures)}.",
        f"LaS is ×{plain['seconds'] / rows['las']['seconds']:.2f} as fast as attention, "
        f"and LaS-chunk ×{plain['seconds'] / rows['las-chunk']['seconds']:.1f}.",
    ]
    because = f"{len(agree)} of {len(PAPER)} agree, beside an attention that stores no L×L matrix"
    return printed, Found("holds" if len(agree) == len(PAPER) else "does not hold", because, sentences)


STUDY = Computed(
    name="table2-cost",
    title="Speed and memory",
    place="Table 2, last columns",
    claim="Layers of less than quadratic cost are faster than attention at 4,096 tokens and need less memory.",
    compute=_compute,
)
