"""One step of training, and the batches that come to it."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longlens.data.datasets import IGNORE, Batch, Batches, Joined, Samples, Split, draw_samples, read_all
from longlens.errors import BadInput, Interrupted
from longlens.models.model import loss_sum, metric_sums, metric_value, sample_scores
from longlens.options import nearest
from longlens.tasks.base import Spec, SplitName, Task
from longlens.training.config import TrainingConfig
from longlens.training.logs import StopSignals
from longlens.training.machine import Processes, without_sync

LOSSES = ("bits_per_byte", "perplexity")  # metrics whose first sum is the loss
LOOK_EVERY = 32  # batches between two looks at the signals of all processes
MOST_CHECKED = 64  # samples of a split that are compared with what its task says
MOST_VALUES = 2**20  # of these samples
WHOLE = ("int64", "int32")


def load_split(task: Task, name: SplitName, epoch: int = 0) -> Split:
    """The samples of a split. One that is not as its task says is refused: some samples are looked at, from the first
    to the last, so few that it costs next to nothing."""
    split, spec, place = task.split(name, epoch), task.spec, f"split {name!r} of task {task.name!r}"
    if not hasattr(split, "count_targets"):  # an array has a take, too
        known = "a Split, such as Images, Sequences or Windows of longlens.data.datasets"
        raise BadInput(f"{place} must be {known}, got {type(split).__name__}")
    size, lengths = len(split), np.asarray(split.lengths)
    if len(lengths) != size or not size:
        given = f"{len(lengths):,} sequences and {size:,} targets"
        raise BadInput(f"{place} must have a target for each sequence, and one at least, got {given}")
    _check_array(f"the lengths of {place}", lengths, (size,), WHOLE, spec.max_length + 1)
    count = min(size, MOST_CHECKED, max(1, MOST_VALUES // spec.max_length))
    samples = split.take(np.linspace(0, size - 1, count).astype(np.int64))
    if not isinstance(samples, Samples):
        raise BadInput(f"take of {place} must return Samples(inputs, lengths, targets), got {type(samples).__name__}")
    _check_samples(samples, count, spec, place)
    return split


def _check_samples(samples: Samples, count: int, spec: Spec, place: str) -> None:
    inputs, targets = f"the inputs of {place}", f"the targets of {place}"
    shape = (count, 2, "length") if spec.head == "match" else (count, "length")
    if spec.inputs == "tokens":
        _check_array(inputs, samples.inputs, shape, WHOLE, spec.size)
    else:
        _check_array(inputs, samples.inputs, (*shape, spec.size), ("float32",))
    if spec.head == "regress":
        numbers = (count,) if spec.positions is None else (count, spec.positions)
        _check_array(targets, samples.targets, numbers, ("float32", "float64"))
    elif spec.head == "language":
        counted = np.where(samples.targets == IGNORE, 0, samples.targets)
        _check_array(targets, counted, shape, ("int64",), spec.outputs)
    else:
        _check_array(targets, samples.targets, (count,), ("int64",), spec.outputs)


def _check_array(
    place: str, given: Any, shape: tuple[int | str, ...], types: tuple[str, ...], limit: int | None = None
) -> None:
    """Whole numbers must be below the limit; without one, numbers must be finite. A word in a shape is any size."""
    array = np.asarray(given)
    fits = array.ndim == len(shape) and all(n in (m, "length") for n, m in zip(shape, array.shape, strict=True))
    if not fits or array.dtype.name not in types:
        wanted = f"{' or '.join(types)} of shape ({', '.join(map(str, shape))})"
        raise BadInput(f"{place} must be {wanted}, got {array.dtype} of shape {array.shape}")
    bad = ~np.isfinite(array) if limit is None else (array < 0) | (array >= limit)
    if bad.any():
        wanted = "finite numbers" if limit is None else f"from 0 to {limit - 1:,}, as its Spec says"
        raise BadInput(f"{place} must be {wanted}, got {array[bad][0]}")


def training_set(task: Task, options: TrainingConfig, epoch: int = 0) -> Split:
    """What the config says to train on. Smaller sets are parts of larger ones."""
    train = draw_samples(load_split(task, "train", epoch), options.train_samples, "trained on")
    return Joined(train, load_split(task, "valid")) if options.train_on_valid else train


def all_targets(split: Split) -> np.ndarray:
    return np.concatenate([samples.targets for samples in read_all(split)])


def class_weights(task: Task, options: TrainingConfig) -> Tensor | None:
    """(classes,) what a sample of each class counts in the loss, if not 1: with N samples of K classes, N_c of class c,
    N / (K·N_c), so that all classes count the same and the mean over all samples is 1."""
    if options.class_weights is None:
        return None
    if task.spec.head not in ("classify", "match"):
        raise BadInput(f"class_weights must be none, as {task.title} has no classes, got {options.class_weights}")
    counts = np.bincount(all_targets(training_set(task, options)), minlength=task.spec.outputs)
    present = np.maximum(counts, 1) * np.count_nonzero(counts)  # a class that is not there has no sample to weigh
    return torch.from_numpy(counts.sum() / present)


def train_step(
    model: nn.Module,
    spec: Spec,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    options: TrainingConfig,
    processes: Processes,
    weights: Tensor | None = None,
) -> Tensor:
    """Forward, backward, optimizer. Returns this process's part of the loss: their sum is the loss of the step."""
    optimizer.zero_grad()
    loss = torch.zeros((), device=processes.device)
    for index in range(options.accumulate):
        with without_sync(model, index < options.accumulate - 1):
            outputs, targets = forward(model, batch.part(index, options.accumulate), options.precision, processes)
            part = loss_sum(spec, outputs, targets, weights) / batch.total
            (part * processes.count).backward()  # as the gradients are averaged over the processes
        loss += part.detach()
    if options.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    return loss


def check_finite(batches: Iterable[Batch], place: str) -> None:
    """Where a loss is not finite: refuse data that is the reason, as no learning rate helps then."""
    for batch in batches:
        for name, values in (("inputs", batch.inputs), ("targets", batch.targets)):
            bad = ~values.isfinite()
            if bad.any():
                wanted = f"finite numbers, got {values[bad][0]}: correct or leave out such samples"
                raise BadInput(f"the {name} of {place} must be {wanted}")


def forward(model: nn.Module, batch: Batch, precision: str, processes: Processes) -> tuple[Tensor, Tensor]:
    """The outputs and targets of a batch. A process without samples computes one of nothing but padding, and keeps none
    of it, since the others wait for it."""
    filled = batch if len(batch) else batch.padding_like()
    is_padded = filled.is_padded  # asked before the copy, as a GPU would have to be waited for
    filled = filled.to(processes.device, non_blocking=True)
    mask = filled.mask if is_padded else None
    with torch.autocast(processes.device.type, torch.bfloat16, enabled=in_bfloat16(precision, processes.device)):
        outputs = model(filled.inputs, mask)
    if len(batch):
        return outputs, filled.targets
    return outputs[:0] + 0 * outputs.sum(), filled.targets[:0]


def in_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether to compute in bfloat16: by itself only where the hardware does so, as emulation is slow."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bfloat16"


def seed_step(seed: int, step: int, processes: Processes) -> None:
    """The random numbers of a step follow from the seed, the step and the process, so that a run can resume anywhere.

    Only the generators of this device are seeded: ``torch.manual_seed`` takes a millisecond to look for others."""
    key = f"{seed} {step} {processes.rank}"
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    torch.default_generator.manual_seed(number)
    if processes.device.type == "cuda":
        torch.cuda.manual_seed(number)


def prefetch(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches, each loaded while the one before it is at work; for a GPU in pinned memory, from where the copy
    need not be waited for."""
    iterator = iter(batches)

    def load() -> Batch | None:
        batch = next(iterator, None)
        return batch.pin() if batch is not None and device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(load)
        while (batch := coming.result()) is not None:
            coming = pool.submit(load)
            yield batch


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Matrices have weight decay; norms, biases, single vectors and the ``no_decay`` of a layer have none, unless
    ``decay_all`` says so. The ``kernel_parameters`` of a layer (those of a state space) have none either, and learn at
    most at ``kernel_lr``. What the config says of one of its ``groups`` goes before."""
    kernel, grouped = set(_named_by(model, "kernel_parameters")), _grouped(model, config.groups or {})
    no_decay = {*_named_by(model, "no_decay"), *_of_norms(model)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and name not in no_decay and name.rpartition(".")[2] != "bias"
        peak, decay = config.lr, config.weight_decay if decays or config.decay_all else 0.0
        if name in kernel:
            peak, decay = min(config.lr, config.kernel_lr), 0.0
        own = grouped.get(name, {})
        groups.setdefault((own.get("lr", peak), own.get("weight_decay", decay)), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": members, "peak": peak, "weight_decay": decay} for (peak, decay), members in groups.items()],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def _grouped(model: nn.Module, chosen: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The rate and decay of each parameter of a group; of several groups, the last one decides."""
    found: dict[str, dict[str, float]] = {}
    known: dict[str, None] = {}
    for path, module in model.named_modules():
        groups = getattr(module, "groups", None)
        for group, names in groups.items() if isinstance(groups, Mapping) else ():  # a convolution has a number of them
            known[group] = None
            for name in names:
                found.setdefault(_full_name(path, module, name, "groups"), {}).update(chosen.get(group, {}))
    for group in chosen:
        if group not in known:
            raise BadInput(f"groups must be parameter groups of the layer, got {group!r}; {nearest(group, known)}")
    return found


def _named_by(model: nn.Module, attribute: str) -> Iterator[str]:
    """The parameters that the layers of a model name, ``filter.0.weight`` as well as ``rates``."""
    for path, module in model.named_modules():
        for name in getattr(module, attribute, ()):
            yield _full_name(path, module, name, attribute)


def _full_name(path: str, module: nn.Module, name: str, attribute: str) -> str:
    try:
        reduce(getattr, name.split("."), module)  # None, if the layer has been built without it
    except AttributeError:
        layer = type(module).__name__
        raise BadInput(f"{attribute} of {layer} names {name!r}, and it has no such parameter") from None
    return f"{path}.{name}" if path else name


def _of_norms(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if re.search(r"Norm(\dd)?$", type(module).__name__):
            yield from (f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each group to its peak times the factor."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["peak"]


THRESHOLD = 1e-4  # relative: less does not count as an improvement (the default of torch's ReduceLROnPlateau)


class Schedule:
    """Constant; a warm-up and then, with W steps of it and S in all, a cosine or a line down to 0 at step S, or
    √(W/step); or steps down whenever validation stops improving."""

    def __init__(self, config: TrainingConfig, steps: int, higher_is_better: bool):
        self.config = config
        self.steps = config.decay_steps or steps
        self.higher_is_better = higher_is_better
        self.warmup = 0
        if config.schedule in ("cosine", "linear", "inverse-sqrt"):
            self.warmup = math.ceil(config.warmup * steps) if isinstance(config.warmup, float) else config.warmup
        self.level = 1.0  # of the plateau
        self.best: float | None = None
        self.waited = 0

    def factor(self, step: int) -> float:
        """The factor of the peak learning rate for the step after ``step`` steps."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1, (step - self.warmup) / max(1, self.steps - self.warmup))
        match self.config.schedule:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                return 1 - done
            case "inverse-sqrt":
                return math.sqrt(max(1, self.warmup) / (step + 1))
        return self.level

    def update(self, metric: float) -> None:
        """Update after an evaluation."""
        sign = 1 if self.higher_is_better else -1
        if self.best is None or sign * (metric - self.best) > THRESHOLD * abs(self.best):
            self.best = metric
            self.waited = 0
        else:
            self.waited += 1
        if self.config.schedule == "plateau" and self.waited > self.config.patience:
            self.level *= self.config.factor
            self.waited = 0

    def state(self) -> dict[str, Any]:
        return {"level": self.level, "best": self.best, "waited": self.waited}

    def load(self, state: dict[str, Any]) -> None:
        values = [value for key, value in state.items() if key != "best" or value is not None]
        if state.keys() != self.state().keys() or not all(isinstance(value, int | float) for value in values):
            raise BadInput(f"the state of a schedule must have the numbers {', '.join(self.state())}")
        vars(self).update(state)


def evaluated_part(split: Split, samples: int | None) -> Split:
    """So many samples of a split, drawn once for all; None for all."""
    return draw_samples(split, samples, "evaluated")


class Evaluated(NamedTuple):
    """What a model is worth on some samples."""

    metric: float
    loss: float
    scores: Tensor | None = None  # (N,) of each sample, if they are asked for: see ``sample_scores``


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    split: SplitName,
    options: TrainingConfig,
    processes: Processes,
    *,
    samples: int | None = None,
    with_scores: bool = False,
    stop: StopSignals | None = None,
) -> Evaluated:
    """The metric and the loss on all samples of a split, or on so many drawn once for all, each counted once. Batches
    are as large as the micro-batches of training; nobody waits for a GPU before the end."""
    chosen = evaluated_part(load_split(task, split), samples)
    batches = Batches(
        chosen,
        -(-options.batch_size // options.accumulate),
        group_by_length=options.group_by_length,
        rank=processes.rank,
        world_size=processes.count,
    )
    spec, was_training = task.spec, model.training
    model.eval()
    torch.manual_seed(0)  # for layers that draw numbers also then; a step of training has a seed of its own
    try:
        metrics = losses = torch.zeros((), device=processes.device)
        scores = torch.zeros(len(chosen), device=processes.device) if with_scores else None
        count = 0
        for index, batch in enumerate(prefetch(batches, processes.device)):
            if (processes.count == 1 or index % LOOK_EVERY == 0) and processes.any(stop is not None and stop.asked):
                raise Interrupted("stopped during an evaluation, and saved")
            outputs, targets = forward(model, batch, options.precision, processes)
            sums = metric_sums(spec.metric, outputs.float(), targets)
            metrics = metrics + sums
            losses = losses + (sums[0] if spec.metric in LOSSES else loss_sum(spec, outputs, targets).to(sums.dtype))
            if scores is not None:
                scores[batch.indices] = sample_scores(spec.metric, outputs, targets)
            count += batch.total
    finally:
        model.train(was_training)
    metrics, losses = processes.sum(metrics), processes.sum(losses)
    scores = None if scores is None else processes.sum(scores)
    return Evaluated(metric_value(spec.metric, metrics), float(losses) / count, scores)
