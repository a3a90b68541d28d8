"""LRU, the linear recurrent unit (Orvieto et al. 2023, Resurrecting Recurrent Neural Networks for Long Sequences).

    h_t = λ ⊙ h_{t-1} + γ ⊙ (B x_t),   y_t = Re(C h_t) + skip ⊙ x_t,   out = a ⊙ σ(b)  for  (a, b) = W gelu(y_t)
    λ = exp(-exp(ν) + i·exp(θ)),   γ = exp(g),   h (N,), B (N, D), C (D, N)

so that |λ| < 1 whatever is learned. At initialization λ is uniform on a ring of the complex plane, and γ = √(1 - |λ|²),
with which a state is as large as its inputs. For both sides a second scan runs from the end, with a C of its own.
"""

import math
from typing import Annotated, ClassVar, Unpack

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor, nn

from longlens.mixers.common import check_order
from longlens.mixers.diagonal import DiagonalRecurrence, diagonal_recurrence_reference
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import at_least_float32
from longlens.ops.exponentials import as_complex
from longlens.options import Is, Probability, Size


@register(
    "lru",
    "linear recurrence with eigenvalues on a ring",
    Traits(
        decays=True,
        special_init=True,
        stable=True,
        complex=True,
        normalized=True,
        recurrent=True,
        cost="L",
        state="2·state_size",
    ),
)
class LRU(DiagonalRecurrence):
    """A linear recurrence of all channels. (B, L, D) -> (B, L, D). The defaults are those for the images of the paper
    (its Tables 8 and 9: sCIFAR, and Pathfinder, where it is bidirectional).

    Args:
        state_size: State size N, complex; none for 3/4 of the width, as for Text and sCIFAR, or 1/2 for both sides.
        min_radius: Smallest absolute eigenvalue at initialization (0 for ListOps, 0.5 for Text, 0.999 for Path-X).
        max_radius: Largest absolute eigenvalue at initialization (0.99 for ListOps, 0.9 for Text, 0.9999 for Path-X).
        max_phase: Largest phase of an eigenvalue at initialization (π/10 for Path-X).
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_decay", "log_phase", "log_scale", "into")
    groups: ClassVar[dict[str, tuple[str, ...]]] = {"ssm": ("log_decay", "log_phase", "log_scale"), "b": ("into",)}

    def __init__(
        self,
        d_model: Size,
        state_size: Size | None = None,
        *,
        min_radius: Probability = 0.9,
        max_radius: Annotated[float, Gt(0), Le(1), Is("a number above 0 and at most 1")] = 0.999,
        max_phase: Annotated[float, Gt(0), Le(2 * math.pi), Is("a number above 0 and at most 2π")] = 2 * math.pi,
        bidirectional: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(d_model, bidirectional=bidirectional, **factory)
        check_order(min_radius=min_radius, max_radius=max_radius)
        if state_size is None:
            state_size = max(1, d_model // 2 if bidirectional else 3 * d_model // 4)
        self.state_size = state_size
        self.min_radius, self.max_radius = min_radius, max_radius
        self.max_phase = max_phase
        self.log_decay = nn.Parameter(torch.empty(state_size, **factory))  # ν
        self.log_phase = nn.Parameter(torch.empty(state_size, **factory))  # θ
        self.log_scale = nn.Parameter(torch.empty(state_size, **factory))  # g
        self.into = nn.Parameter(torch.empty(state_size, d_model, 2, **factory))  # B
        self.out = nn.Parameter(torch.empty(d_model, state_size * (2 if bidirectional else 1), 2, **factory))  # C
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Lemma 3.2 of the paper: |λ|² is uniform for a λ uniform on a ring. B and C as in its appendix A."""
        super().reset_parameters()
        square, phase = (torch.empty_like(at_least_float32(self.log_decay)) for _ in range(2))
        tiny = torch.finfo(square.dtype).tiny
        square.uniform_(self.min_radius**2, self.max_radius**2)
        square.clamp_(max(tiny, self.min_radius**2), 1 - torch.finfo(square.dtype).eps)
        self.log_decay.copy_(torch.log(-0.5 * torch.log(square)))
        self.log_scale.copy_(0.5 * torch.log1p(-square))
        self.log_phase.copy_(phase.uniform_(0, self.max_phase).clamp_(min=tiny).log_())
        nn.init.normal_(self.into, std=(2 * self.d_model) ** -0.5)
        nn.init.normal_(self.out, std=self.state_size**-0.5)

    def recurrence(self) -> tuple[Tensor, Tensor, Tensor]:
        rates = torch.complex(-at_least_float32(self.log_decay).exp(), at_least_float32(self.log_phase).exp())
        return rates, at_least_float32(self.log_scale).exp()[:, None] * as_complex(self.into), as_complex(self.out)


def lru_reference(layer: LRU, x: Tensor) -> Tensor:
    """(B, L, D) -> (B, L, D), by the formula above: a plain loop over the steps."""
    decay = torch.exp(torch.complex(-layer.log_decay.exp(), layer.log_phase.exp()))  # λ
    b, c = torch.view_as_complex(layer.into), torch.view_as_complex(layer.out)
    y = diagonal_recurrence_reference(decay, layer.log_scale.exp().unsqueeze(-1) * b, c, x) + layer.skip * x
    left, right = (F.gelu(y) @ layer.out_proj.weight.T + layer.out_proj.bias).chunk(2, dim=-1)
    return left * torch.sigmoid(right)
