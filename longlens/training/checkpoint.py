"""Checkpoints: folders that are there whole or not at all.

``checkpoints/00001200/`` holds ``model.safetensors``, ``optimizer.safetensors``, ``SHA256SUMS`` of these two, as
``sha256sum -c`` reads it, and ``state.json`` (where the run stands) with a checksum of its own. It is written beside
its place, brought to the disk and renamed. It is the same for any number of processes: whole tensors by the names of
the parameters.
"""

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

from longlens.errors import RunError
from longlens.files import default_mode, open_file, read_sealed, sha256, sync, write_sealed
from longlens.training.run import CHECKPOINT_FILES, delete_checkpoint

TENSORS = CHECKPOINT_FILES[:2]
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # of AdamW, for each parameter


class DamagedError(Exception):
    """A checkpoint is not as it was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, in memory."""

    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        """The other processes are sent no tensors, as ``restore`` takes those of the first."""
        return Checkpoint, (self.state, {}, {})

    def is_finite(self) -> bool:
        return all(bool(x.isfinite().all()) for part in (self.model, self.optimizer) for x in part.values())


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Checkpoint:
    """All processes call this together; the first gets the tensors."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Any = get_model_state_dict(model, options=whole)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=whole).get("state", {})
    without = [name for name, _ in model.named_parameters() if name not in moments]
    return Checkpoint(
        {**state, "without_moments": without},  # parameters that have never had a gradient
        {name: tensor.detach() for name, tensor in weights.items()},
        {f"{name}/{kind}": value for name, kinds in moments.items() for kind, value in kinds.items()},
    )


def check(checkpoint: Checkpoint, folder: Path, model: nn.Module, *, with_optimizer: bool) -> None:
    """Refuse a checkpoint that lacks a tensor of the model or the optimizer, or has others. torch would leave what is
    missing as it is, at random."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = dict(checkpoint.model)
    if with_optimizer:
        tensors |= checkpoint.optimizer
        for name, parameter in model.named_parameters():
            if name not in checkpoint.state["without_moments"]:
                wanted |= {f"{name}/{kind}": () if kind == "step" else tuple(parameter.shape) for kind in MOMENTS}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"it lacks {name}" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"it has {name}, which the model has not" for name in sorted(found.keys() - wanted.keys())]
    others = (name for name in wanted.keys() & found.keys() if found[name] != wanted[name])
    problems += [f"{name} is {found[name]}, and {wanted[name]} in the model" for name in sorted(others)]
    if problems:
        raise RunError(
            f"checkpoint {folder} is not one of this model: {problems[0]}. Was it written by another version of "
            "longlens or of a layer? Use that version, or delete the run's folder and run it again"
        )


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Into a model, and into an optimizer; all processes together, with the tensors of the first."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    weights: Any = dict(checkpoint.model)
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
    # torch wants moments of all parameters in all processes: those that are not in the checkpoint stay as they are. The
    # groups follow from the config.
    whole["state"] |= moments
    set_optimizer_state_dict(model, optimizer, whole, options=options)
    for name, parameter in model.named_parameters():
        if name in checkpoint.state["without_moments"]:
            optimizer.state.pop(parameter, None)


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write ``folder``, whole or not at all. Of one that is there only the state is replaced, since the tensors of a
    step are always the same: at no moment is there none."""
    if folder.is_dir():
        write_sealed(folder / "state.json", checkpoint.state)
        sync(folder)
        return
    partial = folder.with_name(f"{folder.name}.partial")
    delete_checkpoint(partial)
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise RunError(f"{partial} is in the way, and it is not ours: move it, and run it again") from None
    try:
        for name, tensors in zip(TENSORS, (checkpoint.model, checkpoint.optimizer), strict=True):
            _save(tensors, partial / name)
        (partial / "SHA256SUMS").write_text("".join(f"{sha256(partial / name)}  {name}\n" for name in TENSORS))
        write_sealed(partial / "state.json", checkpoint.state)
        for file in [*partial.iterdir(), partial]:
            sync(file)
        partial.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read(folder: Path) -> Checkpoint:
    """Read ``folder``; every file is compared with its checksum."""
    try:
        with open_file(folder / "SHA256SUMS") as file:
            lines = file.read().decode().splitlines()
        sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
        for name in TENSORS:
            if sha256(folder / name) != sums.get(name):
                raise DamagedError(f"{name} is not as it was written")
        model, optimizer = (load_file(folder / name) for name in TENSORS)
        state = read_state(folder)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedError(f"{Path(error.filename).name}: {error.strerror}") from error
    except (SafetensorError, ValueError) as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        raise RunError(f"checkpoint {folder} cannot be read: {error.strerror or error}") from error
    return Checkpoint(state, model, optimizer)


def read_state(folder: Path) -> dict[str, Any]:
    """Where a run stood at a checkpoint. ValueError if it is damaged."""
    state = read_sealed(folder / "state.json")
    match state:
        case {"progress": dict(), "schedule": dict(), "without_moments": list(names), **others} if not others:
            if all(isinstance(name, str) for name in names):
                return state
    raise ValueError("state.json must have progress, schedule and the names of parameters without_moments")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({key: tensor.contiguous() for key, tensor in _distinct(tensors).items()}, path)
        path.chmod(default_mode())  # safetensors makes files that nobody else may read
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
