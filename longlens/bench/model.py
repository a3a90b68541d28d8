"""What training costs: ``longlens bench model``.

Our models beside transformers' GPT-2 of the same size, a step on the same batch each in turn; and the share of a run's
time that is not spent in forward, backward and optimizer.
"""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from longlens.bench.measure import Job, check_counts, check_out, time_interleaved, write_result
from longlens.console import say
from longlens.models.heads import loss_sum
from longlens.models.model import count_parameters, create_model
from longlens.progress import progress
from longlens.tasks.base import Spec
from longlens.training.config import TrainingConfig, resolve
from longlens.training.loop import train
from longlens.training.optimizer import make_optimizer
from longlens.training.runtime import Runtime


@dataclass(frozen=True)
class Size:
    """Of a language model and its batch."""

    depth: int = 4
    width: int = 256
    heads: int = 8
    length: int = 512
    batch: int = 4
    vocabulary: int = 256


def bench_model(
    size: Size,
    *,
    mixers: tuple[str, ...],
    tasks: tuple[str, ...],
    steps: int,
    rounds: int,
    device: str,
    out: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure, print two tables, write ``out``, and return the rows."""
    check_counts(**asdict(size), rounds=rounds, steps=steps)
    check_out(out)
    speed = _measure_models(size, mixers, rounds, torch.device(device))
    console.print(_speed_table(size, speed))
    overhead = [_measure_loop(task, steps, device) for task in tasks]
    console.print(_overhead_table(overhead))
    result = {"size": asdict(size), "speed": speed, "overhead": overhead}
    if out is not None:
        write_result(out, device, result)
        say(console, f"written to {out}")
    return result


def _measure_models(size: Size, mixers: tuple[str, ...], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds of a training step on the same batch, turn by turn."""
    torch.manual_seed(0)
    tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1), device=device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    spec = Spec("tokens", size.vocabulary, size.length, "language", size.vocabulary, "bits_per_byte")
    models: dict[str, nn.Module] = {
        name: create_model(
            spec, name, depth=size.depth, width=size.width, heads=size.heads, positions="learned", tied=True,
            device=device,
        )
        for name in mixers
    }  # fmt: skip
    gpt2 = _gpt2(size)
    if gpt2 is not None:
        models["GPT-2 of transformers"] = gpt2.to(device)
    jobs = {name: _step(model, spec, inputs, targets) for name, model in models.items()}
    with progress("models", rounds * len(jobs)) as done:
        count = iter(range(1, rounds * len(jobs) + 1))
        timings = time_interleaved(jobs, device, rounds, on_turn=lambda: done(next(count)))
    return [
        {
            "name": name,
            "parameters": count_parameters(models[name]),
            "step_ms": 1e3 * timing.best,
            "tokens_per_second": size.batch * size.length / timing.best,
        }
        for name, timing in timings.items()
    ]


def _step(model: nn.Module, spec: Spec, inputs: Tensor, targets: Tensor) -> Job:
    optimizer = make_optimizer(model, TrainingConfig(steps=1))

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(inputs)
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        (loss_sum(spec, logits, targets) / targets.numel()).backward()
        optimizer.step()

    return step


def _gpt2(size: Size) -> nn.Module | None:
    """The same mathematics by another package, with its fastest attention and without its dropout."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    config = GPT2Config(
        vocab_size=size.vocabulary, n_positions=size.length, n_embd=size.width, n_layer=size.depth, n_head=size.heads,
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config)


def _measure_loop(task: str, steps: int, device: str) -> dict[str, Any]:
    """A real run of the mini recipe, in a folder that is deleted; its last evaluation and test are small."""
    changes = {"steps": steps, "evaluate_every": steps, "valid_samples": 8, "test_samples": 8}
    config = resolve("mini", task, "las", changes)
    with tempfile.TemporaryDirectory(prefix="longlens-bench-") as folder:
        result = train(config, Runtime.model_validate({"runs": folder, "device": device}))
    per_step = result["tokens"] / result["tokens_per_second"] / steps
    return {
        "task": result["task"],
        "batch_size": config.training.batch_size,
        "step_ms": 1e3 * per_step,
        "overhead": result["overhead"],
    }


def _speed_table(size: Size, rows: list[dict[str, Any]]) -> Table:
    title = f"a training step, {size.depth} blocks of width {size.width}, batch {size.batch} × {size.length}"
    table = Table("model", "parameters", "step", "tokens/s", "time / GPT-2's", title=title, title_justify="left")
    other = next((row["step_ms"] for row in rows if row["name"].startswith("GPT-2")), None)
    for row in rows:
        ratio = f"×{row['step_ms'] / other:.2f}" if other else "(transformers is not installed)"
        speed = f"{row['tokens_per_second']:,.0f}"
        table.add_row(row["name"], f"{row['parameters']:,}", f"{row['step_ms']:,.1f} ms", speed, ratio)
    return table


def _overhead_table(rows: list[dict[str, Any]]) -> Table:
    title = "the training loop, LaS by the mini recipe"
    table = Table("task", "batch", "step", "outside forward, backward, optimizer", title=title, title_justify="left")
    for row in rows:
        share = f"{100 * row['overhead']:.1f} %"
        table.add_row(row["task"], str(row["batch_size"]), f"{row['step_ms']:,.0f} ms", share)
    return table
