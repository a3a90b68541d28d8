"""What several layers share: the check of their inputs, the projections of attention, and the frame around a long
convolution."""

from abc import abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.ops.long_conv import long_conv
from longlens.ops.rotary import rotate


def check_inputs(x: Tensor, mask: Tensor | None, d_model: int) -> None:
    """Refuse what is not (B, L, D) with a boolean mask (B, L) or None."""
    for name, given in (("x", x), ("mask", mask)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a Tensor, got a {type(given).__name__}")
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise BadInput(f"x must have the shape (batch, length, {d_model}), got {tuple(x.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
        raise BadInput(
            f"mask must be boolean with the shape (batch, length) = {tuple(x.shape[:2])}, True for tokens, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )


def check_step(x: Tensor, d_model: int, *, causal: bool) -> None:
    """Refuse what is not one token of each sequence, (B, D)."""
    if not causal:
        raise BadInput("step needs a causal layer: this one sees both sides")
    if x.ndim != 2 or x.shape[-1] != d_model:
        raise BadInput(f"x must have the shape (batch, {d_model}) in a step, got {tuple(x.shape)}")


def check_heads(d_model: int, heads: int) -> None:
    if heads < 1 or d_model % heads:  # a layer of one's own may say int where it means Size
        raise BadInput(f"heads must divide the width of the layer, got heads={heads} and a width of {d_model}")


def hide_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, L, D) with 0 in the place of padding."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def has_kernel(layer: nn.Module) -> bool:
    """Whether a layer is, or contains, a convolution that can be looked at."""
    return callable(getattr(layer, "kernel", None))


class MultiHead(nn.Module):
    """Queries, keys and values of several heads, and a projection of what they attend to. A layer derives from it and
    writes ``attend``.

    Args:
        d_model: Width D, a multiple of the number of heads.
        heads: Number of heads H.
        bias: Biases in the projections.
        dropout: Dropout of the attention weights.
        rotary: Rotate queries and keys by their positions (Su et al. 2021).
    """

    parts = 3  # of in_proj: queries, keys and values

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(d_model, heads)
        if rotary and d_model // heads % 2:
            raise BadInput(f"rotary positions need heads of even width, got {d_model} / {heads}")
        self.d_model = d_model
        self.heads = heads
        self.dropout = dropout
        self.rotary = rotary
        self.in_proj = nn.Linear(d_model, self.parts * d_model, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)

    @property
    def dropout_p(self) -> float:
        """Dropout of the attention weights, in training alone."""
        return self.dropout if self.training else 0.0

    def reset_parameters(self) -> None:
        """As ``nn.MultiheadAttention``: Xavier-uniform projections of the input, biases 0.

        A layer calls it at the end of its ``__init__``, and extends it with what else it has.
        """
        nn.init.xavier_uniform_(self.in_proj.weight)
        self.out_proj.reset_parameters()
        for projection in (self.in_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)  # what is not a number there would still be one after a weight of 0
        return self._merge(self.attend(*self._project(x), mask))

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Three of (B, H, L, d) and a mask (B, L) or None -> (B, H, L, d)."""

    def _project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, D) -> three of (B, H, L, d)"""
        query, key, value = self._split(x)
        if self.rotary:
            query, key = rotate(query, start), rotate(key, start)
        return query, key, value

    def _split(self, x: Tensor) -> list[Tensor]:
        """(B, L, D) -> each projection, (B, H, L, d)"""
        parts = self.in_proj(x).chunk(self.parts, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def _merge(self, attended: Tensor) -> Tensor:
        """(B, H, L, d) -> (B, L, D)"""
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """y = out(gelu(k * x + skip ⊙ x)), the frame that S4 and its successors have around their kernels, with
    out(u) = a ⊙ σ(b) for the two halves a, b of a projection of u. A layer derives from it and writes ``kernel``.

    Args:
        d_model: Width D: channels, each with a kernel of its own.
        bidirectional: See both sides, with a second kernel for later inputs.
        output: Output projection: glu as above, or linear.
    """

    def __init__(
        self,
        d_model: int,
        *,
        bidirectional: bool = False,
        output: Literal["glu", "linear"] = "glu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.bidirectional = bidirectional
        self.output = output
        self.skip = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.out_proj = nn.Linear(d_model, d_model * (2 if output == "glu" else 1), device=device, dtype=dtype)

    @property
    def kernels(self) -> int:
        """How many kernels there are: D, or 2D for both sides."""
        return self.d_model * (2 if self.bidirectional else 1)

    def reset_parameters(self) -> None:
        """A layer calls it at the end of its ``__init__``, and extends it with the parameters of its kernel."""
        nn.init.normal_(self.skip)
        self.out_proj.reset_parameters()

    @abstractmethod
    def kernel(self, length: int) -> Tensor:
        """(D, length): the weights of the inputs 0, 1, … steps back; for both sides (2D, length), of which the last D
        are the weights of the inputs 1, 2, … steps ahead."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). mask: (B, L), True for tokens, False for padding, which no token then sees."""
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        kernels = self.kernel(x.shape[1]).chunk(2 if self.bidirectional else 1)
        return self._out(long_conv(x, *kernels) + self.skip * x)

    def _out(self, y: Tensor) -> Tensor:
        y = self.out_proj(F.gelu(y))
        return F.glu(y, dim=-1) if self.output == "glu" else y


class StateSpace(Convolution):
    """A convolution whose kernel is that of a linear recurrence, so that it can also run step by step."""

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """One token of each sequence, (B, D), and what came before, None at the start -> (B, D) and the next state.
        Step by step, the outputs are those of ``forward``."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        y, state = self.recur(x, state)
        return self._out(y + self.skip * x), state

    @abstractmethod
    def recur(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """A step of the kernel alone: (B, D) and a state, None at the start -> (B, D) and the next state."""
