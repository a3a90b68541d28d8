"""The ``longlens`` command. Nothing here imports torch before a command runs, so that help is instant."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from rich.console import Console

from longlens import __version__
from longlens.naming import nearest

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


def bench_data(
    tasks: tuple[str, ...] = (),
    source: Path | None = None,
    batch_size: int = 32,
    rounds: int = 5,
    out: Path | None = None,
) -> None:
    """Samples a second of each generator, time to import each real set, and what loading costs beside training.

    Everything is made in a temporary folder; nothing of the cache is touched.

    Args:
        tasks: which ones; by default all.
        source: a folder with mnist, cifar10, imdb, wikitext-2, text8, enwik8 and aan, or some of them, to import.
        batch_size: samples in a batch.
        rounds: repetitions; the best of a generator counts, and the median of loading.
        out: also write the figures and the environment to this JSON file.
    """
    import longlens.bench.data as bench

    bench.bench_data(
        tasks=tasks, source=source, batch_size=batch_size, rounds=rounds, out=out, console=_console()
    )  # fmt: skip


def data_list() -> None:
    """All tasks: where their data comes from, and which are prepared."""
    from longlens.tasks.commands import print_tasks

    print_tasks(_console())


def data_verify(names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Compare every file of the prepared sets with its checksum.

    Args:
        names: tasks, or sets by their names; by default all.
    """
    from longlens.tasks.commands import verify_sets

    if not verify_sets(names, _console()):
        sys.exit(1)


def _data_prepare(name: str) -> Callable[..., None]:
    from longlens.tasks.base import create_task, task_class, task_options
    from longlens.tasks.commands import prepare_task

    options = _options(task_class(name))

    def prepare(
        task: Annotated[options, tyro.conf.OmitArgPrefixes],  # pyright: ignore[reportInvalidTypeForm]
        source: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
        workers: int | None = None,
        force: bool = False,
    ) -> None:
        """
        Args:
            source: a folder or archive that you have already, instead of a download.
            workers: processes that generate; by default one for each core.
            force: make the set again, though it is there.
        """
        prepare_task(create_task(name, **task_options(task)), source, workers, force, _console())

    prepare.__doc__ = f"Prepare {name} ({options.summary}).\n{prepare.__doc__}"
    return prepare


def _data_show(name: str) -> Callable[..., None]:
    from longlens.tasks.base import SplitName, create_task, task_class, task_options
    from longlens.tasks.commands import show_task

    options = _options(task_class(name))

    def show(
        task: Annotated[options, tyro.conf.OmitArgPrefixes],  # pyright: ignore[reportInvalidTypeForm]
        split: SplitName = "train",
        first: int = 0,
        count: int | None = None,
        out: Path | None = None,
    ) -> None:
        """
        Args:
            split: which samples to show,
            first: from which on,
            count: and how many; by default 2 texts or 24 pictures.
            out: the picture to write; by default results/TASK.png.
        """
        show_task(create_task(name, **task_options(task)), split, first, count, out, _console())

    show.__doc__ = f"Show samples of {name} ({options.summary}).\n{show.__doc__}"
    return show


def _options(task_class: type) -> Any:
    """The fields of a task, without its checks: they run, and speak for themselves, when the task is created."""
    return type(task_class.__name__, (task_class,), {"__post_init__": lambda self: None, "__doc__": task_class.__doc__})


@dataclass(frozen=True)
class ForEachTask:
    """A group with one command for each task, whose flags are the options of the task."""

    command: Callable[[str], Callable[..., None]]

    def commands(self) -> dict[str, Any]:
        from longlens.tasks.base import list_tasks

        return {name: self.command(name) for name in list_tasks()}


COMMANDS: dict[str, Any] = {
    "demo": demo,
    "data": {
        "list": data_list,
        "prepare": ForEachTask(_data_prepare),
        "verify": data_verify,
        "show": ForEachTask(_data_show),
    },
    "bench": {"attention": bench_attention, "data": bench_data},
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
    while arguments and isinstance(group := commands.get(arguments[0]), dict | ForEachTask):
        commands = group.commands() if isinstance(group, ForEachTask) else group
        name += " " + arguments.pop(0)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        _fail(f"'{name}' knows no {arguments[0]!r}; {nearest(arguments[0], list(commands))}")
    try:
        tyro.extras.subcommand_cli_from_dict(
            {key: entry if callable(entry) else _group(f"{name} {key}", entry) for key, entry in commands.items()},
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


def _group(name: str, group: dict[str, Any] | ForEachTask) -> Callable[[], None]:
    """A line of the help: the commands of a group. ``main`` has gone into the group before it could be called."""

    def command() -> None: ...

    members = "one for each task" if isinstance(group, ForEachTask) else ", ".join(group)
    command.__doc__ = f"{members} ('{name} --help' shows more)."
    return command


def _console() -> Console:
    """Wide enough for its tables also where the output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


if __name__ == "__main__":
    main()
