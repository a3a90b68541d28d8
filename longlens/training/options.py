"""How a model is trained: the options of a run's training section. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le

from longlens.errors import BadInput
from longlens.options import (
    Count,
    Fraction,
    Is,
    NonNegative,
    Option,
    Options,
    Positive,
    Probability,
    Seed,
    Size,
    check_options,
)

BUDGETS = ("epochs", "steps", "minutes")  # of which a run has one
Groups = Annotated[dict[str, dict[str, Any]], Is("a table of tables, or NAME.lr=… and NAME.weight_decay=…")]
GROUP = {"lr": Positive, "weight_decay": NonNegative}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """How a model is trained. All of it decides the result.

    Args:
        seed: Seed of the weights, the order of the samples, and dropout.
        batch_size: Samples of a step, in all processes together.
        epochs: Passes over the training set; give this, steps or minutes.
        steps: Steps of training; give this, epochs or minutes.
        minutes: Minutes of training, without evaluations; give this, epochs or steps. The schedule follows the clock,
            so that such a run is never the same to the bit.
        min_steps: Steps to make at least, however few samples the epochs have.
        stop_after: Evaluations without a better metric on the validation set after which training stops; none for
            never.
        lr: Peak learning rate of AdamW.
        kernel_lr: Upper bound of the learning rate of kernel parameters, such as those of a state space.
        weight_decay: Weight decay of matrices; norms, biases and kernel parameters have none.
        decay_all: Decay norms, biases and vectors as matrices, as most published recipes do.
        groups: Learning rate (lr) and weight decay (weight_decay) of a parameter group that the layer names.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
        schedule: Learning-rate schedule: cosine and linear fall to 0, inverse-sqrt falls as 1/√step, plateau falls when
            validation stops improving.
        warmup: Steps in which the learning rate rises, or a fraction of all (cosine, linear, inverse-sqrt).
        decay_steps: Step at which the learning rate would be 0 (cosine, linear); none for the last.
        patience: Evaluations without improvement before the learning rate falls (plateau).
        factor: Factor by which the learning rate falls (plateau).
        clip: Largest norm of the gradient; none for no clipping.
        accumulate: Number of micro-batches of a step, to save memory; batch norm sees each by itself.
        precision: Numbers of the forward pass; auto is bfloat16 on GPUs that have it, and float32 elsewhere.
        class_weights: Weights of the classes in the loss: balanced gives rare ones as much as common ones.
        evaluate_every: Steps between evaluations on the validation set; by default an epoch, or as many evaluations as
            epochs where min_steps makes more steps of them.
        valid_samples: Validation samples of an evaluation; by default all.
        test_samples: Test samples at the end; by default all.
        group_by_length: Put samples of similar length into a batch.
        train_samples: Training samples to use, drawn once for all; by default all.
        train_on_valid: Train on the validation set as well, to see whether a model can fit it.
    """

    seed: Seed = 0
    batch_size: Size = 32
    epochs: Annotated[float, Gt(0), Le(1e9), Is("a number above 0, at most 10^9")] | None = None
    steps: Size | None = None
    minutes: Positive | None = None
    min_steps: Count = 0
    stop_after: Size | None = None
    lr: Positive = 1e-3
    kernel_lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    decay_all: bool = False
    groups: Groups | None = None
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    eps: Positive = 1e-8
    schedule: Literal["constant", "cosine", "linear", "inverse-sqrt", "plateau"] = "cosine"
    warmup: Probability | Size = 0.1
    decay_steps: Size | None = None
    patience: Count = 10
    factor: Fraction = 0.2
    clip: Positive | None = None
    accumulate: Size = 1
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    class_weights: Literal["balanced"] | None = None
    evaluate_every: Size | None = None
    valid_samples: Size | None = None
    test_samples: Size | None = None
    group_by_length: bool = True
    train_samples: Size | None = None
    train_on_valid: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [f"{name}={getattr(self, name)}" for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadInput(f"one of epochs, steps and minutes must be given, got {' and '.join(given) or 'none'}")
        if self.minutes is not None and (self.decay_steps is not None or isinstance(self.warmup, int)):
            raise BadInput("minutes have no number of steps: give warmup as a fraction, and no decay_steps")
        if self.minutes is not None and self.schedule == "inverse-sqrt" and not self.warmup:
            raise BadInput("inverse-sqrt needs a warmup above 0 with minutes, which have no number of steps")
        if self.accumulate > self.batch_size:
            raise BadInput(f"accumulate must be at most the batch_size, {self.batch_size}, got {self.accumulate}")
        if self.groups is not None:
            object.__setattr__(self, "groups", {name: _check_group(name, self.groups[name]) for name in self.groups})

    def total_steps(self, samples: int) -> int | None:
        """The steps of a run on so many training samples; None if the clock ends it."""
        if self.epochs is None:
            return self.steps
        return max(math.ceil(self.epochs * math.ceil(samples / self.batch_size)), self.min_steps)


def _check_group(name: str, values: Mapping[str, Any]) -> dict[str, float]:
    known = {key: Option(f"groups.{name}.{key}", hint, None) for key, hint in GROUP.items()}
    return check_options(known, values, f"group {name!r}")
