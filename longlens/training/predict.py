"""What a saved model says about new sequences, in batches of similar length and bounded memory."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from longlens.data.codec import Codec, Encoded
from longlens.errors import BadInput
from longlens.models.model import Model, loss_sum, metric_sums, metric_value
from longlens.training.machine import keep_random
from longlens.training.step import Evaluated, in_bfloat16

POOL = 8  # batches whose sequences are sorted by length together,
MOST = 1 << 18  # or fewer, of so many numbers in all
AT_ONCE = 1024  # outputs that are scored together

Row = Encoded | tuple[Encoded, Encoded]  # a sequence, or a pair of them
Tag = TypeVar("Tag")


def answers(
    model: Model, rows: Iterable[tuple[Tag, Row]], *, batch_size: int = 32, precision: str = "float32"
) -> Iterator[tuple[Tag, np.ndarray]]:
    """The outputs of a model for each row, as a ``Codec`` encodes it, in the order of the rows, and whatever came with
    it: scores of classes (K,), a number () or numbers (M,), or the scores (K,) of the token that follows the last one.
    Rows are read as they are needed."""
    if batch_size < 1:
        raise BadInput(f"batch_size must be at least 1, got {batch_size}")
    pool: list[tuple[Tag, Row]] = []
    numbers = 0
    for tag, row in rows:
        pool.append((tag, row))
        numbers += sum(part.size for part in _parts(row))
        if len(pool) == POOL * batch_size or numbers >= MOST:
            yield from zip((tag for tag, _ in pool), _outputs(model, pool, batch_size, precision), strict=True)
            pool, numbers = [], 0
    yield from zip((tag for tag, _ in pool), _outputs(model, pool, batch_size, precision), strict=True)


def _parts(row: Row) -> Sequence[Encoded]:
    return row if isinstance(row, tuple) else (row,)


@torch.no_grad()
def _outputs(model: Model, pool: Sequence[tuple[Any, Row]], batch_size: int, precision: str) -> list[np.ndarray]:
    """The output for each row, computed in batches of similar length."""
    device, found = next(model.parameters()).device, [np.empty(0)] * len(pool)
    order = sorted(range(len(pool)), key=lambda index: max(map(len, _parts(pool[index][1]))))
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        with keep_random(device):
            torch.manual_seed(0)  # for layers that draw numbers: the same ones as in an evaluation
            with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16(precision, device)):
                outputs = forward_rows(model, [pool[index][1] for index in batch]).float().cpu().numpy()
        for index, output in zip(batch, outputs, strict=True):
            found[index] = output
    return found


def forward_rows(model: Model, rows: Sequence[Row]) -> Tensor:
    """The outputs (B, …) of some rows, padded together; of a language model, those at the last token of each."""
    padded, mask = pad_rows(rows, next(model.parameters()).device)
    outputs = model(padded, None if mask.all() else mask)
    if model.spec.head == "language":
        outputs = outputs[torch.arange(len(outputs), device=mask.device), mask.sum(dim=1) - 1]
    return outputs


def pad_rows(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, L, …) inputs and (B, L) where they are none; of pairs (B, 2, L)."""
    parts = [torch.from_numpy(part) for row in rows for part in _parts(row)]
    lengths = torch.tensor([len(part) for part in parts])
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    if isinstance(rows[0], tuple):
        padded, mask = padded.unflatten(0, (-1, 2)), mask.unflatten(0, (-1, 2))
    return padded.to(device), mask.to(device)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities, in float64 so that they add up to 1."""
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def encode_rows(codec: Codec, inputs: Iterable[Any]) -> Iterator[tuple[int, Row]]:
    """Sequences, or pairs for a task of pairs, as the model takes them, with their numbers."""
    for index, given in enumerate(inputs):
        place = f"inputs[{index}]"
        if codec.head == "match":
            if isinstance(given, str) or len(given) != 2:
                raise BadInput(f"{place} must be a pair of sequences, got {len(given)}")
            first, second = (codec.encode(part, place) for part in given)
            yield index, (first, second)
        else:
            yield index, codec.encode(given, place)


def predict(
    model: Model,
    inputs: Iterable[Any],
    *,
    codec: Codec,
    names: bool = False,
    probabilities: bool = False,
    batch_size: int = 32,
    precision: str = "float32",
) -> np.ndarray:
    """What a model says about sequences, or pairs of them, of any lengths: see ``Run.predict``."""
    if isinstance(inputs, str):
        raise BadInput("inputs must be a list of sequences, got one text: put it into a list")
    for option, given in (("probabilities", probabilities), ("names", names)):
        if given and codec.head == "regress":
            raise BadInput(f"{option} must be False for a task whose answers are numbers, got True")
    if names and probabilities:
        raise BadInput("names and probabilities cannot both be asked for: columns are in the order of codec.names")
    rows = encode_rows(codec, inputs)
    found = [output for _, output in answers(model, rows, batch_size=batch_size, precision=precision)]
    if not found:
        return np.zeros(0)
    outputs = np.stack(found)
    if names or codec.head == "regress":
        return np.asarray(codec.decode(outputs))
    return softmax(outputs) if probabilities else outputs.argmax(axis=-1)


def score(
    model: Model, rows: Iterable[tuple[int | float, Row]], *, batch_size: int = 32, precision: str = "float32"
) -> tuple[Evaluated, int]:
    """The metric and the loss on sequences that come with their targets, and how many they were."""
    spec, metrics, losses, count = model.spec, torch.zeros(()), 0.0, 0
    found = answers(model, rows, batch_size=batch_size, precision=precision)
    while some := list(islice(found, AT_ONCE)):
        kind = torch.float32 if spec.head == "regress" else torch.int64
        targets = torch.tensor([target for target, _ in some], dtype=kind)
        outputs = torch.from_numpy(np.stack([output for _, output in some]))
        metrics = metrics + metric_sums(spec.metric, outputs, targets)
        losses += float(loss_sum(spec, outputs, targets))
        count += len(some)
    if not count:
        raise BadInput("there is no sequence to evaluate on; there must be one at least")
    return Evaluated(metric_value(spec.metric, metrics), losses / count), count
