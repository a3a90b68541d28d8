"""The sizes and choices of a model around its mixer. No torch here."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from longlens.mixers.base import Config as MixerConfig
from longlens.options import option_names
from longlens.tasks.base import Head


class Strict(BaseModel):
    """Typed values that do not change; an unknown name is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Strict):
    """What is the same for every mixer."""

    depth: Annotated[int, Field(ge=1, description="blocks.")] = 4
    width: Annotated[int, Field(ge=1, description="channels of a token.")] = 64
    norm: Annotated[
        Literal["layer", "batch"],
        Field(description="over the channels of a token, or over all tokens of a batch (never in a language model)."),
    ] = "layer"
    prenorm: Annotated[
        bool, Field(description="normalize what goes into a part of a block; otherwise what comes out of the sum.")
    ] = True
    positions: Annotated[
        Literal["none", "sinusoidal", "learned", "rotary"],
        Field(description="added to the embedding, or, if rotary, turned into queries and keys."),
    ] = "sinusoidal"
    ffn: Annotated[
        Literal["gelu", "glu", "none"], Field(description="feedforward part of a block: plain, gated, or none.")
    ] = "gelu"
    ffn_ratio: Annotated[float, Field(gt=0, description="its inner width, as a multiple of the width.")] = 4.0
    pooling: Annotated[
        Literal["mean", "last"], Field(description="the vector of a sequence: mean of its tokens, or its last token.")
    ] = "mean"
    tied: Annotated[bool, Field(description="language: the head shares the weights of the embedding.")] = False
    dropout: Annotated[float, Field(ge=0, lt=1, description="of what each part of a block adds.")] = 0.0


def check_fit(head: Head, mixer: MixerConfig, config: ModelConfig) -> MixerConfig:
    """Refuse what cannot go together, with the reason; return the options of the mixer with those of the model."""
    if head == "language":
        ahead = mixer.looks_ahead()
        if ahead is not None:
            raise ValueError(f"a language task needs a causal mixer, and {mixer.name!r} is not: {ahead}")
        if config.norm == "batch":
            raise ValueError("a language task cannot have norm='batch', which mixes positions: choose norm='layer'")
    if config.positions == "rotary":
        if "rotary" not in option_names(type(mixer)):
            raise ValueError(
                f"mixer {mixer.name!r} takes no rotary positions; positions can be none, sinusoidal, learned"
            )
        mixer = replace(mixer, rotary=True)  # pyright: ignore[reportCallIssue]
    return mixer
