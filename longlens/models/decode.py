"""A language model token by token: by the states of its layers where they have a step, and how a token is chosen.

Positions are those of a window. A model was trained on windows of so many tokens, and beyond them its positions are
not defined (learned ones, the biases of Mega) or were never met (sinusoids, rotations). So a text that outgrows the
window starts a new one, with the last half of the tokens, at position 0: in any case, with states or without.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longlens.errors import BadInput, RunError
from longlens.models.config import Writing
from longlens.models.model import Model


def has_steps(layer: nn.Module, width: int) -> bool:
    """Whether a layer can go on from a state. Some have a step, but not with all options, and say so."""
    if not hasattr(layer, "step"):
        return False
    first = next(layer.parameters(), torch.empty(0))
    try:
        layer.step(first.new_zeros(1, width))  # pyright: ignore[reportCallIssue]
    except ValueError:
        return False
    return True


def state_tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of a state, whatever it is made of."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from state_tensors(part)
    elif isinstance(state, dict) or hasattr(state, "__dict__"):
        yield from state_tensors(list((state if isinstance(state, dict) else vars(state)).values()))


def changing_tensors(state: Any, other: Any) -> list[Tensor]:
    """The tensors of a state that another one, a step before or after it, does not share. What stays the same, as a
    matrix computed once, is no memory."""
    constant = set(map(id, state_tensors(other)))
    return [tensor for tensor in state_tensors(state) if id(tensor) not in constant]


def window_start(length: int, context: int) -> int:
    """Where the window of a text of so many tokens begins: each begins half a context after the one before it."""
    hop = max(1, context // 2)
    return 0 if length <= context else -(-(length - context) // hop) * hop


class Decoder:
    """A language model that reads texts in parts: ``decoder(tokens)`` takes (B, n) tokens, which follow those before
    them, and returns the scores (B, vocabulary) of the next one.

    Args:
        model: Language model, in evaluation mode.
        context: Most tokens that the model sees; None for as many as in training.
        cached: Keep the states of the layers; otherwise, and for layers without a step, the whole window is read for
            each token, which gives the same.
    """

    def __init__(self, model: Model, *, context: int | None = None, cached: bool = True):
        if model.spec.head != "language":
            raise BadInput(f"a decoder needs a language model, and this one is made to {model.spec.head}")
        self.model, self.context = model, model.spec.max_length if context is None else context
        layers: list[nn.Module] = [block.mixer for block in model.blocks]  # pyright: ignore[reportAssignmentType]
        limits = [getattr(layer, "longest", None) for layer in layers]
        limits.append(model.spec.max_length if model.config.positions == "learned" else None)
        for limit in filter(None, limits):
            if self.context > limit:
                most = f"context must be at most {limit:,}, the positions that were learned"
                raise BadInput(f"{most}, got {self.context:,}")
        self.cached = cached and all(has_steps(layer, model.config.width) for layer in layers)
        self.states: list[Any] = [None] * len(model.blocks)
        self.window: Tensor | None = None  # (B, n), the tokens that the model sees
        self.start = 0  # where they begin in the text

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        window = tokens if self.window is None else torch.cat([self.window, tokens], dim=1)
        start = window_start(self.start + window.shape[1], self.context)
        if start > self.start:
            self.window, self.states = None, [None] * len(self.states)
            window = window[:, start - self.start :]
        seen = 0 if self.window is None or not self.cached else self.window.shape[1]
        self.window, self.start = window, start
        return self._read(window[:, seen:], seen)

    def _read(self, tokens: Tensor, seen: int) -> Tensor:
        """(B, n) tokens from position ``seen`` on -> (B, vocabulary), after the last one."""
        model = self.model
        x = model.embedding(tokens, seen)
        for number, block in enumerate(model.blocks):
            if self.cached:
                x, self.states[number] = block.extend(x, self.states[number])  # pyright: ignore[reportCallIssue]
            else:
                x = block(x)
        x = x[:, -1:]
        return model.head(x if model.norm is None else model.norm(x), None).squeeze(1)


def choices(scores: Tensor, writing: Writing) -> tuple[Tensor, Tensor]:
    """The tokens (n,) to choose from, likeliest first, and their probabilities (n,), which add up to 1: of the scores
    (vocabulary,), divided by the temperature, the likeliest ``top_k``, and of these as few as add up to ``top_p``."""
    scores = scores.double().cpu()
    if not scores.isfinite().all():
        raise RunError("the model gives scores that are not finite: choose another checkpoint")
    scores, tokens = scores.sort(descending=True, stable=True)
    if writing.temperature == 0:
        return tokens[:1], torch.ones(1, dtype=scores.dtype)
    scores, tokens = scores[: writing.top_k], tokens[: writing.top_k]
    likely = torch.softmax((scores - scores[0]) / writing.temperature, dim=0)
    before = likely.cumsum(0) - likely  # the sum of those that are likelier
    kept = int((before < writing.top_p).sum())
    return tokens[:kept], likely[:kept] / likely[:kept].sum()


def write(decoder: Decoder, prompt: Sequence[int], writing: Writing) -> Iterator[int]:
    """The tokens that follow a prompt, one by one, from a new decoder. The same seed gives the same tokens."""
    device = next(decoder.model.parameters()).device
    random = torch.Generator().manual_seed(writing.seed)
    following = torch.tensor([prompt], device=device)  # (1, n)
    for _ in range(writing.tokens):
        tokens, likely = choices(decoder(following)[0], writing)
        drawn = torch.rand(1, dtype=likely.dtype, generator=random)
        place = int(torch.searchsorted(likely.cumsum(0), drawn, right=True))
        token = int(tokens[min(place, len(tokens) - 1)])  # the last sum may be below 1 by a rounding error
        yield token
        following = torch.tensor([[token]], device=device)
