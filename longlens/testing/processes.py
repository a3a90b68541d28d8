"""Two processes train a layer, with DDP and with FSDP, and compare what they get with what one process gets.

They are programs of their own: what ``multiprocessing`` spawns stops where a script checks its own layer without
``if __name__ == "__main__"``, or where the layer is in a file that no import finds. Only they import FSDP, which takes
as long as torch itself.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longlens.registry import import_file
from longlens.testing.subject import Check, Subject, describe_error

TWO_PROCESSES = "two processes"
WORKER = "LONGLENS_CHECKING"  # in the environment of the two processes, which start no others
CALL = "from longlens.testing.processes import work; work()"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
Order = tuple[str, str, str, dict[str, Any]]  # module, file and name of a class, and the other fields of its subject


def check_two_processes(subjects: Sequence[Subject]) -> list[Check]:
    """Two processes with DDP or FSDP have the gradients of one, and the same parameters after two steps. Both are
    started once for all layers."""
    reasons = [_obstacle(subject) for subject in subjects]
    orders = [_order(subject) for subject, reason in zip(subjects, reasons, strict=True) if reason is None]
    found = iter(_start(orders) if orders else [])
    return [next(found) if reason is None else Check(TWO_PROCESSES, None, reason) for reason in reasons]


def _obstacle(subject: Subject) -> str | None:
    """Why another process cannot make this layer."""
    layer = subject.layer
    if WORKER in os.environ:
        return "this is one of the two processes"
    if "<locals>" in layer.__qualname__:
        return f"another process cannot make {layer.__name__}: define the class outside of functions"
    if getattr(sys.modules.get(layer.__module__), "__file__", None) is None:
        return f"another process cannot make {layer.__name__}: put the class into a file"
    if not any(parameter.requires_grad for parameter in subject.build().parameters()):
        return "it has no parameters"
    return None


def _order(subject: Subject) -> Order:
    module = sys.modules[subject.layer.__module__]
    name = "longlens_checked" if module.__name__ == "__main__" else module.__name__  # there, another one is the main
    fields = vars(subject) | {"defaults": {}, "preset": None}
    return name, str(module.__file__), fields.pop("layer").__qualname__, fields


def _start(orders: list[Order]) -> list[Check]:
    environment = {"GLOO_SOCKET_IFNAME": LOOPBACK} | os.environ | {WORKER: "1"}
    with tempfile.TemporaryDirectory(prefix="longlens-check-") as name:
        folder = Path(name)  # of this user alone, so that what is pickled there is ours
        (folder / "orders").write_bytes(pickle.dumps((sys.path, orders)))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(2):
                with (folder / f"{rank}.log").open("wb") as log:
                    command = [sys.executable, "-c", CALL, name, str(rank)]
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            for process in processes:
                process.wait()
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_worst(folder, index) for index in range(len(orders))]


def _worst(folder: Path, index: int) -> Check:
    """What the two processes say of a layer, the worse of it."""
    found = []
    for rank in range(2):
        try:
            found.append(pickle.loads((folder / f"{rank}-{index}").read_bytes()))
        except FileNotFoundError:
            log = (folder / f"{rank}.log").read_text(errors="replace").strip()
            found.append(Check(TWO_PROCESSES, False, f"process {rank} ended: {log.rpartition(chr(10))[2]}", log))
    return min(found, key=lambda check: bool(check.passed))


def work() -> None:
    """What each of the two processes does: ``work`` in a folder, with a rank."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    paths, orders = pickle.loads((folder / "orders").read_bytes())
    sys.path += [path for path in paths if path not in sys.path]
    for index, order in enumerate(orders):
        # A group for each layer, so that an error in one leaves nothing behind for the next.
        meeting = f"file://{folder}/meeting-{index}"
        dist.init_process_group("gloo", meeting, timedelta(minutes=5), rank=rank, world_size=2)
        try:
            check = _compare(_find_subject(*order), rank)
        except Exception as error:
            check = Check(TWO_PROCESSES, False, describe_error(error, order[1]), traceback.format_exc())
        finally:
            dist.destroy_process_group()
        (folder / f"{rank}-{index}").write_bytes(pickle.dumps(check))


def _find_subject(module: str, file: str, name: str, fields: dict[str, Any]) -> Subject:
    """The module is imported by its name, or read from its file if that name is another's or nobody's."""
    try:
        found = import_module(module)
    except ImportError:
        found = None
    if found is None or found.__file__ != file:
        found = import_file(Path(file), module)
    return Subject(attrgetter(name)(found), **fields)


class _Masked(nn.Module):
    """A layer in a model, which is what is wrapped or sharded."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x, mask=mask)


def _compare(subject: Subject, rank: int) -> Check:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    x = subject.inputs(4)
    mask = torch.arange(subject.length) < torch.tensor([[subject.length], [subject.length // 2], [3], [1]])
    expected = _train(_build(subject), x, mask)
    largest = 0.0
    for kind in ("DDP", "FSDP"):
        model = _build(subject)
        if kind == "DDP":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model)
        for name, value in _train(model, x[rank::2], mask[rank::2]).items():
            change = (value - expected[name]).abs().max().item()
            if not change <= 1e-9:
                return Check(TWO_PROCESSES, False, f"{name} with {kind} differs from one process by {change:.1g}")
            largest = max(largest, change)
    return Check(TWO_PROCESSES, True, f"DDP and FSDP differ from one process by {largest:.1g}")


def _build(subject: Subject) -> nn.Module:
    layer, x = subject.build().train(), subject.inputs(1)
    with torch.no_grad():
        is_random = not torch.equal(layer(x, mask=None), layer(x, mask=None))
    return _Masked(subject.build().train(not is_random))


def _train(model: nn.Module, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The gradients of the first step, and the parameters and buffers after two."""
    from torch.distributed.tensor import DTensor

    def whole(tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """By the names of the layer, and put together if they are sharded."""
        found = {name.rpartition("layer.")[2]: tensor for name, tensor in tensors.items()}
        return {what + n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    found: dict[str, Tensor] = {}
    for _ in range(2):
        optimizer.zero_grad()
        (model(x, mask) * mask.unsqueeze(-1)).square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found = whole(gradients, "gradient of ") | found
        optimizer.step()
    return found | whole(model.state_dict(), "")
