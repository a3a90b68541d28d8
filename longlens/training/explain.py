"""Which part of a sequence decided: attributions by captum, for any layer.

Integrated gradients (Sundararajan et al. 2017) from a sequence that says nothing to the given one: the attributions of
all values add up to the difference of the two answers. Numbers start at the mean of the training set, tokens at the
mean of all embedded symbols. Occlusion (Zeiler & Fergus 2014) replaces a short window by these, and looks what changes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from longlens.data.codec import Codec
from longlens.errors import BadInput
from longlens.models.model import Model
from longlens.options import nearest
from longlens.training.machine import keep_random

STEPS = 64  # of the path along which gradients are added up
AT_ONCE = 8  # of these, or of occluded sequences, in a batch
WINDOWS = 32  # how often the window of an occlusion fits into a sequence,
LEAST = 3  # which has so many values at least: neighbors often say the same, and one alone is not missed

Method = Literal["gradients", "occlusion"]


@dataclass(frozen=True)
class Explanation:
    """What each value of a sequence adds to an answer."""

    attributions: np.ndarray  # (L,) of tokens, (L, C) of numbers
    target: str | None  # the class or token whose log-odds they add to; None if they add to a predicted number
    answer: float  # the log-odds of the target, or the number
    baseline: float  # the same of a sequence that says nothing
    probability: float | None  # of the target
    symbols: list[str] | None  # (L,) of tokens
    values: np.ndarray | None  # (L, C) numbers as they were given
    shape: tuple[int, int] | None  # of a picture
    method: Method
    channels: Sequence[str] = ()  # their names, if they have any

    @property
    def by_position(self) -> np.ndarray:
        """(L,), channels together."""
        return self.attributions if self.attributions.ndim == 1 else self.attributions.sum(axis=1)

    def decisive(self, share: float = 0.5) -> tuple[int, int]:
        """The shortest part, as its first and last position from 1 on, that has this share of all attributions without
        their signs."""
        weights = np.abs(self.attributions).reshape(len(self.attributions), -1).sum(axis=1)
        sums = np.concatenate([[0.0], np.cumsum(weights)])
        if sums[-1] == 0:  # nothing counts
            return 1, len(weights)
        ends = np.searchsorted(sums, sums[:-1] + share * sums[-1] * (1 - 1e-9))
        lengths = np.where(ends <= len(weights), ends - np.arange(len(weights)), len(weights) + 1)
        first = int(lengths.argmin())
        return first + 1, int(ends[first])


def explain(
    model: Model, codec: Codec, sequence: Any, *, place: str = "the sequence", target: str | None = None, method: Method
) -> Explanation:
    """Attributions of a sequence: see ``Run.explain``. ``place`` says in an error where it is from."""
    if find_spec("captum") is None:
        raise BadInput("captum is not installed: pip install 'longlens[explain]'")
    if method not in ("gradients", "occlusion"):
        raise BadInput(f"method must be gradients or occlusion, got {method!r}")
    spec = model.spec
    if spec.head == "match" or (spec.head == "regress" and spec.positions is not None):
        raise BadInput("explain is for tasks with one answer for one sequence, and this one has pairs or many numbers")
    encoded = codec.encode(sequence, place)
    model, given, baseline = _from_vectors(model, encoded)
    with torch.no_grad():
        outputs = _score(model, given)
    chosen = None if spec.head == "regress" else _choose(codec, outputs[0], target)

    def answer(vectors: Tensor) -> Tensor:
        """(B,) the log-odds of the chosen class, or the number without scaling."""
        outputs = _score(model, vectors).float()
        if chosen is None:
            return outputs * codec.label_deviation + codec.label_mean
        others = torch.arange(outputs.shape[1], device=outputs.device) != chosen
        return outputs[:, chosen] - outputs[:, others].logsumexp(dim=1)

    real = codec.inputs == "real"
    attributions = _attribute(answer, given, baseline, method, channels=1 if real else given.shape[2])
    with torch.no_grad():
        before, after = answer(baseline).item(), answer(given).item()
    return Explanation(
        (attributions if real else attributions.sum(dim=-1))[0].double().cpu().numpy(),
        None if chosen is None else codec.name(chosen),
        after,
        before,
        None if chosen is None else outputs[0].softmax(dim=-1)[chosen].item(),
        None if real else codec.shown(encoded),
        codec.unscale(encoded) if real else None,
        spec.shape,
        method,
        codec.channels,
    )


def _choose(codec: Codec, scores: Tensor, target: str | None) -> int:
    if target is None:
        return int(scores.argmax())
    names = [codec.name(index) for index in range(len(scores))]
    if target not in names:
        raise BadInput(f"target must be a class of the run, got {target!r}; {nearest(target, names)}")
    return names.index(target)


def _score(model: Model, vectors: Tensor) -> Tensor:
    """The outputs (B, K) or (B,) of a model that takes vectors."""
    with keep_random(vectors.device):
        torch.manual_seed(0)  # for layers that draw numbers: the same ones each time
        outputs = model(vectors)
    return outputs[:, -1] if model.spec.head == "language" else outputs


def _from_vectors(model: Model, encoded: np.ndarray) -> tuple[Model, Tensor, Tensor]:
    """A model that takes vectors, those of the sequence (1, L, D), and those that say nothing."""
    device = next(model.parameters()).device
    inputs = torch.from_numpy(encoded)[None].to(device)
    model = copy.deepcopy(model).eval()
    if model.spec.inputs == "real":
        return model, inputs, torch.zeros_like(inputs)
    values = model.embedding.values
    assert isinstance(values, nn.Embedding)
    setattr(model.embedding, "values", nn.Identity())  # noqa: B010 (it is declared as another module)
    with torch.no_grad():
        vectors = values(inputs)
        return model, vectors, values.weight.mean(dim=0).expand_as(vectors).clone()


def _attribute(
    answer: Callable[[Tensor], Tensor], given: Tensor, baseline: Tensor, method: Method, channels: int
) -> Tensor:
    """(1, L, D) what each number adds; ``channels`` of a position are left out together, for a token all of them."""
    from captum.attr import IntegratedGradients, Occlusion

    if method == "gradients":
        how: dict[str, Any] = {"n_steps": STEPS, "internal_batch_size": AT_ONCE}
        return IntegratedGradients(answer).attribute(given, baselines=baseline, **how).detach()
    length = given.shape[1]
    window = min(max(LEAST, length // WINDOWS), length)
    with torch.no_grad():
        changes = Occlusion(answer).attribute(
            given,
            baselines=baseline,
            sliding_window_shapes=(window, channels),
            strides=(max(1, window // 2), channels),
            perturbations_per_eval=AT_ONCE,
        )
    return changes / channels  # each number of a window has the change of the whole window
