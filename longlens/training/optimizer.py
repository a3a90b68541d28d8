"""AdamW, and which parameters do not decay."""

import torch
from torch import nn

from longlens.training.config import TrainingConfig


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Matrices decay; norms, biases and single vectors do not. The ``special_parameters`` of a mixer (those of a state
    space) do not decay either, and learn at ``special_lr`` at the most."""
    special = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in getattr(module, "special_parameters", ())
    }
    unknown = special - {name for name, _ in model.named_parameters()}
    if unknown:
        raise ValueError(f"special_parameters has {', '.join(sorted(unknown))}, and there is no such parameter")
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no decay": [], "special": []}
    for name, parameter in model.named_parameters():
        kind = "special" if name in special else "decay" if parameter.ndim >= 2 else "no decay"
        groups[kind].append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "peak": min(config.lr, config.special_lr) if kind == "special" else config.lr,
                "weight_decay": config.weight_decay if kind == "decay" else 0.0,
            }
            for kind, parameters in groups.items()
            if parameters
        ],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Of each group's peak."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
