"""A block: a mixer over the sequence, then a feedforward sub-layer over the channels, each with norm and residual."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import Dropout
from longlens.models.config import ModelConfig
from longlens.ops.checks import at_least_float32


class LayerNorm(nn.LayerNorm):
    """(B, L, D) -> (B, L, D), each token by itself."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(input)


class BatchNorm(nn.Module):
    """(B, L, D) -> (B, L, D), each channel over all tokens of the batch, in all processes together.

    As ``nn.BatchNorm1d`` of the tokens where ``mask`` is True. Where all is padding, nothing is normalized.
    """

    eps, momentum = 1e-5, 0.1

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.running_mean, self.running_var = nn.Buffer(torch.zeros(width)), nn.Buffer(torch.ones(width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.training:
            return self._normalize(x, self.running_mean, self.running_var).to(x.dtype)
        if mask is None and not _several_processes():  # one fused call
            flat = x.flatten(0, 1)
            args = self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
            return F.batch_norm(flat, *args).view_as(x)
        wide = at_least_float32(x)
        tokens = torch.ones(x.shape[:2], device=x.device, dtype=wide.dtype) if mask is None else mask.to(wide.dtype)
        tokens = tokens.unsqueeze(-1)  # (B, L, 1)
        sums = _sum_over_processes(torch.cat([tokens.sum().view(1), (wide * tokens).sum((0, 1))]))  # (1 + D,)
        total = sums[0].detach()
        count = total.clamp(min=1)
        mean = sums[1:] / count
        var = _sum_over_processes(((wide - mean).square() * tokens).sum((0, 1))) / count
        var = var + (total == 0)  # of no tokens: 1, as 0 would enlarge padding from norm to norm, up to infinity
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp(min=1))
            step = self.momentum * (total > 0).to(self.running_mean.dtype)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), step)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), step)
        return self._normalize(wide, mean, var).to(x.dtype)

    def _normalize(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = self.weight * torch.rsqrt(var + self.eps)
        return torch.addcmul(self.bias - mean * scale, x, scale)


def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sum_over_processes(x: Tensor) -> Tensor:
    return _AllReduce.apply(x) if _several_processes() else x  # pyright: ignore[reportReturnType]


class _AllReduce(torch.autograd.Function):
    """The sum over processes. Every process's loss depends on it, so its gradient is summed over them, too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class RMSNorm(nn.Module):
    """(B, L, D) -> (B, L, D): g ⊙ x / (‖x‖/√D), each token by itself. ``gains`` are the numbers of g: D, or 1 for one
    that all channels share, which is ScaleNorm (Nguyen & Salazar 2019) as MEGA has it."""

    def __init__(self, gains: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(gains))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm in ("scale", "rms"):
        return RMSNorm(1 if config.norm == "scale" else config.width)
    return LayerNorm(config.width) if config.norm == "layer" else BatchNorm(config.width)


class FeedForward(nn.Module):
    """(B, L, D) -> (B, L, D): Linear, f, Linear; or, gated, (a ⊙ f(b)) with two halves a, b of the first. The dropout
    is that of what the second gets."""

    def __init__(self, width: int, ratio: float, gated: bool, activation: str = "gelu", dropout: float = 0.0):
        super().__init__()
        inner = max(1, round(width * ratio))
        self.gated = gated
        self.activation = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}[activation]
        self.up = nn.Linear(width, inner * (2 if gated else 1))
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            value, gate = x.chunk(2, dim=-1)
            return self.down(self.dropout(value * self.activation(gate)))
        return self.down(self.dropout(self.activation(x)))


class Block(nn.Module):
    """x + f(norm(x)) with pre-norm, norm(x + f(x)) otherwise, for f the mixer and then the feedforward sub-layer."""

    def __init__(self, config: ModelConfig, mixer: nn.Module):
        super().__init__()
        self.prenorm = config.prenorm
        self.mixer = mixer
        self.takes_residual = getattr(mixer, "takes_residual", False)
        self.mixer_norm = make_norm(config)
        self.dropout = Dropout(config.dropout, config.tied_dropout)
        self.ffn = self.ffn_norm = None
        if config.ffn != "none":
            how = config.ffn == "glu", config.ffn_activation, config.ffn_dropout
            self.ffn = FeedForward(config.width, config.ffn_ratio, *how)
            self.ffn_norm = make_norm(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._after(x, self.mix(self._before(x, mask), mask, x), mask)

    def extend(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """(B, n, D) of the tokens that follow those of a state, None at the start -> (B, n, D) and the next state. The
        first tokens go through ``prefill`` of a mixer that has it, others through ``step``, one by one."""
        inputs = self._before(x)
        if state is None and x.shape[1] > 1 and hasattr(self.mixer, "prefill"):
            mixed, state = self.mixer.prefill(inputs, **self._residual(x))  # pyright: ignore[reportCallIssue]
            return self._after(x, mixed), state
        outputs = []
        for t in range(x.shape[1]):
            output, state = self.mixer.step(inputs[:, t], state, **self._residual(x[:, t]))  # pyright: ignore[reportCallIssue]
            outputs.append(output)
        return self._after(x, torch.stack(outputs, dim=1)), state

    def _before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the mixer gets."""
        return self.mixer_norm(x, mask) if self.prenorm else x

    def _after(self, x: Tensor, mixed: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the block makes of it."""
        x = x + (mixed if self.takes_residual else self.dropout(mixed))
        x = x if self.prenorm else self.mixer_norm(x, mask)
        if self.ffn is None or self.ffn_norm is None:
            return x
        x = x + self.dropout(self.ffn(self.ffn_norm(x, mask) if self.prenorm else x))
        return x if self.prenorm else self.ffn_norm(x, mask)

    def _residual(self, x: Tensor) -> dict[str, Tensor]:
        return {"residual": x} if self.takes_residual else {}

    def mix(self, x: Tensor, mask: Tensor | None, residual: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D). A mixer that returns something else would fail later, or be broadcast."""
        y = self.mixer(x, mask=mask, **self._residual(residual))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise BadInput(
                f"{type(self.mixer).__name__}.forward(x, *, mask=None) must accept x of shape (batch, length, width) "
                f"and return a tensor of the same shape, {tuple(x.shape)}, got {got}"
            )
        return y
