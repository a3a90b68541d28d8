"""One step of training, and the batches that come to it."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from longlens.models.heads import loss_sum
from longlens.tasks.base import Spec
from longlens.tasks.batches import Batch
from longlens.training.config import TrainingConfig
from longlens.training.distributed import Processes, without_sync


def train_step(
    model: nn.Module,
    spec: Spec,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    options: TrainingConfig,
    processes: Processes,
) -> Tensor:
    """Forward, backward, optimizer. Returns this process's share of the loss: their sum is the loss of the step."""
    optimizer.zero_grad()
    loss = torch.zeros((), device=processes.device)
    for part in range(options.accumulate):
        with without_sync(model, part < options.accumulate - 1):
            outputs, targets = forward(model, batch.part(part, options.accumulate), options.precision, processes)
            share = loss_sum(spec, outputs, targets) / batch.total
            (share * processes.count).backward()  # as the gradients are averaged over the processes
        loss += share.detach()
    if options.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    return loss


def forward(model: nn.Module, batch: Batch, precision: str, processes: Processes) -> tuple[Tensor, Tensor]:
    """The outputs and targets of a batch. A process without samples computes one of nothing but padding, and keeps none
    of it, since the others wait for it."""
    filled = batch if len(batch) else batch.nothing()
    mask = filled.mask.to(processes.device) if filled.is_padded else None
    filled = filled.to(processes.device)
    with torch.autocast(processes.device.type, torch.bfloat16, enabled=_in_bfloat16(precision, processes.device)):
        outputs = model(filled.inputs, mask)
    if len(batch):
        return outputs, filled.targets
    return outputs[:0] + 0 * outputs.sum(), filled.targets[:0]


def _in_bfloat16(precision: str, device: torch.device) -> bool:
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16"


def ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches, each loaded while the one before it is at work."""
    iterator = iter(batches)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, iterator, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, iterator, None)
            yield batch
