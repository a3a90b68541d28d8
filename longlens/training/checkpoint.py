"""Checkpoints: folders that are there whole or not at all.

``checkpoints/00001200/`` holds ``model.safetensors``, ``optimizer.safetensors``, ``state.json`` (where the run stands)
and ``SHA256SUMS``, as ``sha256sum -c`` reads it. It is written beside its place, brought to the disk and renamed. It
is the same for any number of processes: whole tensors by the names of the parameters.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

TENSORS = ("model.safetensors", "optimizer.safetensors")
FILES = (*TENSORS, "state.json")


class DamagedError(Exception):
    """A checkpoint is not as it was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, in memory. In processes other than the first, the tensors are not there."""

    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    def is_finite(self) -> bool:
        return all(bool(x.isfinite().all()) for part in (self.model, self.optimizer) for x in part.values())


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Checkpoint:
    """All processes call this together; the first gets the tensors."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Any = get_model_state_dict(model, options=whole)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=whole).get("state", {})
    return Checkpoint(
        state,
        {name: tensor.detach() for name, tensor in weights.items()},
        {f"{name}/{kind}": value for name, kinds in moments.items() for kind, value in kinds.items()},
    )


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Into a model, and into an optimizer; all processes together, with the tensors of the first."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    weights: Any = checkpoint.model
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves some parameters whole
    set_model_state_dict(model, weights, options=options)
    if optimizer is None:
        return
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoint.optimizer.items():
        name, _, kind = key.rpartition("/")
        moments.setdefault(name, {})[kind] = value
    whole: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    whole["state"] = moments or whole["state"]  # torch wants some in all processes; the groups follow from the config
    set_optimizer_state_dict(model, optimizer, whole, options=options)


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write ``folder``, whole or not at all. One that is there stays: at no moment is there none."""
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, tensors in zip(TENSORS, (checkpoint.model, checkpoint.optimizer), strict=True):
            _save(tensors, partial / name)
        (partial / "state.json").write_text(json.dumps(checkpoint.state, indent=1))
        (partial / "SHA256SUMS").write_text("".join(f"{_checksum(partial / name)}  {name}\n" for name in FILES))
        for file in [*partial.iterdir(), partial]:
            _to_disk(file)
        partial.rename(folder)
        _to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read(folder: Path) -> Checkpoint:
    """Read ``folder``; every file is compared with its checksum."""
    try:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
        for name in FILES:
            if _checksum(folder / name) != sums.get(name):
                raise DamagedError(f"{name} is not as it was written")
        model, optimizer = (load_file(folder / name) for name in TENSORS)
        state = json.loads((folder / "state.json").read_text())
    except (FileNotFoundError, NotADirectoryError, SafetensorError, ValueError) as error:
        raise DamagedError(str(error)) from error
    return Checkpoint(state, model, optimizer)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({key: tensor.contiguous() for key, tensor in _distinct(tensors).items()}, path)
    except SafetensorError as error:  # an error of the system, as a full disk, comes as one of its own
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def _distinct(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights as copies of their own, which safetensors asks for."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        distinct[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return distinct


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
