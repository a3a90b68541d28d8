"""LRU, the linear recurrent unit (Orvieto et al. 2023, Resurrecting Recurrent Neural Networks for Long Sequences).

    h_t = λ ⊙ h_{t-1} + γ ⊙ (B x_t),   y_t = Re(C h_t) + skip ⊙ x_t,   out = a ⊙ σ(b)  for  (a, b) = W gelu(y_t)
    λ = exp(-exp(ν) + i·exp(θ)),   γ = exp(g),   h (N,), B (N, D), C (D, N)

so that |λ| < 1 whatever is learned. At the start λ is uniform on a ring of the complex plane, and γ = √(1 - |λ|²), with
which a state is as large as its inputs. For both sides a second scan runs from the end, with a C of its own.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.s5 import DiagonalRecurrence
from longlens.ops.exponentials import as_complex, exact


class LRU(DiagonalRecurrence):
    """The layer above.

    Args:
        d_model: D.
        state_size: N.
        min_radius: the smallest |λ| at the start.
        max_radius: the largest.
        max_phase: the phases of λ lie between 0 and this at the start.
        bidirectional: see both sides.
    """

    special_parameters: ClassVar[tuple[str, ...]] = ("log_decay", "log_phase", "log_scale", "into")

    def __init__(
        self,
        d_model: int,
        state_size: int,
        *,
        min_radius: float = 0.9,
        max_radius: float = 0.999,
        max_phase: float = 2 * math.pi,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, device=device, dtype=dtype)
        if state_size < 1:
            raise ValueError(f"state_size must be at least 1, got {state_size}")
        if not 0 <= min_radius <= max_radius <= 1 or min_radius == 1 or max_radius == 0:
            raise ValueError(
                f"min_radius and max_radius must lie between 0 and 1 and be in order, got {min_radius} and {max_radius}"
            )
        if not 0 < max_phase <= 2 * math.pi:
            raise ValueError(f"max_phase must lie between 0 and 2π, got {max_phase}")
        self.state_size = state_size
        self.min_radius, self.max_radius, self.max_phase = min_radius, max_radius, max_phase

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.log_decay = empty(state_size)  # ν
        self.log_phase = empty(state_size)  # θ
        self.log_scale = empty(state_size)  # g
        self.into = empty(state_size, d_model, 2)  # B
        self.out = empty(d_model, state_size * (2 if bidirectional else 1), 2)  # C
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Lemma 3.2 of the paper: |λ|² is uniform for a λ uniform on a ring. B and C as in its appendix A."""
        super().reset_parameters()
        square, phase = (torch.empty_like(exact(self.log_decay)) for _ in range(2))
        tiny = torch.finfo(square.dtype).tiny
        square.uniform_(self.min_radius**2, self.max_radius**2)
        square.clamp_(max(tiny, self.min_radius**2), 1 - torch.finfo(square.dtype).eps)
        self.log_decay.copy_(torch.log(-0.5 * torch.log(square)))
        self.log_scale.copy_(0.5 * torch.log1p(-square))
        self.log_phase.copy_(phase.uniform_(0, self.max_phase).clamp_(min=tiny).log_())
        nn.init.normal_(self.into, std=(2 * self.d_model) ** -0.5)
        nn.init.normal_(self.out, std=self.state_size**-0.5)

    def recurrence(self) -> tuple[Tensor, Tensor, Tensor]:
        rates = torch.complex(-exact(self.log_decay).exp(), exact(self.log_phase).exp())
        return rates, exact(self.log_scale).exp()[:, None] * as_complex(self.into), as_complex(self.out)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, state_size={self.state_size}, min_radius={self.min_radius}, "
            f"max_radius={self.max_radius}, max_phase={self.max_phase}, bidirectional={self.bidirectional}"
        )


@register("lru")
@dataclass(frozen=True, kw_only=True)
class LRUConfig(Config):
    """LRU, as for the images of the paper (its Tables 8 and 9: sCIFAR, and Pathfinder, where it is bidirectional).

    Args:
        state_size: N, complex; None for 3/4 of the width, as for Text and sCIFAR, or 1/2 of it for both sides.
        min_radius: smallest absolute eigenvalue at the start (0 for ListOps, 0.5 for Text, 0.999 for Path-X).
        max_radius: the largest (0.99 for ListOps, 0.9 for Text, 0.9999 for Path-X).
        max_phase: the largest phase at the start (π/10 for Path-X).
        bidirectional: see both sides.
    """

    state_size: int | None = None
    min_radius: float = 0.9
    max_radius: float = 0.999
    max_phase: float = 2 * math.pi
    bidirectional: bool = False

    summary: ClassVar[str] = "linear recurrence with eigenvalues on a ring"
    traits: ClassVar[Traits] = Traits(
        decays=True, special_init=True, stable=True, complex=True, normalized=True, recurrent=True, cost="L",
        state="2·state_size",
    )  # fmt: skip

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> LRU:
        options = asdict(self)
        if self.state_size is None:
            options["state_size"] = max(1, d_model // 2 if self.bidirectional else 3 * d_model // 4)
        return LRU(d_model, **options, device=device, dtype=dtype)
