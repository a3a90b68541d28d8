"""Time and memory of a token that follows many: ``longlens bench decode``.

Layers go on from the state of a text of so many tokens, in turn. The state of a recurrence has a fixed size, and a
token costs the same after any text; attention keeps the keys and values of all tokens, and reads them for each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longlens.bench.layers import BASELINE, heads_of, short, table_by_length
from longlens.bench.measure import Job, Row, begin, time_interleaved, write_result
from longlens.errors import BadInput
from longlens.mixers.common import check_heads
from longlens.mixers.registry import choose_mixer, find_mixer, layer_is_causal, list_mixers
from longlens.models.decode import changing_tensors, has_steps
from longlens.models.model import count_parameters
from longlens.options import Device, Size
from longlens.progress import progress
from longlens.reports.sheet import Sheet

TOKENS = 8  # of a turn, which is short: the text must not grow by much


def bench_decode(
    *,
    mixers: tuple[str, ...] | None = None,
    lengths: tuple[Size, ...] = (1024, 4096, 16384),
    width: Size = 128,
    heads: Size = 4,
    batch: Size = 1,
    rounds: Size = 20,
    device: Device = "cpu",
    out: Path | None = None,
) -> list[Sheet | str]:
    """Tokens a second and memory of every layer with a step, after texts of some lengths, beside the Transformer's
    attention with a cache.

    Args:
        mixers: Layers to measure; by default all that have a step.
        lengths: Tokens of the text that a layer goes on from.
        width: Channels of a token.
        heads: Number of heads, for layers that have heads.
        batch: Texts that grow together.
        rounds: Interleaved rounds; the best of each layer counts.
        device: Device to measure on; auto is a GPU if there is one.
        out: JSON file to write the figures and the environment to.
    """
    check_heads(width, heads)
    where = begin(device, out, mixers=mixers, lengths=lengths)
    lengths = tuple(sorted(set(lengths)))
    layers: dict[str, nn.Module] = {}
    for name in dict.fromkeys([BASELINE, *(list_mixers() if mixers is None else mixers)]):
        layer = _build(name, width, heads, lengths[-1] + TOKENS * (rounds + 2), where)
        if layer_is_causal(layer) and has_steps(layer, width):
            layers[name] = layer
        elif mixers is not None:
            raise BadInput(f"mixers must be layers with a step, and {name} has none: leave it out")
    rows = _measure(layers, lengths, width, batch, rounds, where)
    size = {"width": width, "heads": heads, "batch": batch}
    said = write_result(out, where, size=size, rounds=rounds, rows=rows)
    about = f"width {width}, batch {batch}"
    speed = table_by_length(f"tokens a second, {about}", rows, _speed, *NOTES[:2])
    return [speed, table_by_length(f"memory of the state, {about}", rows, _memory, NOTES[0], NOTES[2]), *said]


def _build(name: str, width: int, heads: int, max_length: int, device: torch.device) -> nn.Module:
    side = {"bidirectional": False} if "bidirectional" in find_mixer(name).options else {}
    torch.manual_seed(0)
    mixer = choose_mixer(name, **heads_of(name, heads), **side)
    return mixer.build(width, max_length=max_length, device=device).eval()


class _Text:
    """A layer after a text of some tokens."""

    def __init__(self, layer: nn.Module, token: Tensor, state: Any):
        self.layer, self.token, self.state = layer, token, state  # token: (B, D)

    def read(self, count: int = TOKENS) -> None:
        """One token after the other, from the last state on. All are the same: their values do not matter."""
        for _ in range(count):
            _, self.state = self.layer.step(self.token, self.state)  # pyright: ignore[reportCallIssue]

    def held(self) -> int:
        """Bytes of what changes in the state, with the room for more tokens that it keeps."""
        _, following = self.layer.step(self.token, self.state)  # pyright: ignore[reportCallIssue]
        changing = [tensor.untyped_storage() for tensor in changing_tensors(self.state, following)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in changing}.values())


def _after(layer: nn.Module, token: Tensor, lengths: tuple[int, ...]) -> Iterator[_Text]:
    """After texts of growing lengths: each read at once, where the layer can, or going on from the one before."""
    state, seen = None, 0
    for length in lengths:
        text = _Text(layer, token, state)
        if hasattr(layer, "prefill"):
            _, text.state = layer.prefill(token.unsqueeze(1).repeat(1, length, 1))  # pyright: ignore[reportCallIssue]
        else:
            text.read(length - seen)
        state, seen = text.state, length
        yield text


@torch.no_grad()
def _measure(
    layers: dict[str, nn.Module], lengths: tuple[int, ...], width: int, batch: int, rounds: int, device: torch.device
) -> list[Row]:
    """All layers after all texts in turn, so that a slow minute of the machine does not look like a long text."""
    torch.manual_seed(1)
    token, texts = torch.randn(batch, width, device=device), dict[tuple[str, int], _Text]()
    with progress("reading", len(layers) * len(lengths), "texts") as done:
        for name, layer in layers.items():
            for length, text in zip(lengths, _after(layer, token, lengths), strict=True):
                texts[name, length] = text
                done(len(texts), name)
    jobs: dict[tuple[str, int], Job] = {key: text.read for key, text in texts.items()}
    with progress("decoding", len(jobs) * rounds) as done:
        seconds = time_interleaved(jobs, device, rounds, on_turn=done, short=0.0)
    rows: list[Row] = []
    for (name, length), text in texts.items():
        row = {"mixer": name, "length": length, "parameters": count_parameters(text.layer)}
        rows.append(row | {"seconds": seconds[name, length] / TOKENS, "bytes": text.held()})
    return rows


def _speed(row: Row, plain: Row) -> str:
    return f"{1 / row['seconds']:,.0f} ×{short(plain['seconds'] / row['seconds'])}"


def _memory(row: Row, plain: Row) -> str:
    return f"{row['bytes'] / 2**10:,.1f} KiB ×{short(row['bytes'] / max(plain['bytes'], 1))}"


NOTES = (
    "Columns: tokens of the text that the layer goes on from.",
    "×: how many times as fast as the first line.",
    "×: relative to the first line. Keys and values that grow have room for up to as many tokens again.",
)
