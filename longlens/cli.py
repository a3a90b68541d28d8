"""The ``longlens`` command. Nothing here imports torch before a command runs, so that help is instant."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import tyro
from rich.console import Console

from longlens import __version__

Device = Literal["cpu", "cuda"]


def bench_attention(
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    head_dims: tuple[int, ...] = (32, 64),
    groups: tuple[Literal["attention", "chunk", "layer"], ...] = ("attention", "chunk", "layer"),
    heads: int = 8,
    batch: int = 1,
    window: int = 5,
    max_rate: float = 1e-3,
    chunk_size: int = 128,
    rounds: int = 5,
    flex: bool = True,
    device: Device = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    out: Path | None = None,
) -> None:
    """Time and peak memory of LaS attention beside torch's plain attention, the formula and FlexAttention.

    Args:
        lengths: sequence lengths.
        head_dims: widths of a head.
        groups: what to compare: the operator, the operator in chunks, the whole layer.
        heads: number of heads.
        batch: batch size.
        window: the smoothing window, odd.
        max_rate: the largest decay rate.
        chunk_size: length of a chunk.
        rounds: interleaved rounds; the best of each candidate counts.
        flex: include FlexAttention, which compiles for each length.
        device: where to run.
        dtype: of the inputs.
        out: also write the figures and the environment to this JSON file.
    """
    import longlens.bench.attention as bench

    setting = bench.Setting(heads, batch, window, max_rate, chunk_size, device, dtype)
    bench.bench_attention(
        setting, lengths=lengths, head_dims=head_dims, groups=groups, rounds=rounds, flex=flex, out=out,
        console=_console(),
    )  # fmt: skip


def figures_eld(
    out: Path = Path("results/eld.png"),
    heads: int = 8,
    max_rate: float = 1e-3,
    length: int = 4096,
) -> None:
    """Draw the exponentially locally decaying (ELD) operator of the paper's Section 4.1.

    Args:
        out: the picture to write (.png, .pdf or .svg).
        heads: number of heads.
        max_rate: the largest decay rate B.
        length: sequence length.
    """
    from longlens.reports.eld import draw_eld

    draw_eld(out, heads=heads, max_rate=max_rate, length=length)
    _console().print(f"written to {out}", markup=False)


def demo(out: Path = Path("results")) -> None:
    """LaS attention in two minutes: it equals its formula, what it costs, and what it looks like.

    Args:
        out: folder for the figures and the picture.
    """
    from longlens.demo import run_demo

    run_demo(out, _console())


COMMANDS: dict[str, Any] = {
    "demo": demo,
    "bench": {"attention": bench_attention},
    "figures": {"eld": figures_eld},
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a bad argument is one clear line on stderr and exit code 2."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself on stderr otherwise
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"longlens {__version__}")
        return
    name, commands = "longlens", COMMANDS
    while arguments and isinstance(commands.get(arguments[0]), dict):
        commands = commands[arguments[0]]
        name += " " + arguments.pop(0)
    try:
        tyro.extras.subcommand_cli_from_dict(
            {key: _group(key, entry) if isinstance(entry, dict) else entry for key, entry in commands.items()},
            prog=name,
            description="Long-range sequence layers for PyTorch, around Local and Smooth (LaS) attention.",
            args=arguments,
        )
    except (ValueError, TypeError, OSError) as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        _fail("not enough memory for these sizes: try smaller ones")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"longlens: {message}", highlight=False, soft_wrap=True, markup=False)
    sys.exit(2)


def _group(name: str, commands: dict[str, Any]) -> Callable[[], None]:
    """A line of the help: the commands of a group. ``main`` has gone into the group before it could be called."""

    def group() -> None: ...

    group.__doc__ = f"{', '.join(commands)} ('longlens {name} --help' shows more)."
    return group


def _console() -> Console:
    """Wide enough for its tables also where the output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


if __name__ == "__main__":
    main()
