"""AdamW: which parameters have weight decay, and which learn more slowly."""

import re
from collections.abc import Iterator
from functools import reduce

import torch
from torch import nn

from longlens.errors import BadInput
from longlens.training.config import TrainingConfig


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Matrices have weight decay; norms, biases, single vectors and the ``no_decay`` of a layer have none. The
    ``kernel_parameters`` of a layer (those of a state space) have none either, and learn at most at ``kernel_lr``."""
    kernel = set(_named_by(model, "kernel_parameters"))
    no_decay = {*_named_by(model, "no_decay"), *_of_norms(model)}
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no decay": [], "kernel": []}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and name not in no_decay and name.rpartition(".")[2] != "bias"
        groups["kernel" if name in kernel else "decay" if decays else "no decay"].append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "peak": min(config.lr, config.kernel_lr) if kind == "kernel" else config.lr,
                "weight_decay": config.weight_decay if kind == "decay" else 0.0,
            }
            for kind, parameters in groups.items()
            if parameters
        ],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )


def _named_by(model: nn.Module, attribute: str) -> Iterator[str]:
    """The parameters that the layers of a model name, ``filter.0.weight`` as well as ``rates``."""
    for path, module in model.named_modules():
        for name in getattr(module, attribute, ()):
            try:
                reduce(getattr, name.split("."), module)  # None, if the layer has been built without it
            except AttributeError:
                layer = type(module).__name__
                raise BadInput(f"{attribute} of {layer} names {name!r}, and it has no such parameter") from None
            yield f"{path}.{name}" if path else name


def _of_norms(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if re.search(r"Norm(\dd)?$", type(module).__name__):
            yield from (f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each group to its peak times the factor."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["peak"]
