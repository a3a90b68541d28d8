"""Theorem B.1 of the paper: one head of softmax attention can compute y = k * u, a channel of a state-space layer.

Tokens are u'_i = (e_i, u_i): the indicator of the position, L + 1 numbers, and the input. An empty token (e_{L+1}, 0)
is appended. With A the matrix of the convolution, A[i, j] = k_{i-j+1} for j ≤ i and 0 beyond (i, j = 1 … L),
c_i = k_{i+1} + … + k_L, and c the sum of the whole kernel, the head has

    W^q = [ ln A    ln c_i ]      W^k = √d · I      W^v = c      d = L + 1
          [ ln 0    ln c   ]

so that its scores u'W^q (u'W^k)ᵀ / √d are W^q itself. Each row of exp(W^q) has the sum c: softmax gives A / c with the
rest of the weight on the empty token, whose value is 0, and W^v takes c back. The first L outputs are A·u.

What the printed proof assumes:

- the encoding is an indicator: a token is as wide as the sequence is long, and a longer sequence needs another head;
- the input has no influence on the scores, only on the values: attention is used as a fixed matrix;
- the empty token has the value 0, and its own output is not used;
- no causal mask: the empty token stands at the end, and all tokens must see it. Under a causal mask it must stand first
  (all other weights on later tokens are 0, so nothing else changes);
- the kernel is non-negative, as it takes its logarithms, though it claims "any kernel".

Where it is wrong or undefined, and what is done here:

- Negative numbers in the kernel have no logarithm. One head of this kind cannot have both signs at all: weights of a
  softmax are positive, and W^v is one factor for all of them. Two heads can: k = k⁺ - k⁻, and the output projection
  takes the difference.
- ln 0 = -∞ cannot be a weight: its product with the zeros of the indicator is not a number. It is -1000 here. A softmax
  of finite scores is never 0, so over the real numbers the theorem holds in the limit; in floating point, exp(-1000) is
  0 and it holds as it is.
- A kernel of zeros has c = 0 and rows without any weight. All weight goes to the empty token, and W^v = 0.
- Tokens have L + 2 numbers, not L + 1: the encoding *and* the input. W^q and W^k have a row of zeros for the input. W^v
  reads the input alone; as printed, c·I would also carry the encoding into the output.
- W^q has ln(A / c) and ln(c_i / c), which softmax cannot tell from ln A and ln c_i: scores of large weights are near 0
  whatever the scale of the kernel, where floating point is finest. c_i is right as printed, if i begins at 1.
- k_i = C Aⁱ B is printed for a kernel that begins with k_1; the first weight of a state-space layer is k_1 = CB.

Not covered: kernels that reach into the future, layers whose kernel depends on the input (gates, selection), what is
around the kernel in a layer, and whether training would find such weights. A skip D·u is: it is added to k_1.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from longlens.errors import BadInput
from longlens.paper.figure1 import initial_kernels
from longlens.paper.index import Computed, Found
from longlens.reports.sheet import Column, Sheet

LOG_ZERO = -1000.0  # as a score; the largest of a row is at least -ln(L + 1), and exp(-746) is 0 in float64
LAYERS = ("s4", "s4d", "sgconv")
NOTED, FAR = 128, 64  # length of the kernels in the notes, and how far back one of them is looked at
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Heads:
    """H heads of softmax attention and their output projection, for sequences of at most L tokens and the empty one."""

    query: Tensor  # W^q (H, L + 2, L + 1)
    key: Tensor  # W^k (H, L + 2, L + 1)
    value: Tensor  # W^v (H, L + 2, 1)
    output: Tensor  # W^o (H, 1)

    @property
    def count(self) -> int:
        """How many heads."""
        return self.query.shape[0]

    @property
    def width(self) -> int:
        """How many numbers a token has."""
        return self.query.shape[1]

    @property
    def numbers(self) -> int:
        """How many numbers are in all weights."""
        return sum(weight.numel() for weight in (self.query, self.key, self.value, self.output))

    def to(self, dtype: torch.dtype) -> "Heads":
        """With weights of another precision."""
        return Heads(*(weight.to(dtype) for weight in (self.query, self.key, self.value, self.output)))

    def attend(self, tokens: Tensor) -> Tensor:
        """Self-attention: tokens (N, L + 2) to the outputs (N,)."""
        query, key, value = (_multiply(tokens, weight) for weight in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]  # (H, N, 1)
        return _multiply(mixed[..., 0].mT, self.output)[:, 0]

    def attention_weights(self, tokens: Tensor) -> Tensor:
        """What softmax gives: tokens (N, L + 2) to (H, N, N)."""
        query, key = _multiply(tokens, self.query), _multiply(tokens, self.key)
        return torch.softmax(_multiply(query, key.mT) / math.sqrt(key.shape[-1]), dim=-1)


def encode(u: Tensor, length: int) -> Tensor:
    """The tokens of an input u (N,), N ≤ ``length``, and the empty token: (N + 1, length + 2)."""
    if u.ndim != 1 or not 1 <= len(u) <= length:
        raise BadInput(f"u must have the shape (N,) with N from 1 to the kernel's {length}, got {tuple(u.shape)}")
    positions = torch.eye(length + 1, dtype=u.dtype, device=u.device)
    positions = torch.cat([positions[: len(u)], positions[-1:]])  # the empty token is the last one of any sequence
    return torch.cat([positions, torch.cat([u, u.new_zeros(1)])[:, None]], dim=1)


def head_for_kernel(kernel: Tensor) -> Heads:
    """The head that convolves with a non-negative kernel (L,)."""
    kernel = _check_kernel(kernel)
    if (kernel < 0).any():
        raise BadInput(
            f"kernel must have no number below 0 for one head, got {kernel.min().item():g}; "
            "use heads_for_signed_kernel, which takes two heads"
        )
    length, total = len(kernel), kernel.sum()
    masses = kernel.new_zeros(length + 1, length + 1)  # exp(W^q), row by row
    masses[:length, :length] = _convolution_matrix(kernel)
    masses[: length - 1, length] = kernel.flip(0).cumsum(0).flip(0)[1:]  # c_i; c - (k_1 + … + k_i) would cancel
    masses[length, length] = total
    if total == 0:
        masses[:, length] = 1.0
    scores = (masses.log() - torch.where(total > 0, total, 1.0).log()).clamp(min=LOG_ZERO)

    ignored = kernel.new_zeros(1, length + 1)  # the row of the input
    query = torch.cat([scores, ignored])
    key = torch.cat([math.sqrt(length + 1) * torch.eye(length + 1).to(kernel), ignored])
    value = torch.cat([kernel.new_zeros(length + 1), total[None]])
    return Heads(query[None], key[None], value[None, :, None], kernel.new_ones(1, 1))


def heads_for_signed_kernel(kernel: Tensor) -> Heads:
    """The two heads, of the positive and of the negative part, whose difference convolves with any kernel (L,)."""
    kernel = _check_kernel(kernel)
    above, below = head_for_kernel(kernel.clamp(min=0)), head_for_kernel((-kernel).clamp(min=0))
    parts = zip((above.query, above.key, above.value), (below.query, below.key, below.value), strict=True)
    return Heads(*(torch.cat(pair) for pair in parts), output=kernel.new_tensor([[1.0], [-1.0]]))


def heads_for(kernel: Tensor) -> Heads:
    """One head if no number of the kernel is below 0, otherwise two."""
    return heads_for_signed_kernel(kernel) if (kernel < 0).any() else head_for_kernel(kernel)


def express(kernel: Tensor, u: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """y = k * u (N,) for a kernel (L,) and an input (N,), N ≤ L, by softmax attention with the theorem's weights. They
    are computed in float64 and rounded to ``dtype``, in which the attention runs."""
    return _run(heads_for(kernel), u, dtype)


def _run(heads: Heads, u: Tensor, dtype: torch.dtype) -> Tensor:
    tokens = encode(u.to(dtype), heads.width - 2)
    return heads.to(dtype).attend(tokens)[:-1]  # without the output of the empty token


def reproduce_theorem(lengths: tuple[int, ...] = (16, 63, 256, 1024), seed: int = 0) -> Sheet:
    """Build the heads of Theorem B.1 for kernels of layers and random ones, and compare them with convolutions. Inputs
    are random numbers that bfloat16 can hold. The reference is a direct convolution in float64."""
    columns = [Column("kernel"), *(Column(name, number=True) for name in ("length", "heads", "width"))]
    columns += [Column("weights", rank=2, number=True), *(Column(name, number=True) for name in PRECISIONS)]
    sheet = Sheet("Theorem B.1: convolutions by softmax attention", [*columns, Column("conv.", rank=1, number=True)])
    sheet.notes = _notes(max(lengths))
    random = torch.Generator().manual_seed(seed)
    for length in lengths:
        for name, kernel in _kernels(length, seed, random).items():
            u = torch.randn(length, generator=random, dtype=torch.float64).bfloat16().double()
            heads = heads_for(kernel)
            sizes = [f"{number:,}" for number in (length, heads.count, heads.width, heads.numbers)]
            sheet.rows.append([name, *sizes, *(f"{found:.0e}" for found in _differences(kernel, heads, u).values())])
    return sheet


def _kernels(length: int, seed: int, random: torch.Generator) -> dict[str, Tensor]:
    """Kernels (length,) by what they are."""
    found: dict[str, Tensor] = {}
    for name in LAYERS:
        steps, kernels = initial_kernels(name, length=length, width=4, seed=seed)
        found[name] = kernels[0, steps >= 0]  # of a layer that sees both sides, the past
    found["random, signed"] = torch.randn(length, generator=random, dtype=torch.float64)
    found["random, ≥ 0"] = torch.rand(length, generator=random, dtype=torch.float64)
    found["exp(-t)"] = torch.exp(-torch.arange(length, dtype=torch.float64))
    return found


def _differences(kernel: Tensor, heads: Heads, u: Tensor) -> dict[str, float]:
    """How far attention is from the convolution in each precision, and how far the convolution itself in bfloat16."""
    exact = _convolve(kernel, u)
    outputs = {name: _run(heads, u, dtype) for name, dtype in PRECISIONS.items()}
    outputs["conv."] = _convolve(kernel.bfloat16().double(), u).bfloat16()
    largest = exact.abs().max()
    return {name: ((output.double() - exact).abs().max() / largest).item() for name, output in outputs.items()}


def _convolve(kernel: Tensor, u: Tensor) -> Tensor:
    return torch.from_numpy(np.convolve(kernel.numpy(), u.numpy())[: len(u)])


def _notes(length: int) -> list[str]:
    """What length and precision do."""
    steps = torch.arange(NOTED, dtype=torch.float64)
    steep, impulse = torch.exp(-steps), (steps == 0).double()
    found = {name: express(steep, impulse, dtype=dtype).double() for name, dtype in PRECISIONS.items()}
    off = {name: f"{(weights[FAR] / steep[FAR] - 1).abs().item():.1g}" for name, weights in found.items()}
    gone = int((found["float32"] == 0).nonzero()[0])
    signs = 1 - 2 * (steps % 2)
    canceled = _differences(signs, heads_for(signs), torch.ones_like(signs))
    numbers = (length + 2) * (2 * (length + 1) + 1) + 1
    return [
        "float64, float32, bfloat16: largest |attention - convolution|, relative to the largest |output|, with weights "
        "and inputs of that precision; conv.: of the convolution itself, with its kernel and output in bfloat16. "
        "heads: 2 where the kernel has numbers below 0, which have no logarithm.",
        "Length: a token has L + 2 numbers (its position as an indicator, and the input), and a head more than 2·L² "
        f"weights: {numbers:,} for a kernel of {length:,} numbers. They serve sequences of at most L tokens.",
        "Precision: a score is the logarithm of a weight, so rounding it by a fraction ε changes the weight by "
        f"ε·|score|. For k_t = exp(-t), the weight {FAR} steps back is off by a fraction of {off['float64']} in "
        f"float64, {off['float32']} in float32 and {off['bfloat16']} in bfloat16, and weights from {gone} steps on are "
        "0 in float32. Such weights are small beside the others: outputs hardly show it.",
        "Errors grow with the sum of |k|, not with the output, when the two heads cancel: for k_t = (-1)^t and a "
        f"constant input, at length {NOTED}, the difference is {canceled['float64']:.1g} in float64, "
        f"{canceled['float32']:.1g} in float32 and {canceled['bfloat16']:.1g} in bfloat16, where the convolution "
        f"itself has {canceled['conv.']:.1g}.",
    ]


def _check_kernel(kernel: Tensor) -> Tensor:
    if kernel.ndim != 1 or len(kernel) == 0:
        raise BadInput(f"kernel must have the shape (L,) with L of at least 1, got {tuple(kernel.shape)}")
    kernel = kernel.detach().double()
    if not kernel.abs().sum().isfinite():
        raise BadInput(f"kernel must be finite and have a finite sum, got {kernel.abs().sum().item()}")
    return kernel


def _convolution_matrix(kernel: Tensor) -> Tensor:
    """A (L, L): A[i, j] = k[i - j] for j ≤ i, otherwise 0."""
    steps = torch.arange(len(kernel), device=kernel.device)
    back = steps[:, None] - steps
    return torch.where(back >= 0, kernel[back.clamp(min=0)], 0.0)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed in float32 if the numbers are shorter: as hardware does that multiplies them."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def _compute(results: Path) -> tuple[list[Any], Found]:
    sheet = reproduce_theorem()
    names = [column.name for column in sheet.columns]
    worst = max(float(row[names.index("float64")]) for row in sheet.rows)
    signed = [row[0] for row in sheet.rows if row[names.index("heads")] == "2"]
    sentences = [
        f"By softmax attention that is run as it stands, kernels of up to 1,024 numbers come out to {worst:.0e} of the "
        "largest output in float64.",
        f"One head is enough for non-negative kernels only; {'; '.join(dict.fromkeys(signed))} have negative numbers, "
        "of which the printed proof takes logarithms, and need two.",
    ]
    verdict = "does not hold" if worst > 1e-10 or signed else "holds"
    return [sheet], Found(verdict, "kernels with negative numbers, as S4's, need two heads", sentences)


STUDY = Computed(
    name="theorem-b1",
    title="One head of attention is a channel of a state-space layer",
    place="Theorem B.1, Appendix B",
    claim="One head of self-attention can express one channel of a state-space layer, for any kernel.",
    compute=_compute,
)
