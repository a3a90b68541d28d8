"""The last columns of Table 2: speed and memory of every layer, on one machine.

The paper's measure is a Transformer that stores its L×L matrix. That of torch no longer does: both are measured.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longlens.paper.index import Computed, Found

LENGTH = 4096  # that of the paper's columns
WIDTH, HEADS, ROUNDS = 128, 4, 5
PAPER = {"reformer": (0.8, 0.24), "linformer": (5.5, 0.10), "bigbird": (1.1, 0.30), "performer": (5.7, 0.11)}
PAPER |= {"luna": (4.9, 0.16), "mega": (2.9, 0.31), "mega-chunk": (5.5, 0.13)}
NOISE = 1.1  # a layer is faster if it is so by this factor


def _compute(results: Path) -> tuple[list[Any], Found]:
    from longlens.bench.layers import bench_layers  # torch
    from longlens.files import read_json

    with TemporaryDirectory() as folder:
        out = Path(folder) / "layers.json"
        printed = bench_layers(lengths=(LENGTH,), width=WIDTH, heads=HEADS, rounds=ROUNDS, out=out)[:-1]
        rows = {row["mixer"]: row for row in read_json(out)["rows"]}
    plain, (slower, larger) = rows["transformer"], _stored_beside_fused()
    faster = {name: plain["seconds"] / row["seconds"] for name, row in rows.items()}
    smaller = {name: row["bytes"] / plain["bytes"] for name, row in rows.items()}
    figures = [
        f"{name} ×{slower * faster[name]:.1f} as fast (paper ×{speed:g}), ×{smaller[name] / larger:.2f} of the memory "
        f"(paper ×{memory:g})"
        for name, (speed, memory) in PAPER.items()
    ]
    fails = [name for name in PAPER if smaller[name] >= larger]
    fails += [name for name, (speed, _) in PAPER.items() if speed > 1 and slower * faster[name] < NOISE]
    more = [name for name, (speed, _) in PAPER.items() if speed < 1 and slower * faster[name] > NOISE]
    still = [name for name in PAPER if faster[name] > NOISE and smaller[name] < 1]
    sentences = [
        f"Forward and backward of one layer at {LENGTH:,} tokens, beside an attention that stores its L×L matrix:",
        f"{'; '.join(figures)}.",
        f"Torch's attention stores no such matrix: it is ×{slower:.1f} as fast, with ×{1 / larger:.3f} of the memory. "
        f"Of these layers, {', '.join(still) or 'none'} {'are' if len(still) > 1 else 'is'} both faster and smaller "
        f"than it. Beside it LaS is ×{faster['las']:.2f} as fast, and LaS-chunk ×{faster['las-chunk']:.1f}.",
    ]
    because = f"not so {', '.join(dict.fromkeys(fails))}" if fails else "beside an attention that stores its L×L matrix"
    because += f", where {' and '.join(more)} is faster, too" if more else ""
    because += f"; beside torch's, which does not, {len(still)} of {len(PAPER)} are both"
    return printed, Found("does not hold" if fails else "holds", because, sentences)


def _stored_beside_fused() -> tuple[float, float]:
    """How many times the time and the memory of torch's attention one needs that stores its L×L matrix."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from longlens.bench.layers import forward_backward
    from longlens.bench.measure import peak_memory, time_interleaved
    from longlens.mixers.registry import create_mixer

    device = torch.device("cpu")
    torch.manual_seed(0)
    fused = forward_backward(create_mixer("transformer", WIDTH, heads=HEADS), (1, LENGTH, WIDTH), device)

    def stored() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            fused()

    jobs = {"fused": fused, "stored": stored}
    seconds = time_interleaved(jobs, device, ROUNDS, long=10.0)
    memory = {name: peak_memory(job, device) for name, job in jobs.items()}
    return seconds["stored"] / seconds["fused"], memory["stored"] / memory["fused"]


STUDY = Computed(
    name="table2-cost",
    title="Speed and memory",
    place="Table 2, last columns",
    claim="Efficient layers need less memory than attention at 4,096 tokens, and all but Reformer are faster.",
    compute=_compute,
)
