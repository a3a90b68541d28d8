"""The gated Toeplitz unit of the Toeplitz neural network, TNN (Qin et al. 2023).

    y = (silu(x·W_u) ⊙ T·silu(x·W_v))·W_o,   T[i, j] = t_{i - j} = λ^|i - j|·RPE(i - j)      one T for each channel

It has E = ``expansion``·D channels. RPE, the relative position encoder, is a small network from a distance, which is a
single number, to E numbers, with K = ``rpe_layers`` layers between its first and its last:

    h_0 = n·w + b,   h_k = relu(h_{k-1} / rms(h_{k-1}))·W_k + b_k,   RPE(n) = relu(h_K / rms(h_K))·W + b

T is a convolution, O(L log L) with an FFT. A distance is not divided by the length: t_n is the same for any.

For the rows of an image, as in the official code for the Long Range Arena, there are two of them with an encoder each,
R along a row and C along a column. The code adds R·C·v and C·R·v, which are the same:

    y = (silu(x·W_u) ⊙ 2·C·R·silu(x·W_v))·W_o
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.common import check_inputs, hide_padding
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import no_autocast, working_dtype
from longlens.ops.long_conv import long_conv
from longlens.options import Count, Positive, Ratio, Size


@no_autocast  # bfloat16 could not count to 257
def toeplitz_kernel(encoder: Callable[[Tensor], Tensor], decay: float, distances: Tensor) -> Tensor:
    """t_n = decay^|n|·encoder(n), (E, length), of distances n, (length,), and an encoder (length, 1) -> (length, E)."""
    distances = distances.unsqueeze(1)
    return (decay ** distances.abs() * encoder(distances)).T


class PositionEncoder(nn.Module):
    """RPE: distances (length, 1) -> (length, E), in the precision of the distances."""

    def __init__(self, channels: int, *, width: int, layers: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        sizes = [1, *[width] * (layers + 1), channels]
        self.layers = nn.ModuleList(nn.Linear(size, following, **factory) for size, following in pairwise(sizes))

    def reset_parameters(self) -> None:
        for layer in self.layers:
            layer.reset_parameters()  # pyright: ignore[reportCallIssue]

    def forward(self, distances: Tensor) -> Tensor:
        parameters = [parameter.to(distances.dtype) for parameter in self.parameters()]
        hidden = F.linear(distances, *parameters[:2])
        for weight, bias in zip(parameters[2::2], parameters[3::2], strict=True):
            hidden = F.linear(F.relu(F.rms_norm(hidden, hidden.shape[-1:], eps=1e-16)), weight, bias)
        return hidden


# Table 10 has no gate for it, though its unit has one (u above).
@register("tnn", "gated Toeplitz matrices", Traits(decays=True, cost="L log L"))
class GatedToeplitz(nn.Module):
    """A gated Toeplitz matrix for each channel. (B, L, D) -> (B, L, D). Sizes as in the official code for ListOps and
    Text of the Long Range Arena, where decay was chosen for each task; here it is that of the language models.

    Args:
        expansion: Inner width E, as a multiple of the width; up to 3 in the paper.
        decay: Factor λ by which a weight shrinks with each step of distance; 1 turns decay off.
        rpe_layers: Number of inner layers of the position encoder, which makes weights of distances.
        rpe_width: Width of the inner layers of the position encoder.
        two_dimensional: Toeplitz matrices along rows and along columns where the task has images, as published for
            pixels; other sequences have one.
        shape: Height and width of the images whose rows make the sequence; None for other sequences.
    """

    def __init__(
        self,
        d_model: Size,
        *,
        expansion: Positive = 1.0,
        decay: Ratio = 0.99,
        rpe_layers: Count = 3,
        rpe_width: Size = 32,
        two_dimensional: bool = True,
        bidirectional: bool = True,
        bias: bool = True,
        shape: tuple[int, int] | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.d_model, self.decay = d_model, decay
        self.shape = shape if two_dimensional else None
        self.bidirectional = bidirectional
        inner = max(1, round(expansion * d_model))
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias, **factory)
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **factory)
        sizes: dict[str, Any] = {"width": rpe_width, "layers": rpe_layers}
        self.encoder = PositionEncoder(inner, **sizes, **factory)
        self.column_encoder = None if self.shape is None else PositionEncoder(inner, **sizes, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for part in (self.in_proj, self.out_proj, self.encoder, self.column_encoder):
            if part is not None:
                part.reset_parameters()

    def kernel(self, length: int) -> Tensor:
        """That along a row, in two dimensions."""
        return self._kernel(self.encoder, length)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        gate, value = F.silu(self.in_proj(x)).chunk(2, dim=-1)
        value = hide_padding(value, mask)
        return self.out_proj(gate * (self._convolve(value) if self.shape is None else self._convolve_image(value)))

    def _convolve_image(self, value: Tensor) -> Tensor:
        assert self.shape is not None
        height, width = self.shape
        if value.shape[1] != height * width:
            raise BadInput(
                f"x must have {height}·{width} tokens, those of an image, got {value.shape[1]}: "
                "choose two_dimensional=False for other sequences"
            )
        rows = self._convolve(value.reshape(-1, width, value.shape[-1])).view(-1, height, width, value.shape[-1])
        columns = self._convolve(rows.transpose(1, 2).flatten(0, 1), self.column_encoder)  # (B·width, height, E)
        return 2 * columns.view(-1, width, *rows.shape[1::2]).transpose(1, 2).flatten(1, 2)

    def _convolve(self, value: Tensor, encoder: nn.Module | None = None) -> Tensor:
        kernel = self._kernel(encoder or self.encoder, value.shape[1])
        return long_conv(value, *kernel.chunk(2 if self.bidirectional else 1))

    def _kernel(self, encoder: nn.Module, length: int) -> Tensor:
        weight = self.out_proj.weight
        steps = torch.arange(length, device=weight.device, dtype=working_dtype(weight.dtype))
        distances = [steps, -1 - steps] if self.bidirectional else [steps]
        return torch.cat(toeplitz_kernel(encoder, self.decay, torch.cat(distances)).chunk(len(distances), dim=1))


def coefficient_reference(layer: GatedToeplitz, distance: int, encoder: nn.Module | None = None) -> Tensor:
    """t_n, (E,), of one distance, by the formula above."""
    first, bias, *others = (encoder or layer.encoder).parameters()
    hidden = first[:, 0] * distance + bias
    for weight, bias in zip(others[::2], others[1::2], strict=True):
        hidden = weight @ torch.relu(hidden / hidden.square().mean().sqrt()) + bias
    return layer.decay ** abs(distance) * hidden


def tnn_reference(layer: GatedToeplitz, x: Tensor) -> Tensor:
    """y of one sequence (L, D), with the matrices T[i, j] = t_{i - j}, (L, L, E), in full."""
    length = len(x)
    t = torch.stack([coefficient_reference(layer, n) for n in range(1 - length, length)])  # (2L - 1, E)
    place = torch.arange(length, device=x.device)
    distance = place[:, None] - place
    matrix = t[distance + length - 1]
    if not layer.bidirectional:
        matrix = matrix.masked_fill((distance < 0).unsqueeze(-1), 0.0)
    gate, value = F.silu(layer.in_proj(x)).chunk(2, dim=-1)
    return layer.out_proj(gate * torch.einsum("ije,je->ie", matrix, value))
