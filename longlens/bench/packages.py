"""Our layers beside those of other packages, at equal sizes, forward and backward: ``longlens bench packages``.

What a package leaves to its user, as the projections around local-attention or the norm before mega-pytorch, both get.
"""

import contextlib
import io
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from longlens.bench.layers import Size, forward_backward
from longlens.bench.measure import check_counts, check_out, time_interleaved, write_result
from longlens.console import say
from longlens.mixers.base import create_mixer
from longlens.mixers.common import MultiHead, check_heads
from longlens.naming import nearest
from longlens.progress import progress

Pair = tuple[nn.Module, nn.Module]  # ours, theirs


def _linformer(size: Size, length: int) -> Pair:
    theirs = import_module("linformer").LinformerSelfAttention(size.width, length, k=256, heads=size.heads)
    ours = create_mixer("linformer", size.width, max_length=length, heads=size.heads, share="headwise", bias=False)
    return ours, theirs


def _performer(size: Size, length: int) -> Pair:
    package = import_module("performer_pytorch")
    theirs = package.SelfAttention(size.width, heads=size.heads, dim_head=size.width // size.heads)
    return create_mixer("performer", size.width, heads=size.heads, bias=False), theirs


def _reformer(size: Size, length: int) -> Pair:
    package = import_module("reformer_pytorch")
    theirs = package.LSHSelfAttention(size.width, heads=size.heads, bucket_size=64, n_hashes=8)
    return create_mixer("reformer", size.width, max_length=length, heads=size.heads, bias=False), theirs


def _local(size: Size, length: int) -> Pair:
    attention = import_module("local_attention").LocalAttention(
        window_size=64, causal=True, look_backward=1, use_rotary_pos_emb=False, autopad=True
    )

    class Theirs(MultiHead):  # with torch's own start
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return attention(query, key, value)

    ours = create_mixer(
        "local", size.width, heads=size.heads, block_size=64, neighbors=1, bidirectional=False
    )  # fmt: skip
    return ours, Theirs(size.width, size.heads)


def _mega(size: Size, length: int) -> Pair:
    theirs = import_module("mega_pytorch").MegaLayer(
        dim=size.width, ema_heads=16, attn_dim_qk=32, attn_dim_value=size.width // 2, causal=True
    )  # a norm is part of its blocks, not of this layer
    return create_mixer("mega", size.width, max_length=length, bidirectional=False), theirs


def _s5(size: Size, length: int) -> Pair:
    theirs = import_module("s5").S5(size.width, state_width=size.width, block_count=8)

    class Gated(nn.Module):
        """The package's layer ends before the gate."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = theirs, nn.Linear(size.width, size.width)

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(self.inner(x))
            return y * torch.sigmoid(self.gate(y))

    return create_mixer("s5", size.width, state_size=size.width), Gated()


def _gss(size: Size, length: int) -> Pair:
    theirs = import_module("gated_state_spaces_pytorch").GSS(
        dim=size.width, dim_expansion_factor=2, dss_kernel_N=128, dss_kernel_H=size.width // 4
    )
    ours = create_mixer("gss", size.width, expansion=2.0, reduction=4, state_size=128)

    class Block(nn.Module):
        """The package's layer has norm and residual inside."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(size.width), ours

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(self.norm(x))

    return Block(), theirs


def _bigbird(size: Size, length: int) -> Pair:
    package = import_module("transformers.models.big_bird.modeling_big_bird")
    config = package.BigBirdConfig(
        hidden_size=size.width, num_attention_heads=size.heads, max_position_embeddings=length
    )
    sparse = package.BigBirdBlockSparseAttention(config, seed=0)
    masks = package.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(size.batch, length), config.block_size)
    names = ("to_blocked_mask", "band_mask", "from_mask", "to_mask")

    class Theirs(nn.Module):
        """With the projection that the package's next module has."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = sparse, nn.Linear(size.width, size.width)

        def forward(self, x: Tensor) -> Tensor:
            given = {name: mask.to(x.device) for name, mask in zip(names, masks, strict=True)}
            return self.out(self.inner(x, from_blocked_mask=given["to_blocked_mask"], **given)[0])

    return create_mixer("bigbird", size.width, max_length=length, heads=size.heads), Theirs()


PACKAGES: dict[str, tuple[str, Callable[[Size, int], Pair]]] = {
    "linformer": ("linformer", _linformer),
    "performer-pytorch": ("performer_pytorch", _performer),
    "reformer-pytorch": ("reformer_pytorch", _reformer),
    "local-attention": ("local_attention", _local),
    "mega-pytorch": ("mega_pytorch", _mega),
    "s5-pytorch": ("s5", _s5),
    "gated-state-spaces-pytorch": ("gated_state_spaces_pytorch", _gss),
    "transformers-bigbird": ("transformers", _bigbird),
}


def bench_packages(
    size: Size,
    *,
    packages: tuple[str, ...],
    lengths: tuple[int, ...],
    rounds: int,
    device: str,
    out: Path | None,
    console: Console,
) -> list[dict[str, Any]]:
    """Measure, print the table, write ``out``, and return a row for each package and length."""
    check_counts(**asdict(size), lengths=lengths, rounds=rounds)
    check_heads(size.width, size.heads)
    check_out(out)
    for name in packages:
        if name not in PACKAGES:
            raise ValueError(f"{name!r} is not compared; {nearest(name, list(PACKAGES))}")
    rows: list[dict[str, Any]] = []
    chosen = packages or tuple(PACKAGES)
    with progress("packages", len(chosen) * len(lengths)) as done:
        for name in chosen:
            module, make = PACKAGES[name]
            try:
                import_module(module)
            except ImportError:
                say(console, f"{name} is not installed: pip install -c constraints.txt -e '.[dev]'")
                continue
            for length in lengths:
                row = {"package": name, "length": length}
                try:
                    rows.append(row | _measure(make, size, length, rounds, device))
                except (RuntimeError, ValueError, AssertionError) as error:  # a size that a package does not take
                    rows.append(row | {"refused": str(error).splitlines()[0]})
                done(len(rows), name)
    console.print(_table(size, rows))
    for row in rows:
        if "refused" in row:
            say(console, f"{row['package']} at L = {row['length']:,}: {row['refused']}")
    if out is not None:
        write_result(out, device, {"size": asdict(size), "rounds": rounds, "rows": rows})
        say(console, f"written to {out}")
    return rows


def _measure(make: Callable[[Size, int], Pair], size: Size, length: int, rounds: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # some packages print advice
        ours, theirs = (layer.to(device) for layer in make(size, length))
    where = torch.device(device)
    jobs = {name: forward_backward(layer, size, length, where) for name, layer in (("ours", ours), ("theirs", theirs))}
    timings = time_interleaved(jobs, where, rounds, long=10.0)
    return {name: timing.best for name, timing in timings.items()}


def _table(size: Size, rows: list[dict[str, Any]]) -> Table:
    title = f"forward and backward of a layer, width {size.width}, {size.heads} heads, batch {size.batch}"
    table = Table("package", title=title, title_justify="left")
    for column in ("L", "its layer", "ours", "its time / ours"):
        table.add_column(column, justify="right")
    for row in rows:
        if "refused" in row:
            table.add_row(row["package"], f"{row['length']:,}", "–", "–", "–")
            continue
        times = [f"{1e3 * row[name]:,.1f} ms" for name in ("theirs", "ours")]
        table.add_row(row["package"], f"{row['length']:,}", *times, f"×{row['theirs'] / row['ours']:.2f}")
    return table
