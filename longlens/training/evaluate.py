"""The metric and the loss of a saved model on a split."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from longlens.data.bigram import bigram_bits
from longlens.data.datasets import Batches, Subset
from longlens.errors import BadInput, RunError
from longlens.models.model import Model
from longlens.tasks.base import SPLITS, Spec, SplitName, Task
from longlens.training import checkpoint as checkpoints
from longlens.training.config import Config, Runtime
from longlens.training.logs import notify
from longlens.training.machine import choose_device, choose_threads, join_processes, keep_random, use_threads
from longlens.training.open_run import TrainState
from longlens.training.run import (
    RunFolder,
    check_fingerprint,
    fingerprint,
    last_threads,
    layer_digest,
    read_config,
    read_identity,
    read_result,
    read_task,
)
from longlens.training.step import evaluate


@torch.no_grad()
def change_by_later_tokens(model: nn.Module, task: Task) -> float:
    """The largest change of a logit when tokens that come after it are others: 0 for a language model that is one. It
    is called in the mode in which it is, training or evaluation."""
    (batch,) = Batches(Subset(task.split("test"), np.arange(1)), 1)
    half = batch.tokens // 2
    changed = batch.inputs.clone()
    changed[:, half:] = (changed[:, half:] + 1) % task.spec.size
    device = next(model.parameters()).device
    before, after = (model(inputs.to(device))[:, :half] for inputs in (batch.inputs, changed))
    return (before - after).abs().max().item()


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint of a run on a whole split, or on a file."""

    config: Config
    split: str  # or the name of the file
    samples: int
    step: int
    metric: str
    value: float
    loss: float
    change_by_later_tokens: float | None = None  # of a language model
    bigram: float | None = None  # what counting pairs of tokens reaches, by the same metric


def evaluate_run(
    folder: Path, split: SplitName = "test", checkpoint: str | int = "best", device: str = "auto"
) -> Evaluation:
    """The metric and the loss of a checkpoint, ``best``, ``last`` or a step, on a whole split."""
    if split not in SPLITS:
        raise BadInput(f"split must be one of {', '.join(SPLITS)}, got {split}")
    config = read_config(folder)
    check_fingerprint(folder, fingerprint(config), "undo the change, or evaluate on a file with --data FILE")
    task, path = config.task, find_checkpoint(folder, checkpoint)
    threads, _ = choose_threads(None, last_threads(folder))
    runtime = Runtime.make({"device": device}, "the runtime")
    with use_threads(threads), join_processes(runtime) as processes, keep_random(processes.device):
        model = load_checkpoint(config, task.spec, path, processes.device)
        value, loss, _ = evaluate(model, task, split, config.training, processes)
        change = bigram = None
        if task.spec.head == "language":
            change = change_by_later_tokens(model, task)
            bits = bigram_bits(task.split("train"), task.split(split), task.spec.outputs)
            bigram = bits if bits is None or task.spec.metric == "bits_per_byte" else 2**bits
    samples = len(task.split(split))
    return Evaluation(config, split, samples, int(path.name), task.spec.metric, value, loss, change, bigram)


def load_model(folder: Path, checkpoint: str | int = "best", device: str = "cpu") -> Model:
    """The trained model of a checkpoint, ready to use."""
    config = read_config(folder)
    path = find_checkpoint(folder, checkpoint)
    if read_identity(folder).layer not in ("", layer_digest(config)):
        changed = f"the source of the layer {config.mixer.name!r} has changed since {folder} was trained"
        notify(f"{changed}: if that changes what it computes, undo it")
    return load_checkpoint(config, read_task(folder, config.task)[0], path, choose_device(device))


def load_checkpoint(config: Config, spec: Spec, path: Path, device: torch.device) -> Model:
    try:
        found = checkpoints.read(path)
    except checkpoints.DamagedError as error:
        raise RunError(f"checkpoint {path} is damaged: {error}") from None
    with torch.random.fork_rng(devices=[]):  # some layers draw numbers that are in no checkpoint
        torch.manual_seed(config.training.seed)
        model = Model(spec, config.mixer, config.model).to(device)
    checkpoints.check(found, path, model, with_optimizer=False)
    checkpoints.restore(found, model)
    return model.eval()


def find_checkpoint(folder: Path, which: str | int) -> Path:
    """The folder of the best or the last checkpoint of a run, or of that of a step."""
    run, which = RunFolder(folder, keep=1), str(which)
    steps = [int(path.name) for path in run.checkpoint_folders()]
    if not steps:
        raise BadInput(f"{folder} has no checkpoint yet")
    if which == "last":
        return run.checkpoint(steps[0])
    if which == "best":
        result = read_result(folder)
        best = result["best_step"] if result else _best_so_far(run.checkpoint(steps[0]))
        if best is None:
            raise BadInput(f"{folder} was not evaluated yet: choose the checkpoint last")
        return run.checkpoint(best)
    if not which.isdecimal() or int(which) not in steps:
        raise BadInput(f"checkpoint must be one of best, last, {', '.join(map(str, sorted(steps)))}, got {which}")
    return run.checkpoint(int(which))


def _best_so_far(newest: Path) -> int | None:
    try:
        return TrainState.from_json(checkpoints.read_state(newest)["progress"]).best_step
    except (ValueError, OSError) as error:
        raise RunError(f"checkpoint {newest} is damaged ({error}): choose another one, or resume the run") from None
