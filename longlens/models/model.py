"""The model of a task: embedding, blocks around a mixer, and a head for each kind of task; its loss and metric."""

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.data.datasets import IGNORE, Metric
from longlens.errors import BadInput
from longlens.mixers.common import Dropout, sinusoids
from longlens.mixers.registry import Mixer, choose_mixer, find_mixer, layer_is_causal
from longlens.models.block import Block, make_norm
from longlens.models.config import ModelConfig
from longlens.ops.checks import at_least_float32
from longlens.ops.decay import widest_dtype
from longlens.options import nearest, options_of
from longlens.tasks.base import Head, Spec, Task, create_task

ROUNDING = 1e-4  # of an FFT in float32: a larger change by later inputs is no rounding


class Embedding(nn.Module):
    """Tokens (B, L) or real vectors (B, L, C) to (B, L, D), with sinusoidal, learned or no positions added. With
    ``cls`` a learned vector, 0 at first, comes before each sequence: (B, 1 + L, D).

    Embedded tokens have the size of the sinusoids. Where a head shares the weights (``tied``), these are smaller by
    √D and scaled up here, as by Vaswani et al. (2017).
    """

    def __init__(self, spec: Spec, width: int, positions: str, tied: bool = False, cls: bool = False):
        super().__init__()
        self.width = width
        self.positions = positions
        self.max_length = spec.max_length + cls
        self.cls = nn.Parameter(torch.zeros(1, 1, width)) if cls else None
        self.scale = math.sqrt(width) if tied else 1.0
        self.values = nn.Embedding(spec.size, width) if spec.inputs == "tokens" else nn.Linear(spec.size, width)
        self.learned = nn.Embedding(self.max_length, width) if positions == "learned" else None
        if positions == "sinusoidal":
            self.register_buffer("waves", sinusoids(self.max_length, width), persistent=False)
        if tied:
            nn.init.normal_(self.values.weight, std=1 / self.scale)

    def forward(self, inputs: Tensor, start: int = 0) -> Tensor:
        """``start`` is the position of the first input, after others that are not here."""
        x = self.values(inputs)
        x = x * self.scale if self.scale != 1 else x
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], 1, -1).to(x.dtype), x], dim=1)
        length = start + x.shape[1]
        if self.positions == "sinusoidal":
            if length > self.waves.shape[0]:  # twice as many, as a text may grow token by token
                self.waves = sinusoids(2 * length, self.width, x.device)
            x = x + self.waves[start:length].to(x.dtype)
        elif self.learned is not None:
            if length > self.max_length:
                cls = 0 if self.cls is None else 1
                raise BadInput(
                    f"a sequence must have at most {self.max_length - cls} tokens, as there are learned positions, "
                    f"got {length - cls}: cut it, or choose sinusoidal positions"
                )
            x = x + self.learned.weight[start:length]
        return x


def pool(x: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """(B, L, D) -> (B, D): the mean of the tokens, the last token, or the first, which stands for the others."""
    if how == "cls":
        return x[:, 0]
    if how == "mean":
        if mask is None:
            return x.mean(dim=1)
        weights = mask.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    return _last(x, mask, 1).squeeze(1)


def _last(x: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """(B, L, D) -> (B, count, D): the last tokens before the padding."""
    if mask is None:
        return x[:, -count:]
    first = mask.sum(dim=1) - count  # (B,)
    places = (first[:, None] + torch.arange(count, device=x.device)).clamp(min=0)
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class TaskHead(nn.Module):
    """From the vectors of all tokens, (B, L, D), to the answer of a task.

    - classify: (B, classes), linear in the pooled vector; with an inner width, an MLP.
    - match: pairs, one after the other, (2B, L, D) -> (B, classes): an MLP on [x1, x2, x1 - x2, x1·x2], as LRA and S4.
    - regress: (B, M) numbers at the last M tokens, or (B,) one for the sequence.
    - language: (B, L, vocabulary), with weights of its own or the ``tied`` ones of the embedding. The latter's logits
      are divided by √D, as in T5: a model would start sure that each token follows itself otherwise.
    """

    def __init__(self, spec: Spec, width: int, pooling: str, tied: Tensor | None = None, inner: int | None = None):
        super().__init__()
        self.kind = spec.head
        self.positions = spec.positions
        self.pooling = pooling
        self.scale = 1.0 if tied is None else width**-0.5
        inner = inner or (width if spec.head == "match" else None)
        if spec.head in ("classify", "match") and inner is not None:
            pooled = 4 * width if spec.head == "match" else width
            self.mlp = nn.Sequential(nn.Linear(pooled, inner), nn.ReLU(), nn.Linear(inner, spec.outputs))
            return
        self.linear = nn.Linear(width, 1 if spec.head == "regress" else spec.outputs, bias=spec.head != "language")
        if tied is not None:
            self.linear.weight = tied

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.kind == "language":
            return self.linear(x if self.scale == 1 else x * self.scale)
        if self.kind == "regress":
            x = pool(x, mask, self.pooling) if self.positions is None else _last(x, mask, self.positions)
            return self.linear(x).squeeze(-1)
        x = pool(x, mask, self.pooling)
        if self.kind == "classify":
            return self.linear(x) if hasattr(self, "linear") else self.mlp(x)
        first, second = x.unflatten(0, (-1, 2)).unbind(dim=1)
        return self.mlp(torch.cat([first, second, first - second, first * second], dim=-1))


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
        self.cls = config.pooling == "cls" and spec.head != "language" and spec.positions is None
        self.embedding = Embedding(spec, config.width, config.positions, tied, self.cls)
        first = config.dropout if config.embedding_dropout is None else config.embedding_dropout
        self.dropout = Dropout(first, config.tied_dropout)
        context: dict[str, Any] = {"max_length": self.embedding.max_length, "shape": None if self.cls else spec.shape}
        self.blocks = nn.ModuleList(
            Block(config, self.mixer.build(config.width, number=number, **context)) for number in range(config.depth)
        )
        self.norm = make_norm(config) if config.prenorm and config.final_norm else None
        shared = self.embedding.values.weight if tied else None
        self.head = TaskHead(spec, config.width, config.pooling, shared, config.head_width)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """``mask`` is True for tokens and False for padding; None if there is no padding."""
        if self.spec.head == "match":  # (B, 2, L) -> (2B, L)
            inputs, mask = inputs.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        if self.cls and mask is not None:
            mask = F.pad(mask, (1, 0), value=True)
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
            way_out = _way_out(mixer, config)
            raise BadInput(f"a language task needs a causal mixer, and {mixer.name!r} is not: {way_out}")
        if config.norm == "batch":
            raise BadInput("norm must be layer, scale or rms for a language task, got batch, which mixes positions")
    elif config.pooling == "cls" and is_causal(mixer, config.width):
        way_out = "choose bidirectional=True" if "bidirectional" in mixer.options else "choose another one"
        raise BadInput(
            f"pooling must be mean or last for mixer {mixer.name!r}, got cls: it is causal, so that the token before "
            f"the sequence sees nothing of it; {way_out}"
        )
    return mixer


def is_causal(mixer: Mixer, width: int) -> bool:
    """Whether the layer of a mixer sees the past only, as it says itself."""
    return layer_is_causal(_build_without_memory(mixer, width))


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


def change_by_future(layer: nn.Module, d_model: int, length: int = 32, splits: Iterable[int] | None = None) -> float:
    """The largest change of an output when all later inputs are others, as a multiple of the largest output.

    It is 0 for a causal layer, but for the rounding of an FFT or of a sort, and nan for one whose outputs are no
    numbers: a layer is causal if ``change <= ROUNDING``. It is called in the mode in which it is, training or
    evaluation; the layer and the random numbers of the program stay as they are. ``splits`` are the positions from
    which on the inputs change; by default three of them, which needs four calls.
    """
    layer = copy.deepcopy(layer)  # a call in training mode may change its buffers
    first = next(layer.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(2, length, d_model, generator=generator).to(first.device, first.dtype)

    def outputs(x: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same dropout for all inputs
        return layer(x, mask=None)

    changes = []
    with torch.random.fork_rng([first.device] if first.is_cuda else []), torch.no_grad():
        x = draw()
        before = outputs(x)
        for split in dict.fromkeys((1, length // 2, length - 1)) if splits is None else splits:
            after = outputs(torch.cat([x[:, :split], 3 * draw()[:, split:]], dim=1))
            changes.append((after - before)[:, :split].abs().max())
    largest = before.abs().max().clamp_min(torch.finfo(before.dtype).tiny)
    return (torch.stack(changes).max() / largest).item()


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
    own = options_of(ModelConfig)
    ours = {name: options.pop(name) for name in list(options) if name in own}
    options = {name.removeprefix("mixer."): value for name, value in options.items()}
    if isinstance(mixer, str):
        known = find_mixer(mixer).options
        for name in options:
            if name not in known:
                raise BadInput(
                    f"neither the model nor mixer {mixer!r} has an option {name!r}; " + nearest(name, [*own, *known])
                )
        mixer = choose_mixer(mixer, **options)
    elif options:
        raise BadInput(f"the mixer has its options already, so {', '.join(options)} cannot be given beside it")
    return Model(spec, mixer, ModelConfig.make(ours, "the model")).to(device=device, dtype=dtype)


def count_parameters(model: nn.Module) -> int:
    """Trained numbers; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def loss_sum(spec: Spec, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of the losses of all targets, times the weights (classes,) of their classes: divided by ``batch.total``,
    it is the loss of a step."""
    outputs = at_least_float32(outputs)
    if spec.head == "regress":  # a sample counts once, however many numbers it has
        return (outputs - targets).square().unsqueeze(-1).flatten(1).mean(dim=1).sum()
    weights = None if weights is None else weights.to(outputs)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), weights, ignore_index=IGNORE, reduction="sum")


def metric_sums(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """Sums over a batch; those of several batches or processes can be added. The last one is the count.

    Args:
        metric: accuracy, r2, bits_per_byte or perplexity.
        outputs: (B, classes) for accuracy, (B, L, vocabulary) for languages, numbers like the targets for r2.
        targets: as in a Batch.
    """
    wide = widest_dtype(outputs.device)
    if metric == "accuracy":
        hits = sample_scores(metric, outputs, targets).sum()
        sums = [hits, torch.full_like(hits, targets.numel())]
    elif metric == "r2":
        if outputs.shape != targets.shape:
            raise ValueError(f"outputs are {tuple(outputs.shape)}, targets {tuple(targets.shape)}; they must be alike")
        outputs, targets = outputs.to(wide), targets.to(wide)
        errors = (outputs - targets).square().sum()
        sums = [errors, targets.sum(), targets.square().sum(), torch.ones_like(targets).sum()]
    else:
        tokens = outputs.flatten(0, -2).float()
        losses = F.cross_entropy(tokens, targets.flatten(), ignore_index=IGNORE, reduction="none")
        sums = [losses.sum(dtype=wide), (targets != IGNORE).sum()]
    return torch.stack([part.to(wide) for part in sums])


def metric_value(metric: Metric, sums: Tensor) -> float:
    """The metric of all samples whose sums were added up: a mean, its exponential, or R² = 1 − MSE / variance."""
    first, *others, count = sums.tolist()
    if not count:
        return math.nan
    if metric == "r2":
        total, squares = others
        spread = squares - total * (total / count)
        return 1 - first / spread if spread > 0 else math.nan
    mean = first / count
    return {"accuracy": mean, "bits_per_byte": mean / math.log(2), "perplexity": math.exp(min(mean, 700))}[metric]


def sample_scores(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """(B,) of each sample: 1 if it is right and 0 if not; the mean squared error; or the mean loss of its tokens."""
    if metric == "accuracy":  # a row that is not finite is no hit, whatever its largest entry
        return ((outputs.argmax(dim=-1) == targets) & outputs.isfinite().all(dim=-1)).float()
    if metric == "r2":
        return (outputs.float() - targets).square().unsqueeze(-1).flatten(1).mean(dim=1)
    losses = F.cross_entropy(outputs.float().mT, targets, ignore_index=IGNORE, reduction="none")  # (B, L)
    return losses.sum(dim=1) / (targets != IGNORE).sum(dim=1)
