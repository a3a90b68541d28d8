"""Luna (Ma et al. 2021, "Luna: Linear Unified Nested Attention"): two attentions by way of a short memory P (M, D).

    pack      Y_P = Attention(P·W_pq, X·W_pc, X·W_pc)        (M, D): the memory attends to the sequence
    unpack    Y_X = Attention(X·W_q, Y_P·W_c, Y_P·W_c)·W_o   (L, D): the sequence attends to the packed memory

Both are softmax attentions of several heads, in O(L·M). Keys and values are the same, as in the official code.

The causal form cannot divide by a softmax over the whole sequence. Each position packs a running mean instead, with
weights ω ≥ 0 that no other position enters; for each head

    ω_s = softplus(P·W_pq·(x_s·W_pc)ᵀ/√d)  (M)      C_t = 1/t·Σ_{s ≤ t} ω_s ⊗ x_s·W_c  (M, d)
    y_t = softmax(x_t·W_q·C_tᵀ/√d)·C_t

In the original, the packed memory is the next layer's P, and the first layer's alone is learned. Here each learns one.
Sinusoids of its positions are added to P, as in the official code with sinusoidal positions.
"""

import math
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.mixers.common import check_heads, check_inputs, check_step, hide_padding, merge_heads, split_heads
from longlens.mixers.common import sinusoids as waves_of_positions
from longlens.mixers.registry import Factory, Traits, register
from longlens.ops.checks import at_least_float32
from longlens.ops.linear_attention import causal_product
from longlens.options import Probability, Size


@register(
    "luna",
    "attention through a packed memory",
    Traits(stable=True, cost="L", state="memory·D"),
    size_note="each layer learns its 256 memory tokens, and has five projections instead of four",
)
class LunaAttention(nn.Module):
    """Multi-head attention through a packed memory. (B, L, D) -> (B, L, D). The defaults are those of Luna-256 and of
    the official code, XuezheMax's fairseq-apollo.

    Args:
        heads: Number of heads H of both attentions.
        memory: Number of memory tokens M.
        sinusoids: Add sinusoidal positions to the memory, as in the official code, which does not where those of the
            tokens are learned.
        activation: Activation of the causal weights ω: softplus, log₂(1 + 2ˣ), or elu, elu(x) + 1; both are 1 at 0.
        dropout: Dropout of the weights of both attentions.
    """

    def __init__(
        self,
        d_model: Size,
        heads: Size = 8,
        *,
        memory: Size = 256,
        sinusoids: bool = True,
        activation: Literal["softplus", "elu"] = "softplus",
        bidirectional: bool = True,
        bias: bool = True,
        dropout: Probability = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_heads(d_model, heads)
        self.d_model, self.heads = d_model, heads
        self.activation, self.dropout = activation, dropout
        self.bidirectional = bidirectional
        self.memory = nn.Parameter(torch.empty(memory, d_model, **factory))
        self.waves = nn.Buffer(torch.empty(memory, d_model, **factory)) if sinusoids else None
        self.pq_proj, self.pc_proj = (nn.Linear(d_model, d_model, bias=bias, **factory) for _ in range(2))
        self.q_proj, self.c_proj = (nn.Linear(d_model, d_model, bias=bias, **factory) for _ in range(2))
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the official code: Xavier-uniform, those that go into an attention with a gain of 1/√2; P as embeddings
        of variance 1. All biases are 0."""
        nn.init.normal_(self.memory)
        if self.waves is not None:
            self.waves.copy_(waves_of_positions(len(self.waves), self.d_model, self.waves.device))
        for projection in (self.pq_proj, self.pc_proj, self.q_proj, self.c_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1.0 if projection is self.out_proj else math.sqrt(0.5))
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        check_inputs(x, mask, self.d_model)
        x = hide_padding(x, mask)
        attended = self._both_sides(x, mask) if self.bidirectional else self._causal(x, mask)
        return self.out_proj(merge_heads(attended))

    def _both_sides(self, x: Tensor, mask: Tensor | None) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        context = self._split(self.pc_proj(x))  # (B, H, L, d)
        questions = self._questions().expand(x.shape[0], -1, -1, -1)
        if mask is not None:  # a row without tokens packs its padding, which is 0
            mask = (mask | ~mask.any(dim=1, keepdim=True))[:, None, None, :]
        packed = F.scaled_dot_product_attention(questions, context, context, attn_mask=mask, dropout_p=dropout_p)
        packed = self._split(self.c_proj(merge_heads(packed)))  # (B, H, M, d)
        return F.scaled_dot_product_attention(self._split(self.q_proj(x)), packed, packed, dropout_p=dropout_p)

    def _causal(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The running mean C_t never exists: only its products with x_t·W_q, and of the softmax with it."""
        weights = self._pack_weights(x)  # (B, H, L, M)
        if mask is None:
            count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        else:
            weights = weights * mask[:, None, :, None]
            count = mask.cumsum(1).clamp_min(1)[:, None, :, None]
        query, context = (self._split(projection(x)) for projection in (self.q_proj, self.c_proj))
        scores = causal_product(query * query.shape[-1] ** -0.5, context, weights) / count
        attention = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        return (causal_product(attention, weights, context) / count).to(query.dtype)

    def step(self, x: Tensor, state: tuple[Tensor, int] | None = None) -> tuple[Tensor, tuple[Tensor, int]]:
        """The state is Σ ω_s ⊗ x_s·W_c (B, H, M, d) of the tokens so far, and how many they were."""
        check_step(x, self.d_model, causal=not self.bidirectional)
        x = x.unsqueeze(1)
        query, context = (self._split(projection(x)) for projection in (self.q_proj, self.c_proj))  # (B, H, 1, d)
        sums, seen = (0, 0) if state is None else state
        sums, seen = sums + at_least_float32(self._pack_weights(x).mT * context), seen + 1
        packed = (sums / seen).to(query.dtype)  # (B, H, M, d)
        attended = F.scaled_dot_product_attention(query, packed, packed)
        return self.out_proj(attended.flatten(1)), (sums, seen)

    def _pack_weights(self, x: Tensor) -> Tensor:
        """ω: (B, L, D) -> (B, H, L, M)"""
        scores = self._split(self.pc_proj(x)) @ (self._questions() * (self.d_model // self.heads) ** -0.5).mT
        weights = F.softplus(scores, beta=math.log(2.0)) if self.activation == "softplus" else F.elu(scores) + 1.0
        return F.dropout(weights, self.dropout, self.training)

    def _questions(self) -> Tensor:
        """What the memory asks for, (1, H, M, d)"""
        memory = self.memory if self.waves is None else self.memory + self.waves
        return self._split(self.pq_proj(memory).unsqueeze(0))

    def _split(self, x: Tensor) -> Tensor:
        return split_heads(x, self.heads)


def luna_reference(layer: LunaAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The formulas above: two attentions, or one to the running mean C_t of each token, (B, L, D) -> (B, L, D)."""
    root = math.sqrt(layer.d_model // layer.heads)
    tokens = (torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask)[:, None, :, None]  # (B, 1, L, 1)
    memory = layer.memory if layer.waves is None else layer.memory + layer.waves
    questions = layer._split(layer.pq_proj(memory).unsqueeze(0))  # (1, H, M, d)
    query, packing = layer._split(layer.q_proj(x)), layer._split(layer.pc_proj(x))  # (B, H, L, d)
    scores = packing @ questions.mT / root  # (B, H, L, M)
    if layer.bidirectional:
        weights = scores.masked_fill(~tokens, -math.inf).softmax(dim=2)
        packed = layer._split(layer.c_proj(merge_heads(weights.mT @ packing))).unsqueeze(2)  # (B, H, 1, M, d)
    else:
        weights = torch.log2(1 + 2**scores) if layer.activation == "softplus" else F.elu(scores) + 1
        context = layer._split(layer.c_proj(x))
        sums = ((weights * tokens).unsqueeze(-1) * context.unsqueeze(-2)).cumsum(dim=2)  # (B, H, L, M, d)
        packed = sums / tokens.cumsum(dim=2).clamp_min(1).unsqueeze(-1)
    attention = (query.unsqueeze(-2) @ packed.mT / root).softmax(dim=-1)  # (B, H, L, 1, M)
    return layer.out_proj(merge_heads((attention @ packed).squeeze(-2)))
