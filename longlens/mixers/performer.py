"""The Performer (Choromanski et al. 2021, "Rethinking Attention with Performers"): FAVOR+.

    y_t = Σ_s w_ts·v_s / Σ_s w_ts,   w_ts = φ(q_t)·φ(k_s),   φ(x) = exp(W x' - |x'|²/2),   x' = x / d^(1/4)

For rows W (F, d) that are N(0, I), E[w_ts] = exp(q_t·k_s/√d): softmax attention, in a time that is linear in L, as sums
over s do not depend on t. The rows come in blocks of d that are orthogonal to each other, which lowers the variance.

The authors' code adds 10⁻⁴ to each feature, relative to the largest one of the whole sequence, against a division by 0.
Here features are kept as logarithms, which need none of it: so the causal form sees nothing of later positions, either.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import MultiHead, check_step
from longlens.ops.linear_attention import causal_step, in_float32, kernel_attention, scaled_features


def orthogonal_rows(count: int, width: int) -> Tensor:
    """W (count, width): rows from N(0, I), except that those of each block of ``width`` are orthogonal."""
    blocks = torch.randn(-(-count // width), width, width, dtype=torch.float64, device="cpu")
    directions, upper = torch.linalg.qr(blocks)
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform among all rotations
    lengths = torch.randn(count, width, dtype=torch.float64, device="cpu").norm(dim=1)  # χ with d degrees of freedom
    return directions.mT.flatten(0, 1)[:count] * lengths.unsqueeze(1)


@in_float32
def log_features(x: Tensor, rows: Tensor, kernel: str = "softmax") -> Tensor:
    """log φ(x): (..., d) and W (F, d) -> (..., F)."""
    flat, scale = x.reshape(-1, x.shape[-1]), x.shape[-1] ** -0.25
    rows = rows.to(x.dtype) * scale
    if kernel == "relu":
        log = ((flat @ rows.mT).relu() + 1e-3).log()
    else:
        log = torch.addmm(flat.square().sum(-1, keepdim=True), flat, rows.mT, beta=-(scale**2) / 2)
    return log.view(*x.shape[:-1], len(rows))


@dataclass(frozen=True)
class PerformerState:
    """What a causal layer remembers of the tokens so far: Σ φ(k_s) ⊗ (v_s, 1) (B, H, F, d + 1), relative to a scale
    whose logarithm is (B, H), and how many they were."""

    sums: Tensor
    log_scale: Tensor
    seen: int


class PerformerAttention(MultiHead):
    """Multi-head attention with random features. (B, L, D) -> (B, L, D).

    Args:
        d_model: D, a multiple of ``heads``.
        heads: H.
        features: F, the rows of W; by default d·ln d for heads of width d.
        kernel: ``"softmax"``, or ``"relu"`` with φ(x) = relu(W x') + 10⁻³.
        bidirectional: attend to both sides.
        bias: of the two projections.
        rotary: turn queries and keys by their positions (Su et al. 2021).
    """

    rows: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        features: int | None = None,
        kernel: str = "softmax",
        bidirectional: bool = True,
        bias: bool = True,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, bias=bias, rotary=rotary, device=device, dtype=dtype)
        if features is not None and features < 1:
            raise ValueError(f"features must be at least 1, or None, got {features}")
        if kernel not in ("softmax", "relu"):
            raise ValueError(f"kernel must be softmax or relu, got {kernel!r}")
        width = d_model // heads
        self.features = max(int(width * math.log(width)), 1) if features is None else features
        self.kernel_name, self.bidirectional = kernel, bidirectional
        self.register_buffer("rows", torch.empty(self.features, width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_features()

    @torch.no_grad()
    def reset_features(self) -> None:
        """Draw W anew, the same one for all heads."""
        self.rows.copy_(orthogonal_rows(*self.rows.shape))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        log_query, log_key = (log_features(x, self.rows, self.kernel_name) for x in (query, key))
        return kernel_attention(log_query, log_key, value, mask, is_causal=not self.bidirectional).to(value.dtype)

    def step(self, x: Tensor, state: PerformerState | None = None) -> tuple[Tensor, PerformerState]:
        """One token of each sequence, (B, D), and what came before, None at the start -> (B, D) and the next state.
        Step by step, the outputs are those of ``forward``."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        seen = 0 if state is None else state.seen
        query, key, value = (part.squeeze(2) for part in self._project(x.unsqueeze(1), start=seen))  # (B, H, d)
        query, key, scale = scaled_features(*(log_features(part, self.rows, self.kernel_name) for part in (query, key)))
        value = F.pad(value.to(key.dtype), (0, 1), value=1.0)
        before = None if state is None else (state.sums, state.log_scale)
        sums, after = causal_step(query, key, value, scale, before)
        attended = (sums[..., :-1] / sums[..., -1:]).to(x.dtype)
        return self._merge(attended.unsqueeze(2)).squeeze(1), PerformerState(*after, seen + 1)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, heads={self.heads}, features={self.features}, kernel={self.kernel_name!r}, "
            f"bidirectional={self.bidirectional}, rotary={self.rotary}"
        )


@register("performer")
@dataclass(frozen=True, kw_only=True)
class Performer(Config):
    """Attention with positive orthogonal random features. The defaults are those of the paper and of the package
    performer-pytorch; the arena's own code has kernel=relu.

    Args:
        heads: number of heads.
        features: random features of each head; by default d·ln d for heads of width d.
        kernel: softmax, or relu, whose features are relu(W x) + 10⁻³.
        bidirectional: attend to both sides.
        bias: of the two projections.
        rotary: turn queries and keys by their positions.
    """

    heads: int = 8
    features: int | None = None
    kernel: Literal["softmax", "relu"] = "softmax"
    bidirectional: bool = True
    bias: bool = True
    rotary: bool = False

    summary: ClassVar[str] = "attention by random features"
    traits: ClassVar[Traits] = Traits(stable=True, cost="L", state="features·(D + heads)")

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> PerformerAttention:
        return PerformerAttention(d_model, device=device, dtype=dtype, **asdict(self))
