"""The sizes and choices of a model around its mixer. No torch here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from longlens.options import Is, Options, Probability, Size


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """What is the same for every mixer.

    Args:
        depth: Number of blocks.
        width: Channels of a token.
        norm: Normalization over the channels of a token (layer; by their size alone, rms or, with one gain, scale), or
            over all tokens of a batch (never in a language model).
        prenorm: Pre-norm: normalize the input of each sub-layer; otherwise the residual sum.
        final_norm: With pre-norm, normalize once more before the head.
        positions: Positional encoding; rotary rotates queries and keys instead of being added.
        ffn: Feedforward sub-layer: plain, gated, or none.
        ffn_ratio: Inner width of the feedforward sub-layer, as a multiple of the width.
        ffn_activation: Activation of the feedforward sub-layer.
        pooling: Vector of a sequence: the mean of its tokens, its last token, or that of a learned token before it.
        head_width: Inner width of a head of two layers that classifies; none for one layer (for pairs, the width).
        tied: Share the weights of the embedding with the head of a language model.
        dropout: Dropout of the embedding and of what each sub-layer returns.
        embedding_dropout: Dropout of the embedding; none for that of the sub-layers.
        ffn_dropout: Dropout inside of the feedforward sub-layer.
        tied_dropout: Drop the same channels at all positions of a sequence, in the embedding and in each block.
    """

    depth: Annotated[int, Ge(1), Le(10_000), Is("a whole number from 1 to 10,000")] = 4
    width: Annotated[int, Ge(1), Le(2**20), Is("a whole number from 1 to 2^20")] = 64
    norm: Literal["layer", "batch", "scale", "rms"] = "layer"
    prenorm: bool = True
    final_norm: bool = True
    positions: Literal["none", "sinusoidal", "learned", "rotary"] = "sinusoidal"
    ffn: Literal["plain", "glu", "none"] = "plain"
    ffn_ratio: Annotated[float, Gt(0), Le(1000), Is("a number above 0, at most 1000")] = 4.0
    ffn_activation: Literal["gelu", "silu", "relu"] = "gelu"
    pooling: Literal["mean", "last", "cls"] = "mean"
    head_width: Size | None = None
    tied: bool = False
    dropout: Probability = 0.0
    embedding_dropout: Probability | None = None
    ffn_dropout: Probability = 0.0
    tied_dropout: bool = False
