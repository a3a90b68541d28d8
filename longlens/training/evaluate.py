"""The metric and the loss of a model on a split."""

import numpy as np
import torch
from torch import nn

from longlens.models.heads import loss_sum
from longlens.tasks.base import SplitName, Task
from longlens.tasks.batches import Batches
from longlens.tasks.datasets import Subset
from longlens.tasks.metrics import metric_sums, metric_value
from longlens.tasks.stream import Stream
from longlens.training.config import TrainingConfig
from longlens.training.distributed import Processes
from longlens.training.events import Interrupted, StopSignals
from longlens.training.step import ahead, forward


@torch.no_grad()
def sees_ahead(model: nn.Module, task: Task) -> float:
    """The largest change of a logit when tokens that come after it are others: 0 for a language model that is one."""
    (batch,) = Batches(Subset(task.split("test"), np.arange(1)), 1)
    half = batch.tokens // 2
    changed = batch.inputs.clone()
    changed[:, half:] = (changed[:, half:] + 1) % task.spec.size
    model.eval()
    device = next(model.parameters()).device
    before, after = (model(inputs.to(device))[:, :half] for inputs in (batch.inputs, changed))
    return (before - after).abs().max().item()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    split: SplitName,
    options: TrainingConfig,
    processes: Processes,
    *,
    samples: int | None = None,
    stop: StopSignals | None = None,
) -> tuple[float, float]:
    """The metric and the loss on all samples of a split, or on so many drawn once for all, each counted once."""
    chosen = task.split(split)
    if samples is not None and samples < len(chosen):
        chosen = Subset(chosen, np.sort(Stream("evaluated").permutation(len(chosen))[:samples]))
    batches = Batches(
        chosen, options.batch_size, group_by_length=options.group_by_length, rank=processes.rank,
        world_size=processes.count,
    )  # fmt: skip
    spec, was_training = task.spec, model.training
    model.eval()
    torch.manual_seed(0)  # for layers that draw numbers also then; a step of training has a seed of its own
    try:
        sums = torch.zeros(2, dtype=torch.float64)  # of losses and targets
        metrics = torch.zeros(())
        for batch in ahead(batches):
            if stop is not None and processes.any(stop.asked):
                raise Interrupted("stopped during an evaluation, and saved")
            outputs, targets = forward(model, batch, options.precision, processes)
            metrics = metrics + metric_sums(spec.metric, outputs.float(), targets).cpu()
            sums += torch.tensor([loss_sum(spec, outputs, targets).item(), batch.total / processes.count])
    finally:
        model.train(was_training)
    metrics, (loss, count) = (processes.sum(part.to(processes.device)).cpu() for part in (metrics, sums))
    return metric_value(spec.metric, metrics), float(loss / count)
