"""Our layers beside those of other packages, at equal sizes, forward and backward: ``longlens bench packages``.

What a package leaves to its user, as the projections around local-attention or the norm before mega-pytorch, both get.
"""

import contextlib
import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.bench.layers import forward_backward
from longlens.bench.measure import check_given, time_interleaved, write_result
from longlens.errors import BadInput
from longlens.files import check_out
from longlens.mixers.common import MultiHead, check_heads
from longlens.mixers.registry import create_mixer
from longlens.options import Size, nearest
from longlens.progress import progress
from longlens.reports.sheet import Column, Sheet
from longlens.training.distributed import choose_device

Pair = tuple[nn.Module, nn.Module]  # ours, theirs


def bench_packages(
    *,
    packages: tuple[str, ...] | None = None,
    lengths: tuple[Size, ...] = (1024, 4096),
    width: Size = 128,
    heads: Size = 4,
    batch: Size = 2,
    rounds: Size = 7,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    out: Path | None = None,
) -> list[Sheet | str]:
    """Our layers beside the same layers of other packages at equal sizes, forward and backward.

    Args:
        packages: Packages to compare with; by default all that are installed (the extra 'dev' has them).
        lengths: Sequence lengths.
        width: Channels of a token.
        heads: Number of heads, for layers that have heads.
        batch: Sequences of a batch.
        rounds: Interleaved rounds; the best of each layer counts.
        device: Device to measure on; auto is a GPU if there is one.
        out: JSON file to write the figures and the environment to.
    """
    check_given(packages=packages, lengths=lengths)
    check_heads(width, heads)
    chosen = tuple(PACKAGES) if packages is None else packages
    for name in chosen:
        if name not in PACKAGES:
            raise BadInput(f"unknown package {name!r}; {nearest(name, PACKAGES)}")
    where = choose_device(device)
    check_out(out)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with progress("packages", len(chosen) * len(lengths)) as done:
        for name in chosen:
            module, make = PACKAGES[name]
            try:
                import_module(module)
            except ImportError:
                notes.append(f"{name} is not installed: pip install -c constraints.txt -e '.[dev]'")
                continue
            for length in lengths:
                row = {"package": name, "length": length}
                try:
                    rows.append(row | _measure(make, (batch, length, width), heads, rounds, where))
                except (RuntimeError, ValueError, AssertionError) as error:  # a size that a package does not take
                    rows.append(row | {"refused": str(error).splitlines()[0]})
                    notes.append(f"{name} at L = {length:,}: {rows[-1]['refused']}")
                done(len(rows), name)
    table = _table(f"forward and backward of a layer, width {width}, {heads} heads, batch {batch}", rows)
    if out is not None:
        size = {"width": width, "heads": heads, "batch": batch}
        notes.append(write_result(out, where, {"size": size, "rounds": rounds, "rows": rows}))
    return [table, *notes]


def _measure(
    make: Callable[[int, int, int, int], Pair],
    shape: tuple[int, int, int],
    heads: int,
    rounds: int,
    device: torch.device,
) -> dict[str, Any]:
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # some packages print advice
        ours, theirs = (layer.to(device) for layer in make(*shape, heads))
    jobs = {name: forward_backward(layer, shape, device) for name, layer in (("ours", ours), ("theirs", theirs))}
    timings = time_interleaved(jobs, device, rounds, long=10.0)
    return {name: timing.best for name, timing in timings.items()}


def _table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    columns = [Column(name, number=True) for name in ("L", "theirs, ms", "ours, ms", "theirs / ours")]
    table = Sheet(title, [Column("package"), *columns])
    for row in rows:
        cells = ["–", "–", "–"]
        if "refused" not in row:
            cells = [f"{1e3 * row['theirs']:,.1f}", f"{1e3 * row['ours']:,.1f}", f"×{row['theirs'] / row['ours']:.2f}"]
        table.rows.append([row["package"], f"{row['length']:,}", *cells])
    return table


def _linformer(batch: int, length: int, width: int, heads: int) -> Pair:
    theirs = import_module("linformer").LinformerSelfAttention(width, length, k=256, heads=heads)
    ours = create_mixer("linformer", width, max_length=length, heads=heads, share="headwise", bias=False)
    return ours, theirs


def _performer(batch: int, length: int, width: int, heads: int) -> Pair:
    package = import_module("performer_pytorch")
    theirs = package.SelfAttention(width, heads=heads, dim_head=width // heads)
    return create_mixer("performer", width, heads=heads, bias=False), theirs


def _reformer(batch: int, length: int, width: int, heads: int) -> Pair:
    package = import_module("reformer_pytorch")
    theirs = package.LSHSelfAttention(width, heads=heads, bucket_size=64, n_hashes=8)
    return create_mixer("reformer", width, max_length=length, heads=heads, bias=False), theirs


def _local(batch: int, length: int, width: int, heads: int) -> Pair:
    attention = import_module("local_attention").LocalAttention(
        window_size=64, causal=True, look_backward=1, use_rotary_pos_emb=False, autopad=True
    )

    class Theirs(MultiHead):  # with torch's own start
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return attention(query, key, value)

    ours = create_mixer("local", width, heads=heads, block_size=64, neighbors=1, bidirectional=False)
    return ours, Theirs(width, heads)


def _mega(batch: int, length: int, width: int, heads: int) -> Pair:
    theirs = import_module("mega_pytorch").MegaLayer(
        dim=width, ema_heads=16, attn_dim_qk=32, attn_dim_value=width // 2, causal=True
    )  # a norm is part of its blocks, not of this layer
    return create_mixer("mega", width, max_length=length, bidirectional=False), theirs


def _s5(batch: int, length: int, width: int, heads: int) -> Pair:
    theirs = import_module("s5").S5(width, state_width=width, block_count=8)

    class Gated(nn.Module):
        """The package's layer ends before the gate."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = theirs, nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(self.inner(x))
            return y * torch.sigmoid(self.gate(y))

    return create_mixer("s5", width, state_size=width), Gated()


def _gss(batch: int, length: int, width: int, heads: int) -> Pair:
    theirs = import_module("gated_state_spaces_pytorch").GSS(
        dim=width, dim_expansion_factor=2, dss_kernel_N=128, dss_kernel_H=width // 4
    )
    ours = create_mixer("gss", width, expansion=2.0, reduction=4, state_size=128)

    class Residual(nn.Module):
        """The package's layer has norm and residual inside."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(width), ours

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(self.norm(x))

    return Residual(), theirs


def _bigbird(batch: int, length: int, width: int, heads: int) -> Pair:
    package = import_module("transformers.models.big_bird.modeling_big_bird")
    config = package.BigBirdConfig(hidden_size=width, num_attention_heads=heads, max_position_embeddings=length)
    sparse = package.BigBirdBlockSparseAttention(config, seed=0)
    masks = package.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(batch, length), config.block_size)
    names = ("to_blocked_mask", "band_mask", "from_mask", "to_mask")

    class Theirs(nn.Module):
        """With the projection that the package's next module has."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = sparse, nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            given = {name: mask.to(x.device) for name, mask in zip(names, masks, strict=True)}
            return self.out(self.inner(x, from_blocked_mask=given["to_blocked_mask"], **given)[0])

    return create_mixer("bigbird", width, max_length=length, heads=heads), Theirs()


PACKAGES: dict[str, tuple[str, Callable[[int, int, int, int], Pair]]] = {
    "linformer": ("linformer", _linformer),
    "performer-pytorch": ("performer_pytorch", _performer),
    "reformer-pytorch": ("reformer_pytorch", _reformer),
    "local-attention": ("local_attention", _local),
    "mega-pytorch": ("mega_pytorch", _mega),
    "s5-pytorch": ("s5", _s5),
    "gated-state-spaces-pytorch": ("gated_state_spaces_pytorch", _gss),
    "transformers-bigbird": ("transformers", _bigbird),
}
