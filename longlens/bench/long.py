"""LaS attention in linear time beside plain attention, where it pays: ``longlens bench attention --long``."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.bench.measure import Row, make_table, passes, time_interleaved, write_result
from longlens.ops.las import las_attention
from longlens.ops.windows import choose_windows, window_bound
from longlens.progress import progress
from longlens.reports.sheet import Sheet

DIM = 32
LENGTHS = (32_768, 65_536, 131_072)
RATES = {"1 of rate 1e-3": (1e-3,), "8 of 2e-4 to 1e-3": tuple(2e-4 + 8e-4 * head / 7 for head in range(8))}
ALONE = (250_000, 500_000, 1_000_000)  # lengths of the linear form by itself
SAMPLED = 256  # queries whose error is computed
COLUMNS = {
    "L": "{length:,}",
    "heads": "{heads}",
    "plain, forward": "{forward_plain_s:,.2f} s",
    "linear, forward": "{forward_linear_s:,.2f} s, {forward_times:.1f}× faster",
    "plain, both": "{forward_backward_plain_s:,.2f} s",
    "linear, both": "{forward_backward_linear_s:,.2f} s, {forward_backward_times:.1f}× faster",
    "error": "{error:.0e} ≤ {bound:.0e}",
    "windows": "{windows}",
}
ALONE_COLUMNS = {
    "L": "{length:,}",
    "forward": "{seconds:,.1f} s",
    "memory of the process": "{mib:,.0f} MiB",
    "a token": "{bytes_a_token:,.0f} bytes",
}


def bench_long(
    lengths: Sequence[int], tolerance: float, rounds: int, device: torch.device, out: Path | None
) -> list[Sheet | str]:
    """Time beside plain attention of the same tensors, errors of some queries beside the bound, and the linear form by
    itself, in processes of its own, up to a million tokens."""
    rows: list[Row] = []
    alone: list[Row] = []
    cells = [(length, heads) for length in lengths for heads in RATES]
    settings = {"tolerance": tolerance, "rounds": rounds, "head_dim": DIM, "device": device.type}
    said: list[str] = []
    with progress("long sequences", len(cells) + len(ALONE)) as done:
        for length, heads in cells:
            note = f"L = {length:,}, {heads}"
            done(len(rows), note)
            rows.append(_measure(length, heads, tolerance, rounds, device, lambda _, note=note: done(len(rows), note)))
            said = write_result(out, device, settings=settings, rows=rows, alone=alone)
        for length in ALONE:
            done(len(rows) + len(alone), f"L = {length:,}, alone")
            alone.append(_measure_alone(length, tolerance))
            said = write_result(out, device, settings=settings, rows=rows, alone=alone)
    drawn = f"q, k, v of N(0, 1), d = {DIM}, float32: scores of size 1; tolerance {tolerance:g}"
    notes = (
        "both: forward and backward. Candidates interleaved, best of all rounds; the choice of the windows is counted.",
        f"error: the largest of {SAMPLED} queries against the formula in float64, relative to max|v|, and its bound.",
    )
    base = alone[0]
    for row in alone[1:]:
        row["bytes_a_token"] = 2**20 * (row["mib"] - base["mib"]) / (row["length"] - base["length"])
    return [
        make_table(f"Linear time beside plain attention: {drawn}", rows, COLUMNS, *notes),
        make_table(
            "Linear time alone: one head of rate 1e-3, forward",
            alone,
            ALONE_COLUMNS,
            f"a token: growth since {base['length']:,} tokens; q, k, v and the output alone are {16 * DIM}.",
        ),
        *said,
    ]


def _measure(
    length: int, heads: str, tolerance: float, rounds: int, device: torch.device, on_turn: Callable[[int], object]
) -> Row:
    rates = RATES[heads]
    inputs = [torch.randn(1, len(rates), length, DIM, device=device) for _ in range(3)]
    linear = partial(las_attention, decay=rates, backend="linear", tolerance=tolerance)
    plain = partial(F.scaled_dot_product_attention, is_causal=True)
    candidates = {"plain": passes(plain, inputs), "linear": passes(linear, inputs)}
    row: Row = {"length": length, "heads": heads, "rates": rates}
    for part in ("forward", "forward_backward"):
        jobs = {name: found[part] for name, found in candidates.items()}
        seconds = time_interleaved(jobs, device, rounds, on_turn=on_turn)
        row |= {f"{part}_{name}_s": value for name, value in seconds.items()}
        row[f"{part}_times"] = seconds["plain"] / seconds["linear"]
    query, key, value = (x.detach() for x in inputs)
    scale = DIM**-0.5
    on_device = torch.tensor(rates, dtype=torch.float64, device=device)
    found = choose_windows(query, key, on_device, None, scale, tolerance).tolist()
    bounds = [
        window_bound(query[:, head], key[:, head], rates[head], window).error
        for head, window in enumerate(found)
        if window < length
    ]
    with torch.no_grad():
        error = _error(query, key, value, linear(query, key, value), rates, min(found))
    exact = [f"{window:,}" if window < length else "exact" for window in found]
    return row | {"windows": " ".join(exact), "bound": max(bounds, default=0.0), "error": error}


def _error(query: Tensor, key: Tensor, value: Tensor, output: Tensor, rates: Sequence[float], first: int) -> float:
    """Relative to max|v|, of some queries, half of them soon after the first window: there it is largest."""
    length = query.shape[2]
    early = torch.randint(min(first, length - 1), min(3 * first + 1, length), (SAMPLED // 2,))
    chosen = torch.cat([early, torch.randint(length, (SAMPLED // 2,))]).to(query.device)
    error = 0.0
    for head, rate in enumerate(rates):
        q, k, v, found = (x[0, head].double() for x in (query[:, :, chosen], key, value, output[:, :, chosen]))
        distance = chosen[:, None] - torch.arange(length, device=query.device)
        scores = (q @ k.mT) * DIM**-0.5 * torch.exp(-rate * distance.clamp_min(0))
        exact = torch.softmax(scores.masked_fill(distance < 0, -torch.inf), dim=-1) @ v
        error = max(error, ((found - exact).abs().max() / v.abs().max()).item())
    return error


def _measure_alone(length: int, tolerance: float) -> Row:
    call = f"import sys; from longlens.bench.long import run_alone; sys.stdout.write(run_alone({length}, {tolerance}))"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_alone(length: int, tolerance: float) -> str:
    """The seconds of a forward pass, and the most memory that this process ever had, as JSON."""
    query, key, value = (torch.randn(1, 1, length, DIM) for _ in range(3))
    start = time.perf_counter()
    with torch.no_grad():
        output = las_attention(query, key, value, decay=[1e-3], backend="linear", tolerance=tolerance)
    seconds = time.perf_counter() - start
    assert output.isfinite().all()
    unit = 1 if sys.platform == "darwin" else 1024
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return json.dumps({"length": length, "seconds": seconds, "mib": mib})
