"""The sizes and choices of a model around its mixer. No torch here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from longlens.options import Is, Options, Probability


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """What is the same for every mixer.

    Args:
        depth: Number of blocks.
        width: Channels of a token.
        norm: Normalization over the channels of a token, or over all tokens of a batch (never in a language model).
        prenorm: Pre-norm: normalize the input of each sub-layer; otherwise the residual sum.
        positions: Positional encoding; rotary rotates queries and keys instead of being added.
        ffn: Feedforward sub-layer: plain, gated, or none.
        ffn_ratio: Inner width of the feedforward sub-layer, as a multiple of the width.
        pooling: Vector of a sequence: the mean of its tokens, or its last token.
        tied: Share the weights of the embedding with the head of a language model.
        dropout: Dropout of the embedding and of each sub-layer.
    """

    depth: Annotated[int, Ge(1), Le(10_000), Is("a whole number from 1 to 10,000")] = 4
    width: Annotated[int, Ge(1), Le(2**20), Is("a whole number from 1 to 2^20")] = 64
    norm: Literal["layer", "batch"] = "layer"
    prenorm: bool = True
    positions: Literal["none", "sinusoidal", "learned", "rotary"] = "sinusoidal"
    ffn: Literal["gelu", "glu", "none"] = "gelu"
    ffn_ratio: Annotated[float, Gt(0), Le(1000), Is("a number above 0, at most 1000")] = 4.0
    pooling: Literal["mean", "last"] = "mean"
    tied: bool = False
    dropout: Probability = 0.0
