"""LSTM (Hochreiter & Schmidhuber 1997, Long Short-Term Memory; with the forget gate of Gers et al. 2000).

i, f, o = σ(W x_t + U h_{t-1} + b)  (each with its own W, U, b),   g = tanh(W x_t + U h_{t-1} + b)
c_t = f ⊙ c_{t-1} + i ⊙ g,   h_t = o ⊙ tanh(c_t),   y_t = out(h_t),   c, h (H,)
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from longlens.mixers.common import check_inputs, check_step, hide_padding
from longlens.mixers.registry import Factory, Traits, register
from longlens.options import Size


@register(
    "lstm", "gated nonlinear recurrence", Traits(decays=True, gated=True, recurrent=True, cost="L", state="2·hidden")
)
class LSTM(nn.Module):
    """``nn.LSTM`` of one layer, and a projection of its outputs back to the width. (B, L, D) -> (B, L, D).

    Args:
        hidden: Number of units H; none for half of the width: with the projection 3.5·D² parameters, where as many
            units as the width would have 9·D².
        forget_bias: Bias of the forget gates at the start (Gers et al. 2000, Jozefowicz et al. 2015); none leaves it
            random.
    """

    def __init__(
        self, d_model: Size, hidden: Size | None = None, *, forget_bias: float | None = 1.0, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        hidden = max(1, d_model // 2) if hidden is None else hidden
        self.d_model = d_model
        self.hidden, self.forget_bias = hidden, forget_bias
        self.lstm = nn.LSTM(d_model, hidden, batch_first=True, **factory)
        self.out_proj = nn.Linear(hidden, d_model, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.lstm.reset_parameters()
        self.out_proj.reset_parameters()
        if self.forget_bias is not None:
            forget = slice(self.hidden, 2 * self.hidden)  # the gates are stacked as i, f, g, o, with two biases each
            self.lstm.get_parameter("bias_ih_l0")[forget] = self.forget_bias
            self.lstm.get_parameter("bias_hh_l0")[forget] = 0.0

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        check_inputs(x, mask, self.d_model)
        if x.shape[1] == 0:  # which torch refuses
            return self.out_proj(x[..., :1].expand(-1, -1, self.hidden))
        return self.out_proj(self._recur(hide_padding(x, mask), None)[0])

    def step(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The state is h, c (1, B, H)."""
        check_step(x, self.d_model, causal=True)
        y, state = self._recur(x.unsqueeze(1), state)
        return self.out_proj(y.squeeze(1)), state

    def prefill(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        check_inputs(x, None, self.d_model)
        if x.shape[1] == 0:
            return self(x), None
        y, state = self._recur(x, None)
        return self.out_proj(y), state

    def _recur(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # few processors have it in half precision
            with torch.autocast("cpu", enabled=False):
                return self.lstm(x.to(self.out_proj.weight.dtype), state)
        return self.lstm(x, state)


def lstm_reference(layer: LSTM, x: Tensor) -> Tensor:
    """(B, L, D) -> (B, L, D), gate by gate as in the formula above."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    w, u, bias, more = (layer.lstm.get_parameter(name) for name in names)
    hidden = cell = x.new_zeros(len(x), layer.hidden)
    outputs = []
    for token in x.unbind(1):
        i, f, g, o = (token @ w.T + hidden @ u.T + bias + more).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        outputs.append(layer.out_proj(hidden))
    return torch.stack(outputs, dim=1)
