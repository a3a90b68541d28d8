"""A block: a mixer over the sequence, then a feedforward sub-layer over the channels, each with norm and residual."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
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

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(width, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(width, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        for tensor, value in ((self.weight, 1.0), (self.bias, 0.0), (self.running_mean, 0.0), (self.running_var, 1.0)):
            nn.init.constant_(tensor, value)

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

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, momentum={self.momentum}"


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
        for f, norm in ((partial(self.mix, mask=mask), self.mixer_norm), (self.ffn, self.ffn_norm)):
            if f is None or norm is None:
                continue
            x = x + self.dropout(f(norm(x, mask))) if self.prenorm else norm(x + self.dropout(f(x)), mask)
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
