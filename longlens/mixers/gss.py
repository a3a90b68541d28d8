"""GSS (Mehta, Gupta, Cutkosky & Neyshabur 2022, Long Range Language Modeling via Gated State Spaces): a state space of
few channels, H < D, and a gate of many, F > D.

    v = gelu(x·W₁)              (B, L, F)
    u = gelu(x·W₂)              (B, L, H)
    y = DSS(LayerNorm(u))       (B, L, H)
    o = (y·W₃ ⊙ v)·W₄ + b       (B, L, D)

    DSS(u) = k * u + skip ⊙ u,   k[l] = Re Σ_n c_n·(exp(Λ_n) - 1)/Λ_n·exp(Λ_n·l),   Λ = -exp(a) + i·exp(ω)

with Λ the same in all channels, no step size, and all of a, ω, c and skip initialized as normal numbers.
"""

from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import check_heads, check_inputs, check_step, hide_padding
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import at_least_float32
from longlens.ops.exponentials import as_complex, decay_factors, step_exponentials, sum_of_exponentials
from longlens.ops.long_conv import long_conv
from longlens.options import Positive, Size


# The traits are those of Table 10, though its parameters are complex numbers, too.
@register(
    "gss",
    "gated diagonal state space",
    Traits(decays=True, stable=True, gated=True, cost="L log L", state="2·D/reduction·state_size"),
)
class GSS(nn.Module):
    """A gated state space. (B, L, D) -> (B, L, D). The paper has an expansion of 4 and a state of 512 in a block
    without a feedforward part; the smaller defaults here leave room for that part.

    Args:
        expansion: Width of the gate as a multiple of the width of the layer.
        reduction: Width of the layer as a multiple of the number of channels of the state space, a whole number.
        state_size: State size N of each channel of the state space, in complex numbers.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("real", "imag", "c")
    groups: ClassVar[dict[str, tuple[str, ...]]] = {"ssm": ("real", "imag"), "c": ("c",)}

    def __init__(
        self,
        d_model: Size,
        *,
        expansion: Positive = 2.0,
        reduction: Size = 4,
        state_size: Size = 128,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_heads(d_model, reduction, "reduction")
        self.d_model = d_model
        self.gates = max(1, round(expansion * d_model))  # F
        self.channels = d_model // reduction  # H
        self.in_proj = nn.Linear(d_model, self.gates + self.channels, bias=False, **factory)  # W₁ and W₂
        self.norm = nn.LayerNorm(self.channels, **factory)
        self.real = nn.Parameter(torch.empty(state_size, **factory))  # a
        self.imag = nn.Parameter(torch.empty(state_size, **factory))  # ω
        self.c = nn.Parameter(torch.empty(self.channels, state_size, 2, **factory))
        self.skip = nn.Parameter(torch.empty(self.channels, **factory))
        self.context_proj = nn.Linear(self.channels, self.gates, bias=False, **factory)  # W₃
        self.out_proj = nn.Linear(self.gates, d_model, **factory)  # W₄
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for part in (self.in_proj, self.norm, self.context_proj, self.out_proj):
            part.reset_parameters()
        for parameter in (self.real, self.imag, self.c, self.skip):
            nn.init.normal_(parameter)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        gate, u = self._project(x)
        u = hide_padding(u, mask)
        return self._out(long_conv(u, self.kernel(u.shape[1])) + self.skip * u, gate)

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The state is (B, H, N)."""
        check_step(x, self.d_model, causal=True)
        gate, u = self._project(x)
        weights, rates = self.modes()
        y, state = step_exponentials(weights, decay_factors(rates), u, state)
        return self._out(y + self.skip * u, gate), state

    def kernel(self, length: int) -> Tensor:
        return sum_of_exponentials(*self.modes(), length)

    def modes(self) -> tuple[Tensor, Tensor]:
        """The weights (H, N) and rates (1, N) of the exponentials that the kernel is a sum of."""
        rates = torch.complex(-at_least_float32(self.real).exp(), at_least_float32(self.imag).exp()).unsqueeze(0)
        return as_complex(self.c) * torch.expm1(rates) / rates, rates

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, u = F.gelu(self.in_proj(x)).split([self.gates, self.channels], dim=-1)
        return gate, self.norm(u)

    def _out(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj(self.context_proj(y) * gate)


def gss_reference(layer: GSS, x: Tensor) -> Tensor:
    """(B, L, D) -> (B, L, D), by the formulas above, with the state space as a recurrence."""
    w1, w2 = layer.in_proj.weight.split([layer.gates, layer.channels])
    v, u = F.gelu(x @ w1.T), F.gelu(x @ w2.T)
    u = F.layer_norm(u, (layer.channels,), layer.norm.weight, layer.norm.bias)
    poles = torch.complex(-layer.real.exp(), layer.imag.exp())  # Λ (N,)
    weights = torch.view_as_complex(layer.c) * (torch.exp(poles) - 1) / poles  # (H, N)
    state, outputs = torch.zeros_like(weights), []
    for u_t in u.unbind(1):
        state = torch.exp(poles) * state + u_t.unsqueeze(-1)  # (B, H, N)
        outputs.append((weights * state).sum(-1).real + layer.skip * u_t)
    y = torch.stack(outputs, dim=1)
    return ((y @ layer.context_proj.weight.T) * v) @ layer.out_proj.weight.T + layer.out_proj.bias
