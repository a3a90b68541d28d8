"""From the inputs of a task to vectors with positions."""

import math

import torch
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.tasks.base import Spec


def sinusoids(length: int, width: int, device: torch.device | None = None) -> Tensor:
    """(length, width): sines of geometrically falling frequencies, then their cosines (Vaswani et al. 2017)."""
    half = (width + 1) // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / max(half, 1)))
    angles = torch.arange(length, device=device)[:, None] * rates  # (L, half)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


class Embedding(nn.Module):
    """Tokens (B, L) or real vectors (B, L, C) to (B, L, D), with sinusoidal, learned or no positions added.

    Embedded tokens have the size of the sinusoids. Where a head shares the weights (``tied``), these are smaller by
    √D and scaled up here, as by Vaswani et al. (2017).
    """

    def __init__(self, spec: Spec, width: int, positions: str, tied: bool = False):
        super().__init__()
        self.width = width
        self.positions = positions
        self.max_length = spec.max_length
        self.scale = math.sqrt(width) if tied else 1.0
        self.values = nn.Embedding(spec.size, width) if spec.inputs == "tokens" else nn.Linear(spec.size, width)
        self.learned = nn.Embedding(spec.max_length, width) if positions == "learned" else None
        if positions == "sinusoidal":
            self.register_buffer("waves", sinusoids(spec.max_length, width), persistent=False)
        if tied:
            nn.init.normal_(self.values.weight, std=1 / self.scale)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.values(inputs)
        x = x * self.scale if self.scale != 1 else x
        length = x.shape[1]
        if self.positions == "sinusoidal":
            if length > self.waves.shape[0]:
                self.waves = sinusoids(length, self.width, x.device)
            x = x + self.waves[:length].to(x.dtype)
        elif self.learned is not None:
            if length > self.max_length:
                raise BadInput(
                    f"a sequence must have at most {self.max_length} tokens, as there are learned positions, "
                    f"got {length}: cut it, or choose sinusoidal positions"
                )
            x = x + self.learned.weight[:length]
        return x
