"""The model of a task: embedding, blocks around a mixer, head."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.registry import Mixer, choose_mixer, find_mixer
from longlens.models.block import Block, make_norm
from longlens.models.config import ModelConfig
from longlens.models.heads import Classify, Language, Match, Regress
from longlens.models.probe import ROUNDING, change_by_future, claims_causal
from longlens.options import nearest, options_of
from longlens.tasks.base import Head, Spec, Task, create_task


def sinusoids(length: int, width: int, device: torch.device | None = None) -> Tensor:
    """(length, width): sines of geometrically falling frequencies, then their cosines (Vaswani et al. 2017)."""
    half = (width + 1) // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / max(half, 1)))
    angles = torch.arange(length, device=device)[:, None] * rates  # (L, half)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


class Embedding(nn.Module):
    """Tokens (B, L) or real vectors (B, L, C) to (B, L, D), with sinusoidal, learned or no positions added.

    Embedded tokens have the size of the sinusoids. Where a head shares the weights (``tied``), these are smaller by
    √D and scaled up here, as by Vaswani et al. (2017).
    """

    def __init__(self, spec: Spec, width: int, positions: str, tied: bool = False):
        super().__init__()
        self.width = width
        self.positions = positions
        self.max_length = spec.max_length
        self.scale = math.sqrt(width) if tied else 1.0
        self.values = nn.Embedding(spec.size, width) if spec.inputs == "tokens" else nn.Linear(spec.size, width)
        self.learned = nn.Embedding(spec.max_length, width) if positions == "learned" else None
        if positions == "sinusoidal":
            self.register_buffer("waves", sinusoids(spec.max_length, width), persistent=False)
        if tied:
            nn.init.normal_(self.values.weight, std=1 / self.scale)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.values(inputs)
        x = x * self.scale if self.scale != 1 else x
        length = x.shape[1]
        if self.positions == "sinusoidal":
            if length > self.waves.shape[0]:
                self.waves = sinusoids(length, self.width, x.device)
            x = x + self.waves[:length].to(x.dtype)
        elif self.learned is not None:
            if length > self.max_length:
                raise BadInput(
                    f"a sequence must have at most {self.max_length} tokens, as there are learned positions, "
                    f"got {length}: cut it, or choose sinusoidal positions"
                )
            x = x + self.learned.weight[:length]
        return x


class Model(nn.Module):
    """Inputs of a batch, (B, L) tokens or (B, L, C) numbers, to what the task asks for.

    classify and match: (B, classes), pairs come as (B, 2, L); regress: (B, M) or (B,); language: (B, L, vocabulary).
    """

    def __init__(self, spec: Spec, mixer: Mixer, config: ModelConfig):
        super().__init__()
        self.spec = spec
        self.config = config
        self.mixer = check_fit(spec.head, mixer, config)
        tied = spec.head == "language" and config.tied
        self.embedding = Embedding(spec, config.width, config.positions, tied)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, self.mixer.build(config.width, max_length=spec.max_length)) for _ in range(config.depth)
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


def check_fit(head: Head, mixer: Mixer, config: ModelConfig) -> Mixer:
    """Refuse what cannot go together, with the reason; return the mixer with the options that the model decides."""
    if config.positions == "rotary":
        if "rotary" not in mixer.options:
            raise BadInput(
                f"positions must be none, sinusoidal or learned for mixer {mixer.name!r}, which takes no rotary ones, "
                "got rotary"
            )
        mixer = replace(mixer, options={**mixer.options, "rotary": True})
    if head == "language":
        if not is_causal(mixer, config.width):
            raise BadInput(
                f"a language task needs a causal mixer, and {mixer.name!r} is not: {_way_out(mixer, config)}"
            )
        if config.norm == "batch":
            raise BadInput("norm must be layer for a language task, got batch, which mixes positions")
    return mixer


def is_causal(mixer: Mixer, width: int) -> bool:
    """Whether the layer of a mixer sees the past only, as it says itself."""
    return claims_causal(_build_without_memory(mixer, width))


def _way_out(mixer: Mixer, config: ModelConfig) -> str:
    """The options that would make a mixer causal."""
    changes = {"bidirectional": False, "side": "past"}
    changes = {name: value for name, value in changes.items() if mixer.options.get(name, value) != value}
    causal = replace(mixer, options={**mixer.options, **changes})
    if changes and is_causal(causal, config.width):
        return "choose " + " and ".join(f"{name}={value!r}" for name, value in changes.items())
    return "it cannot be, so choose another one"


def check_mixer_builds(task: Task, mixer: Mixer, config: ModelConfig) -> None:
    """Refuse a layer that cannot be, before anything runs."""
    _build_without_memory(check_fit(task.head, mixer, config), config.width)


def refuse_foresight(model: Model) -> None:
    """Refuse a language model whose layer is not one of this package and sees later tokens, whatever it says itself."""
    if model.spec.head != "language" or model.mixer.preset.module.startswith("longlens."):
        return
    length = max(2, min(32, model.spec.max_length))
    change = change_by_future(model.blocks[0].mixer, model.config.width, length)  # pyright: ignore[reportArgumentType]
    if not change <= ROUNDING:
        raise BadInput(
            f"a language task needs a causal mixer, and {model.mixer.name!r} is not: its outputs change by "
            f"{change:.2g} of their size when later inputs do"
        )


def _build_without_memory(mixer: Mixer, width: int) -> nn.Module:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return mixer.build(width)


def create_model(
    task: str | Task | Spec,
    mixer: str | Mixer = "las",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Model:
    """A model for a task: ``create_model("listops", "las", depth=6, width=256, heads=8, window=5)``.

    ``options`` are those of ``longlens.models.config.ModelConfig`` and of the mixer, by name; where both have one, as
    dropout, it is the model's, and ``**{"mixer.dropout": 0.1}`` the mixer's.
    """
    task = create_task(task) if isinstance(task, str) else task
    spec = task.spec if isinstance(task, Task) else task
    ours = {name: options.pop(name) for name in list(options) if name in options_of(ModelConfig)}
    options = {name.removeprefix("mixer."): value for name, value in options.items()}
    if isinstance(mixer, str):
        known = find_mixer(mixer).options
        for name in options:
            if name not in known:
                raise BadInput(
                    f"neither the model nor mixer {mixer!r} has an option {name!r}; "
                    + nearest(name, [*options_of(ModelConfig), *known])
                )
        mixer = choose_mixer(mixer, **options)
    elif options:
        raise BadInput(f"the mixer has its options already, so {', '.join(options)} cannot be given beside it")
    return Model(spec, mixer, ModelConfig.make(ours, "the model")).to(device=device, dtype=dtype)


def count_parameters(model: nn.Module) -> int:
    """Trained numbers; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
