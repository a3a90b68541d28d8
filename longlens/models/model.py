"""The model of a task: embedding, blocks around a mixer, head."""

from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from longlens.mixers.base import Config as MixerConfig
from longlens.mixers.base import mixer_class, mixer_config
from longlens.models.block import Block, make_norm
from longlens.models.config import ModelConfig, check_fit
from longlens.models.embedding import Embedding
from longlens.models.heads import Classify, Language, Match, Regress
from longlens.naming import nearest
from longlens.options import option_names
from longlens.tasks.base import Spec, Task, create_task


class Model(nn.Module):
    """Inputs of a batch, (B, L) tokens or (B, L, C) numbers, to what the task asks for.

    classify and match: (B, classes), pairs come as (B, 2, L); regress: (B, M) or (B,); language: (B, L, vocabulary).
    """

    def __init__(self, spec: Spec, mixer: MixerConfig, config: ModelConfig):
        super().__init__()
        mixer = check_fit(spec.head, mixer, config)
        self.spec, self.config, self.mixer_config = spec, config, mixer
        tied = spec.head == "language" and config.tied
        self.embedding = Embedding(spec, config.width, config.positions, tied)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, mixer.build(config.width, max_length=spec.max_length)) for _ in range(config.depth)
        )
        self.norm = make_norm(config) if config.prenorm else None
        if spec.head == "language":
            self.head = Language(spec, config.width, self.embedding.values if tied else None)
        else:
            kind = {"classify": Classify, "match": Match, "regress": Regress}[spec.head]
            self.head = kind(spec, config.width, config.pooling)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """``mask`` is True for tokens and False for padding; None if there is no padding."""
        if self.spec.head == "match":  # (B, 2, L) -> (2B, L)
            inputs, mask = inputs.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        x = self.dropout(self.embedding(inputs))
        for block in self.blocks:
            x = block(x, mask)
        if self.norm is not None:
            x = self.norm(x, mask)
        return self.head(x, mask)


def create_model(
    task: str | Task | Spec,
    mixer: str | MixerConfig = "las",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Model:
    """A model for a task: ``create_model("listops", "las", depth=6, width=256, heads=8, window=5)``.

    ``options`` are those of ``longlens.models.config.ModelConfig`` and of the mixer, by name.
    """
    task = create_task(task) if isinstance(task, str) else task
    spec = task.spec if isinstance(task, Task) else task
    ours = {name: options.pop(name) for name in list(options) if name in ModelConfig.model_fields}
    if isinstance(mixer, str):
        known = option_names(mixer_class(mixer))
        for name in options:
            if name not in known:
                raise ValueError(
                    f"neither the model nor mixer {mixer!r} has an option {name!r}; "
                    + nearest(name, [*ModelConfig.model_fields, *known])
                )
        mixer = mixer_config(mixer, **options)
    elif options:
        raise ValueError(f"the mixer has its options already, so {', '.join(options)} cannot be given beside it")
    try:
        config = ModelConfig(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        name, value, reason = first["loc"][0], first["input"], first["msg"].lower()
        raise ValueError(f"{name} is {value!r}, which is not possible: {reason}") from None
    return Model(spec, mixer, config).to(device=device, dtype=dtype)


def count_parameters(model: nn.Module) -> int:
    """Trained numbers; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
