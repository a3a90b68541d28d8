"""Our layers beside those of other packages, at equal sizes, forward and backward: ``longlens bench packages``.

What a package leaves to its user, as the projections around local-attention or the norm before mega-pytorch, both get.
"""

import contextlib
import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longlens.bench.layers import forward_backward
from longlens.bench.measure import Row, begin, make_table, time_interleaved, write_result
from longlens.errors import BadInput, first_line
from longlens.mixers.common import MultiHead, check_heads
from longlens.mixers.registry import create_mixer
from longlens.options import Device, Size, nearest
from longlens.progress import progress
from longlens.reports.sheet import Sheet

Pair = tuple[nn.Module, nn.Module]  # ours, theirs


class Sizes(NamedTuple):
    batch: int
    length: int
    width: int
    heads: int


COLUMNS = {"package": "{package}", "L": "{length:,}", "theirs, ms": "{theirs_ms:,.1f}", "ours, ms": "{ours_ms:,.1f}"}
COLUMNS |= {"theirs / ours": "×{ratio:.2f}"}
Maker = Callable[[Any, Sizes], Pair]


def bench_packages(
    *,
    packages: tuple[str, ...] | None = None,
    lengths: tuple[Size, ...] = (1024, 4096),
    width: Size = 128,
    heads: Size = 4,
    batch: Size = 2,
    rounds: Size = 7,
    device: Device = "cpu",
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
    check_heads(width, heads)
    chosen = tuple(PACKAGES) if packages is None else packages
    for name in chosen:
        if name not in PACKAGES:
            raise BadInput(f"unknown package {name!r}; {nearest(name, PACKAGES)}")
    where = begin(device, out, packages=packages, lengths=lengths)
    rows: list[Row] = []
    notes: list[str] = []
    with progress("packages", len(chosen) * len(lengths)) as done:
        for name in chosen:
            module, make = PACKAGES[name]
            try:
                package = import_module(module)
            except ImportError:
                source = "'longlens[hf]'" if module.startswith("transformers.") else name
                notes.append(f"{name} is not installed: pip install {source}")
                continue
            for length in lengths:
                row = {"package": name, "length": length}
                try:
                    row |= _measure(make, package, Sizes(batch, length, width, heads), rounds, where)
                except (RuntimeError, ValueError, AssertionError) as error:  # a size that a package does not take
                    row["refused"] = first_line(error)
                    notes.append(f"{name} at L = {length:,}: {row['refused']}")
                rows.append(row)
                done(len(rows), name)
    size = {"width": width, "heads": heads, "batch": batch}
    title = f"forward and backward of a layer, width {width}, {heads} heads, batch {batch}"
    return [make_table(title, rows, COLUMNS), *notes, *write_result(out, where, size=size, rounds=rounds, rows=rows)]


def _measure(make: Maker, package: Any, size: Sizes, rounds: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # some packages print advice
        layers = dict(zip(("ours", "theirs"), make(package, size), strict=True))
    jobs = {name: forward_backward(layer.to(device), size[:3], device) for name, layer in layers.items()}
    seconds = time_interleaved(jobs, device, rounds, long=10.0)
    in_ms = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    return {**seconds, **in_ms, "ratio": seconds["theirs"] / seconds["ours"]}


class Around(nn.Module):
    """A layer within what the other side has around it."""

    def __init__(self, inner: nn.Module, other: nn.Module, run: Callable[[Any, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.other = inner, other
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner, self.other, x)


def _linformer(package: Any, size: Sizes) -> Pair:
    theirs = package.LinformerSelfAttention(size.width, size.length, k=256, heads=size.heads)
    options = {"max_length": size.length, "heads": size.heads, "share": "headwise", "bias": False}
    return create_mixer("linformer", size.width, **options), theirs


def _performer(package: Any, size: Sizes) -> Pair:
    theirs = package.SelfAttention(size.width, heads=size.heads, dim_head=size.width // size.heads)
    return create_mixer("performer", size.width, heads=size.heads, bias=False), theirs


def _reformer(package: Any, size: Sizes) -> Pair:
    theirs = package.LSHSelfAttention(size.width, heads=size.heads, bucket_size=64, n_hashes=8)
    return create_mixer("reformer", size.width, max_length=size.length, heads=size.heads, bias=False), theirs


def _local(package: Any, size: Sizes) -> Pair:
    options = {"causal": True, "look_backward": 1, "use_rotary_pos_emb": False, "autopad": True}
    attention = package.LocalAttention(window_size=64, **options)

    class Theirs(MultiHead):  # with torch's own start
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return attention(query, key, value)

    ours = create_mixer("local", size.width, heads=size.heads, block_size=64, neighbors=1, bidirectional=False)
    return ours, Theirs(size.width, size.heads)


def _mega(package: Any, size: Sizes) -> Pair:  # a norm is part of the package's blocks, not of this layer
    options = {"ema_heads": 16, "attn_dim_qk": 32, "attn_dim_value": size.width // 2, "causal": True}
    theirs = package.MegaLayer(dim=size.width, **options)
    return create_mixer("mega", size.width, max_length=size.length, bidirectional=False), theirs


def _s5(package: Any, size: Sizes) -> Pair:
    def gated(inner: nn.Module, gate: nn.Module, x: Tensor) -> Tensor:  # the package's layer ends before the gate
        y = F.gelu(inner(x))
        return y * torch.sigmoid(gate(y))

    theirs = package.S5(size.width, state_width=size.width, block_count=8)
    ours = create_mixer("s5", size.width, state_size=size.width)
    return ours, Around(theirs, nn.Linear(size.width, size.width), gated)


def _gss(package: Any, size: Sizes) -> Pair:
    theirs = package.GSS(dim=size.width, dim_expansion_factor=2, dss_kernel_N=128, dss_kernel_H=size.width // 4)
    ours = create_mixer("gss", size.width, expansion=2.0, reduction=4, state_size=128)
    # The package's layer has norm and residual inside.
    return Around(ours, nn.LayerNorm(size.width), lambda inner, norm, x: x + inner(norm(x))), theirs


def _bigbird(package: Any, size: Sizes) -> Pair:
    batch, length, width, heads = size
    config = package.BigBirdConfig(hidden_size=width, num_attention_heads=heads, max_position_embeddings=length)
    sparse = package.BigBirdBlockSparseAttention(config, seed=0)
    masks = package.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(batch, length), config.block_size)
    names = ("to_blocked_mask", "band_mask", "from_mask", "to_mask")

    def projected(inner: nn.Module, out: nn.Module, x: Tensor) -> Tensor:  # as the package's next module does
        given = {name: mask.to(x.device) for name, mask in zip(names, masks, strict=True)}
        return out(inner(x, from_blocked_mask=given["to_blocked_mask"], **given)[0])

    ours = create_mixer("bigbird", width, max_length=length, heads=heads)
    return ours, Around(sparse, nn.Linear(width, width), projected)


PACKAGES: dict[str, tuple[str, Maker]] = {
    "linformer": ("linformer", _linformer),
    "performer-pytorch": ("performer_pytorch", _performer),
    "reformer-pytorch": ("reformer_pytorch", _reformer),
    "local-attention": ("local_attention", _local),
    "mega-pytorch": ("mega_pytorch", _mega),
    "s5-pytorch": ("s5", _s5),
    "gated-state-spaces-pytorch": ("gated_state_spaces_pytorch", _gss),
    "transformers-bigbird": ("transformers.models.big_bird.modeling_big_bird", _bigbird),
}
