"""The Performer (Choromanski et al. 2021, "Rethinking Attention with Performers"): FAVOR+.

    y_t = Σ_s w_ts·v_s / Σ_s w_ts,   w_ts = φ(q_t)·φ(k_s),   φ(x) = exp(W x' - |x'|²/2),   x' = x / d^(1/4)

For rows W (F, d) that are N(0, I), E[w_ts] = exp(q_t·k_s/√d): softmax attention, in a time that is linear in L, as sums
over s do not depend on t. The rows come in blocks of d that are orthogonal to each other, which lowers the variance.

The authors' code adds 10⁻⁴ to each feature, relative to the largest one of the whole sequence, against a division by 0.
Here features are kept as logarithms, which need none of it: the causal form sees nothing of later positions, either.

The Long Range Arena's own code has no random features on all tasks but ListOps: φ(x) = relu(x) + 10⁻³ of queries and
keys themselves, which is ``kernel="arena"``.
"""

import math
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import MultiHead, check_step
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import at_least_float32, no_autocast
from longlens.ops.linear_attention import causal_step, kernel_attention, scaled_features
from longlens.options import Size


def orthogonal_rows(count: int, width: int) -> Tensor:
    """W (count, width): rows from N(0, I), except that those of each block of ``width`` are orthogonal."""
    blocks = torch.randn(-(-count // width), width, width, dtype=torch.float64, device="cpu")
    directions, upper = torch.linalg.qr(blocks)
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform among all rotations
    lengths = torch.randn(count, width, dtype=torch.float64, device="cpu").norm(dim=1)  # χ with d degrees of freedom
    return directions.mT.flatten(0, 1)[:count] * lengths.unsqueeze(1)


@no_autocast
def log_features(x: Tensor, rows: Tensor | None, kernel: str = "softmax") -> Tensor:
    """log φ(x), in float32 at least: (..., d) and W (F, d) -> (..., F); without W, (..., d)."""
    x = at_least_float32(x)
    if rows is None:
        return (x.relu() + 1e-3).log()
    flat, scale = x.reshape(-1, x.shape[-1]), x.shape[-1] ** -0.25
    columns = rows.to(x.dtype).mT * scale
    if kernel == "relu":
        log = ((flat @ columns).relu() + 1e-3).log()
    else:
        log = torch.addmm(flat.square().sum(-1, keepdim=True), flat, columns, beta=-(scale**2) / 2)
    return log.view(*x.shape[:-1], len(rows))


def performer_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None, kernel: str = "softmax", *, is_causal: bool = False
) -> Tensor:
    """The formula, with the weights w (B, H, L, L) in full: three of (B, H, L, d) and W (F, d) -> (B, H, L, d)."""

    def features(x: Tensor) -> Tensor:
        if rows is None:
            return x.relu() + 1e-3
        x = x / x.shape[-1] ** 0.25
        if kernel == "relu":
            return (x @ rows.mT).relu() + 1e-3
        return torch.exp(x @ rows.mT - x.square().sum(dim=-1, keepdim=True) / 2)

    weights = features(query) @ features(key).mT
    if is_causal:
        weights = weights.tril()
    return weights @ value / weights.sum(dim=-1, keepdim=True)


@register("performer", "attention by random features", Traits(stable=True, cost="L", state="features·(D + heads)"))
class PerformerAttention(MultiHead):
    """Multi-head attention with positive orthogonal random features. (B, L, D) -> (B, L, D). The defaults are those of
    the paper and of the package performer-pytorch.

    Args:
        features: Number of random features F of each head; by default d·ln d for heads of width d. The kernel arena has
            none.
        kernel: Kernel of the features: softmax, relu with φ(x) = relu(W x') + 10⁻³ of random features (the paper's
            generalized attention), or arena with relu(x) + 10⁻³ of queries and keys themselves, as in the code of the
            Long Range Arena.
    """

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        features: Size | None = None,
        kernel: Literal["softmax", "relu", "arena"] = "softmax",
        bidirectional: bool = True,
        bias: bool = True,
        rotary: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, heads, bias=bias, rotary=rotary, **factory)
        width = d_model // heads
        self.features = max(int(width * math.log(width)), 1) if features is None else features
        if kernel == "arena":
            self.features = width
        self.kernel_name, self.bidirectional = kernel, bidirectional
        self.rows = None if kernel == "arena" else nn.Buffer(torch.empty(self.features, width, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.rows is not None:
            self.rows.copy_(orthogonal_rows(*self.rows.shape))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        log_query, log_key = (log_features(x, self.rows, self.kernel_name) for x in (query, key))
        return kernel_attention(log_query, log_key, value, mask, is_causal=not self.bidirectional).to(value.dtype)

    def step(self, x: Tensor, state: tuple[Any, int] | None = None) -> tuple[Tensor, tuple[Any, int]]:
        """The state is Σ φ(k_s) ⊗ (v_s, 1) (B, H, F, d + 1) and the logarithm of its scale (B, H), and how many tokens
        there were."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        before, seen = (None, 0) if state is None else state
        query, key, value = (part.squeeze(2) for part in self._project(x.unsqueeze(1), start=seen))  # (B, H, d)
        query, key, scale = scaled_features(*(log_features(part, self.rows, self.kernel_name) for part in (query, key)))
        value = F.pad(value.to(key.dtype), (0, 1), value=1.0)
        sums, after = causal_step(query, key, value, scale, before)
        attended = (sums[..., :-1] / sums[..., -1:]).to(x.dtype)
        return self._merge(attended.unsqueeze(2)).squeeze(1), (after, seen + 1)
