"""LSTM (Hochreiter & Schmidhuber 1997, Long Short-Term Memory; with the forget gate of Gers et al. 2000).

i, f, o = σ(W x_t + U h_{t-1} + b)  (each with its own W, U, b),   g = tanh(W x_t + U h_{t-1} + b)
c_t = f ⊙ c_{t-1} + i ⊙ g,   h_t = o ⊙ tanh(c_t),   y_t = out(h_t),   c, h (H,)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from longlens.mixers.base import Config, Traits, register
from longlens.mixers.common import check_inputs, check_step, hide_padding


class LSTM(nn.Module):
    """``nn.LSTM`` of one layer, and a projection of its outputs back to the width.

    Args:
        d_model: D.
        hidden: H, the units.
        forget_bias: of the forget gates at the start; None leaves it random.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        forget_bias: float | None = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_model < 1 or hidden < 1:
            raise ValueError(f"d_model and hidden must be at least 1, got {d_model} and {hidden}")
        self.d_model, self.hidden, self.forget_bias = d_model, hidden, forget_bias
        self.lstm = nn.LSTM(d_model, hidden, batch_first=True, device=device, dtype=dtype)
        self.out_proj = nn.Linear(hidden, d_model, device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As torch does, but for the bias of the forget gates."""
        self.lstm.reset_parameters()
        self.out_proj.reset_parameters()
        if self.forget_bias is not None:
            forget = slice(self.hidden, 2 * self.hidden)  # the gates are stacked as i, f, g, o, with two biases each
            self.lstm.get_parameter("bias_ih_l0")[forget] = self.forget_bias
            self.lstm.get_parameter("bias_hh_l0")[forget] = 0.0

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which comes after them."""
        check_inputs(x, mask, self.d_model)
        if x.shape[1] == 0:  # which torch refuses
            return self.out_proj(x[..., :1].expand(-1, -1, self.hidden))
        return self.out_proj(self._recur(hide_padding(x, mask), None)[0])

    def step(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One token of each sequence, (B, D), and h, c (1, B, H), None at the start -> (B, D) and the next h, c."""
        check_step(x, self.d_model, causal=True)
        y, state = self._recur(x.unsqueeze(1), state)
        return self.out_proj(y.squeeze(1)), state

    def _recur(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # few processors have it in half precision
            with torch.autocast("cpu", enabled=False):
                return self.lstm(x.to(self.out_proj.weight.dtype), state)
        return self.lstm(x, state)

    def extra_repr(self) -> str:
        return f"{self.d_model}, hidden={self.hidden}, forget_bias={self.forget_bias}"


@register("lstm")
@dataclass(frozen=True, kw_only=True)
class LSTMConfig(Config):
    """LSTM of one layer.

    Args:
        hidden: units; None for half of the width: with its projection 3.5·D² parameters, where as many units as the
            width would have 9·D².
        forget_bias: of the forget gates at the start (Gers et al. 2000, Jozefowicz et al. 2015); None leaves it random.
    """

    hidden: int | None = None
    forget_bias: float | None = 1.0

    summary: ClassVar[str] = "gated nonlinear recurrence"
    traits: ClassVar[Traits] = Traits(decays=True, gated=True, recurrent=True, cost="L", state="2·hidden")

    def build(self, d_model, *, max_length=None, device=None, dtype=None) -> LSTM:
        hidden = max(1, d_model // 2) if self.hidden is None else self.hidden
        return LSTM(d_model, hidden, forget_bias=self.forget_bias, device=device, dtype=dtype)
