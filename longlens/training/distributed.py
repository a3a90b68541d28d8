"""One process or many: the same loop runs under ``python`` and under ``torchrun``."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from longlens.errors import BadInput
from longlens.training.runtime import Runtime


@dataclass(frozen=True)
class Processes:
    """This process and how many there are."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether it holds in some process: the same answer in all."""
        if self.count == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def on_first(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the first process: its answer, or its error, in all of them."""
        answer = problem = None
        if self.is_first:
            try:
                answer = function(*args)
            except Exception as error:
                if self.count == 1:
                    raise
                problem = error
        answer, problem = self.broadcast((answer, problem))
        if problem is not None:
            raise problem
        return answer

    def broadcast(self, value: Any) -> Any:
        """What the first process has, in all of them."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


@contextmanager
def join_processes(runtime: Runtime) -> Iterator[Processes]:
    """Meet the processes that torchrun started, if it did."""
    device = choose_device(runtime.device)
    if "RANK" not in os.environ:
        yield Processes(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    _meet("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        # A thread of gloo may still hold the tensor of the last sum. It needs Python's lock to give it back, which the
        # end of the group holds while it waits for the thread.
        time.sleep(0.1)
        dist.destroy_process_group()


def _meet(backend: str) -> None:
    if os.environ.get("GROUP_WORLD_SIZE") != "1":  # several agents, which need not agree on how often they started
        dist.init_process_group(backend)
        return
    # When torchrun starts its processes anew, its store still has the addresses of those that died.
    store, rank, count = next(rendezvous("env://"))
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device must be cpu or auto here, got cuda: torch sees no GPU")
    return torch.device(name)


def parallelize(model: nn.Module, processes: Processes, parallel: str) -> nn.Module:
    """The model for training in all processes. Both ways average the gradients over the processes."""
    if processes.count == 1:
        return model
    if parallel == "fsdp":
        for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(block)
        fully_shard(model)
        return model
    # The norms keep their running statistics alike themselves.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 renames the argument
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


@contextmanager
def without_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Skip the gradient all-reduce for all but the last micro-batch."""
    if isinstance(model, DistributedDataParallel) and wanted:
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not wanted)
        yield
    else:
        yield
