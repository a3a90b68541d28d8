"""Two processes train a layer, with DDP and with FSDP, and compare what they get with what one process gets.

Only they import FSDP, which takes as long as torch itself.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longlens.mixers.registry import layer_options
from longlens.testing.subject import Subject, describe_error

WORKER = "LONGLENS_CHECKING"  # in the environment of the two processes, which start no others
CALL = "from longlens.testing.processes import work; work()"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Outcome(NamedTuple):
    passed: bool | None
    detail: str
    traceback: str = ""


def train_in_two(subjects: Sequence[Subject]) -> list[Outcome]:
    """For each layer, whether two processes agree with one. Both are started once for all layers."""
    reasons = [_obstacle(subject) for subject in subjects]
    orders = [_order(subject) for subject, reason in zip(subjects, reasons, strict=True) if reason is None]
    found = iter(_start(orders) if orders else [])
    return [next(found) if reason is None else Outcome(None, reason) for reason in reasons]


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


def _order(subject: Subject) -> dict[str, Any]:
    module = sys.modules[subject.layer.__module__]
    name = "longlens_checked" if module.__name__ == "__main__" else module.__name__  # there, another one is the main
    place = {"module": name, "file": module.__file__, "class": subject.layer.__qualname__}
    return place | {"options": subject.options, "d_model": subject.d_model, "length": subject.length}


def _start(orders: list[dict[str, Any]]) -> list[Outcome]:
    environment = {"GLOO_SOCKET_IFNAME": LOOPBACK} | os.environ | {WORKER: "1"}
    with tempfile.TemporaryDirectory(prefix="longlens-check-") as name:
        folder = Path(name)
        (folder / "orders.json").write_text(json.dumps({"path": sys.path, "orders": orders}, default=str))
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


def _worst(folder: Path, index: int) -> Outcome:
    """What the two processes say of a layer, the worse of it."""
    found = []
    for rank in range(2):
        try:
            found.append(Outcome(*json.loads((folder / f"{rank}-{index}.json").read_text())))
        except FileNotFoundError:
            log = (folder / f"{rank}.log").read_text(errors="replace").strip()
            found.append(Outcome(False, f"process {rank} ended: {log.rpartition(chr(10))[2]}", log))
    return min(found, key=lambda outcome: bool(outcome.passed))


def work() -> None:
    """What each of the two processes does: ``work`` in a folder, with a rank."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    given = json.loads((folder / "orders.json").read_text())
    sys.path += [path for path in given["path"] if path not in sys.path]
    for index, order in enumerate(given["orders"]):
        layer: type = nn.Module
        # A group for each layer, so that an error in one leaves nothing behind for the next.
        meeting = f"file://{folder}/meeting-{index}"
        dist.init_process_group("gloo", meeting, timedelta(minutes=5), rank=rank, world_size=2)
        try:
            layer = _find_class(order)
            outcome = _compare(_find_subject(layer, order), rank)
        except Exception as error:
            outcome = Outcome(False, describe_error(error, layer), traceback.format_exc())
        finally:
            dist.destroy_process_group()
        (folder / f"{rank}-{index}.json").write_text(json.dumps(outcome))


def _find_class(order: dict[str, Any]) -> type[nn.Module]:
    name, file = order["module"], order["file"]
    if name not in sys.modules:
        try:
            spec = find_spec(name)
        except ModuleNotFoundError:  # the package of a module that was read from a file
            spec = None
        if spec is None or spec.origin != file:
            spec = spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    found: Any = import_module(name)
    for part in order["class"].split("."):
        found = getattr(found, part)
    return found


def _find_subject(layer: type[nn.Module], order: dict[str, Any]) -> Subject:
    known = layer_options(layer, layer.__name__)
    options = {name: known[name].check(value) for name, value in order["options"].items()}
    return Subject(layer, options, options, order["d_model"], order["length"], None)


class _Masked(nn.Module):
    """A layer in a model, which is what is wrapped or sharded."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x, mask=mask)


def _compare(subject: Subject, rank: int) -> Outcome:
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
                return Outcome(False, f"{name} with {kind} differs from one process by {change:.1g}")
            largest = max(largest, change)
    return Outcome(True, f"DDP and FSDP differ from one process by {largest:.1g}")


def _build(subject: Subject) -> nn.Module:
    layer, x = subject.build().train(), subject.inputs(1)
    with torch.no_grad():
        is_random = not torch.equal(layer(x, mask=None), layer(x, mask=None))
    return _Masked(subject.build().train(not is_random))


def _train(model: nn.Module, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The gradients of the first step, and the parameters and buffers after two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    found: dict[str, Tensor] = {}
    for _ in range(2):
        optimizer.zero_grad()
        (model(x, mask) * mask.unsqueeze(-1)).square().mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found.setdefault(f"gradient of {_plain(name)}", _whole(parameter.grad).clone())
        optimizer.step()
    return found | {_plain(name): _whole(value) for name, value in model.state_dict().items()}


def _plain(name: str) -> str:
    return name.removeprefix("module.").removeprefix("layer.")


def _whole(x: Tensor) -> Tensor:
    """The tensor itself, or a sharded one put together."""
    from torch.distributed.tensor import DTensor

    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()
