"""A block: a mixer over the sequence, then a feedforward sub-layer over the channels, each with norm and residual."""

import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.models.config import ModelConfig
from longlens.models.norm import BatchNorm, LayerNorm


def make_norm(config: ModelConfig) -> LayerNorm | BatchNorm:
    return LayerNorm(config.width) if config.norm == "layer" else BatchNorm(config.width)


class FeedForward(nn.Module):
    """(B, L, D) -> (B, L, D): Linear, GELU, Linear; or, gated, (a ⊙ GELU(b)) with two halves a, b of the first."""

    def __init__(self, width: int, ratio: float, gated: bool):
        super().__init__()
        inner = max(1, round(width * ratio))
        self.gated = gated
        self.up = nn.Linear(width, inner * (2 if gated else 1))
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(F.gelu(x))
        value, gate = x.chunk(2, dim=-1)
        return self.down(value * F.gelu(gate))


class Block(nn.Module):
    """x + f(norm(x)) with pre-norm, norm(x + f(x)) otherwise, for f the mixer and then the feedforward sub-layer."""

    def __init__(self, config: ModelConfig, mixer: nn.Module):
        super().__init__()
        self.prenorm = config.prenorm
        self.mixer = mixer
        self.mixer_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.ffn = self.ffn_norm = None
        if config.ffn != "none":
            self.ffn = FeedForward(config.width, config.ffn_ratio, config.ffn == "glu")
            self.ffn_norm = make_norm(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.prenorm:
            x = x + self.dropout(self.mix(self.mixer_norm(x, mask), mask))
            if self.ffn is not None and self.ffn_norm is not None:
                x = x + self.dropout(self.ffn(self.ffn_norm(x, mask)))
            return x
        x = self.mixer_norm(x + self.dropout(self.mix(x, mask)), mask)
        if self.ffn is not None and self.ffn_norm is not None:
            x = self.ffn_norm(x + self.dropout(self.ffn(x)), mask)
        return x

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, L, D) -> (B, L, D). A mixer that returns something else would fail later, or be broadcast."""
        y = self.mixer(x, mask=mask)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise BadInput(
                f"{type(self.mixer).__name__}.forward(x, *, mask=None) must accept x of shape (batch, length, width) "
                f"and return a tensor of the same shape, {tuple(x.shape)}, got {got}"
            )
        return y
