"""The sizes and choices of a model around its mixer, and of a text that it writes. No torch here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from longlens.options import Is, NonNegative, Options, Probability, Ratio, Seed, Size


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


@dataclass(frozen=True, kw_only=True)
class Writing(Options):
    """How a language model goes on with a text.

    Args:
        tokens: Number of tokens to write.
        temperature: Divisor of the scores: below 1, likely tokens are chosen even more often; 0 always takes the
            likeliest one.
        top_k: Number of likeliest tokens to choose from; none for all.
        top_p: Sum of probabilities that the tokens to choose from must reach, likeliest first; 1 for all.
        seed: Seed of the choices.
        context: Most tokens that the model sees; none for as many as in training. When there are more, it starts again
            with the last half of them.
    """

    tokens: Size = 500
    temperature: NonNegative = 0.8
    top_k: Size | None = 40
    top_p: Ratio = 0.95
    seed: Seed = 0
    context: Size | None = None
