"""One step of training, and the batches that come to it."""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from longlens.data.batches import Batch
from longlens.models.heads import loss_sum
from longlens.tasks.base import Spec
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
    """Forward, backward, optimizer. Returns this process's part of the loss: their sum is the loss of the step."""
    optimizer.zero_grad()
    loss = torch.zeros((), device=processes.device)
    for index in range(options.accumulate):
        with without_sync(model, index < options.accumulate - 1):
            outputs, targets = forward(model, batch.part(index, options.accumulate), options.precision, processes)
            part = loss_sum(spec, outputs, targets) / batch.total
            (part * processes.count).backward()  # as the gradients are averaged over the processes
        loss += part.detach()
    if options.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    return loss


def forward(model: nn.Module, batch: Batch, precision: str, processes: Processes) -> tuple[Tensor, Tensor]:
    """The outputs and targets of a batch. A process without samples computes one of nothing but padding, and keeps none
    of it, since the others wait for it."""
    filled = batch if len(batch) else batch.padding_like()
    is_padded = filled.is_padded  # asked before the copy, as a GPU would have to be waited for
    filled = filled.to(processes.device, non_blocking=True)
    mask = filled.mask if is_padded else None
    with torch.autocast(processes.device.type, torch.bfloat16, enabled=in_bfloat16(precision, processes.device)):
        outputs = model(filled.inputs, mask)
    if len(batch):
        return outputs, filled.targets
    return outputs[:0] + 0 * outputs.sum(), filled.targets[:0]


def in_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether to compute in bfloat16: by itself only where the hardware does so, as emulation is slow."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bfloat16"


def seed_step(seed: int, step: int, processes: Processes) -> None:
    """The random numbers of a step follow from the seed, the step and the process, so that a run can resume anywhere.

    Only the generators of this device are seeded: ``torch.manual_seed`` takes a millisecond to look for others."""
    key = f"{seed} {step} {processes.rank}"
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    torch.default_generator.manual_seed(number)
    if processes.device.type == "cuda":
        torch.cuda.manual_seed(number)


def prefetch(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches, each loaded while the one before it is at work; for a GPU in pinned memory, from where the copy
    need not be waited for."""
    iterator = iter(batches)

    def load() -> Batch | None:
        batch = next(iterator, None)
        return batch.pin() if batch is not None and device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(load)
        while (batch := coming.result()) is not None:
            coming = pool.submit(load)
            yield batch
