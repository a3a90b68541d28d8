"""What training costs: ``longlens bench model``.

Our models beside transformers' GPT-2 of the same size, a step on the same batch each in turn; and the fraction of a
run's time that is not spent in forward, backward and optimizer.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longlens.bench.layers import heads_of
from longlens.bench.measure import Job, Row, begin, make_table, time_interleaved, write_result
from longlens.mixers.common import check_heads
from longlens.models.model import count_parameters, create_model, loss_sum
from longlens.options import Device, Size
from longlens.progress import progress
from longlens.reports.sheet import Sheet
from longlens.tasks.base import Spec
from longlens.training.config import Config, Runtime, TrainingConfig, load_recipe
from longlens.training.loop import train_run
from longlens.training.step import make_optimizer

GPT2 = "GPT-2 of transformers"
SPEED = {"model": "{name}", "parameters": "{parameters:,}", "step": "{step_ms:,.1f} ms"}
SPEED |= {"tokens/s": "{tokens_per_second:,.0f}", "time / GPT-2's": "×{gpt2_ratio:.2f}"}
OVERHEAD = {"task": "{name}", "batch": "{batch_size}", "step": "{step_ms:,.0f} ms"}
OVERHEAD |= {"outside forward, backward, optimizer": "{overhead:.1%}"}


def bench_model(
    *,
    depth: Size = 4,
    width: Size = 256,
    heads: Size = 8,
    length: Size = 512,
    batch: Size = 4,
    vocabulary: Size = 256,
    mixers: tuple[str, ...] = ("transformer", "las", "las-chunk"),
    tasks: tuple[str, ...] = ("listops", "atomic-cumsum"),
    steps: Size = 40,
    rounds: Size = 10,
    device: Device = "cpu",
    out: Path | None = None,
) -> list[Sheet | str]:
    """A training step of our models beside transformers' GPT-2, and the overhead of the training loop.

    Args:
        depth: Number of blocks.
        width: Channels of a token.
        heads: Number of heads, for mixers that have heads.
        length: Tokens of a sequence.
        batch: Sequences of a step.
        vocabulary: Number of different tokens.
        mixers: Mixers to compare.
        tasks: Tasks whose mini recipe is run to measure the training loop.
        steps: Steps of these runs.
        rounds: Interleaved rounds; the best of each model counts.
        device: Device to measure on; auto is a GPU if there is one.
        out: JSON file to write the figures and the environment to.
    """
    check_heads(width, heads)
    changes = {"steps": steps, "evaluate_every": steps, "valid_samples": 8, "test_samples": 8}
    configs = [load_recipe("mini", task, ["las"]).resolve(task, "las", changes) for task in tasks]
    spec = Spec("tokens", vocabulary, length, "language", vocabulary, "bits_per_byte")
    shape: dict[str, Any] = {"depth": depth, "width": width, "positions": "learned", "tied": True}
    torch.manual_seed(0)
    models = {name: create_model(spec, name, **shape, **heads_of(name, heads)) for name in mixers}
    models |= _gpt2(spec, depth, width, heads)
    where = begin(device, out, mixers=mixers, tasks=tasks)
    speed = _measure_models(models, spec, batch, rounds, where)
    overhead = [_measure_loop(config, device) for config in configs]
    size = {"depth": depth, "width": width, "heads": heads, "length": length, "batch": batch, "vocabulary": vocabulary}
    said = write_result(out, where, size=size, speed=speed, overhead=overhead)
    title = f"a training step, {depth} blocks of width {width}, batch {batch} × {length}"
    note = "GPT-2 is not measured, as transformers is not installed: pip install transformers"
    first = make_table(title, speed, SPEED, *([] if GPT2 in models else [note]))
    return [first, make_table("the training loop, LaS by the mini recipe", overhead, OVERHEAD), *said]


def _gpt2(spec: Spec, depth: int, width: int, heads: int) -> dict[str, nn.Module]:
    """The same mathematics by another package, if it is there, with its fastest attention and without its dropout."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    options: dict[str, Any] = {"vocab_size": spec.size, "n_positions": spec.max_length, "n_head": heads}
    options |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    options |= {"bos_token_id": 0, "eos_token_id": 0, "activation_function": "gelu"}
    config = GPT2Config(n_layer=depth, n_embd=width, **options)
    config._attn_implementation = "sdpa"
    return {GPT2: GPT2LMHeadModel(config)}


def _measure_models(
    models: dict[str, nn.Module], spec: Spec, batch: int, rounds: int, device: torch.device
) -> list[Row]:
    """Milliseconds of a training step on the same batch, turn by turn."""
    tokens = torch.randint(spec.size, (batch, spec.max_length + 1), device=device)
    jobs = {name: _step(model.to(device), spec, tokens) for name, model in models.items()}
    with progress("models", rounds * len(jobs)) as done:
        found = time_interleaved(jobs, device, rounds, on_turn=done)
    rows = []
    for name, seconds in found.items():
        row = {"name": name, "parameters": count_parameters(models[name]), "step_ms": 1e3 * seconds}
        ratio = seconds / found[GPT2] if GPT2 in found else None
        rows.append(row | {"tokens_per_second": batch * spec.max_length / seconds, "gpt2_ratio": ratio})
    return rows


def _step(model: nn.Module, spec: Spec, tokens: Tensor) -> Job:
    optimizer, targets = make_optimizer(model, TrainingConfig(steps=1)), tokens[:, 1:]

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(tokens[:, :-1])
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        (loss_sum(spec, logits, targets) / targets.numel()).backward()
        optimizer.step()

    return step


def _measure_loop(config: Config, device: Device) -> Row:
    """A real run, in a folder that is deleted; its last evaluation and test are small."""
    with tempfile.TemporaryDirectory(prefix="longlens-bench-") as folder:
        result = train_run(config, Runtime(runs=Path(folder), device=device))
    step = result["tokens"] / result["tokens_per_second"] / result["steps"]
    about = {"name": config.task.name, "task": result["task"], "batch_size": config.training.batch_size}
    return about | {"step_ms": 1e3 * step, "overhead": result["overhead"]}
