"""The commands of ``longlens``: their flags, and what they call. Nothing here imports torch before a command runs, so
that help is instant."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from longlens.console import make_console, say

Device = Literal["cpu", "cuda"]
Command = Callable[..., None]


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
        console=make_console(),
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
    say(make_console(), f"written to {out}")


def figures_kernels(
    out: Path = Path("results/kernels.png"),
    mixers: tuple[str, ...] = ("s4", "mega", "sgconv"),
    length: int = 1024,
    width: int = 64,
    channels: int = 4,
    seed: int = 0,
) -> None:
    """Draw random kernels of long-range layers at initialization, as the paper's Figure 1 does.

    Args:
        out: the picture to write (.png, .pdf or .svg).
        mixers: the layers; any that is a convolution or contains one.
        length: of the kernels.
        width: of the layers.
        channels: kernels of each.
        seed: of the parameters.
    """
    from longlens.reports.kernels import draw_kernels

    draw_kernels(out, mixers=mixers, length=length, width=width, channels=channels, seed=seed)
    say(make_console(), f"written to {out}")


def demo(out: Path = Path("results"), runs: Path = Path("runs")) -> None:
    """LaS attention equals its formula, and LaS, LaS-chunk and a Transformer learn ListOps at the same budget.

    Args:
        out: folder for the figures and the picture.
        runs: folder for the runs; what is finished there is not run again.
    """
    from longlens.demo import run_demo

    run_demo(out, runs, make_console())


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
        tasks=tasks, source=source, batch_size=batch_size, rounds=rounds, out=out, console=make_console()
    )  # fmt: skip


def bench_model(
    depth: int = 4,
    width: int = 256,
    heads: int = 8,
    length: int = 512,
    batch: int = 4,
    vocabulary: int = 256,
    mixers: tuple[str, ...] = ("transformer", "las", "las-chunk"),
    tasks: tuple[str, ...] = ("listops", "atomic-cumsum"),
    steps: int = 40,
    rounds: int = 10,
    device: Device = "cpu",
    out: Path | None = None,
) -> None:
    """A training step of our models beside transformers' GPT-2, and the overhead of the training loop.

    Args:
        depth: blocks.
        width: channels of a token.
        heads: of the attention.
        length: tokens of a sequence.
        batch: sequences of a step.
        vocabulary: different tokens.
        mixers: the layers to compare.
        tasks: whose mini recipe is run to measure the loop.
        steps: of these runs.
        rounds: interleaved rounds; the best of each model counts.
        device: where to run.
        out: also write the figures and the environment to this JSON file.
    """
    import longlens.bench.model as bench

    size = bench.Size(depth, width, heads, length, batch, vocabulary)
    bench.bench_model(
        size, mixers=mixers, tasks=tasks, steps=steps, rounds=rounds, device=device, out=out, console=make_console()
    )  # fmt: skip


def bench_layers(
    mixers: tuple[str, ...] = (),
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384),
    width: int = 128,
    heads: int = 4,
    batch: int = 1,
    rounds: int = 5,
    device: Device = "cpu",
    out: Path | None = None,
) -> None:
    """Time and peak memory of every layer, forward and backward, relative to the Transformer's attention.

    Args:
        mixers: the layers; by default all.
        lengths: sequence lengths.
        width: channels of a token.
        heads: of the layers that have heads.
        batch: sequences.
        rounds: interleaved rounds; the best of each layer counts.
        device: where to run.
        out: also write the figures and the environment to this JSON file.
    """
    import longlens.bench.layers as bench
    from longlens.mixers.base import list_mixers

    bench.bench_layers(
        bench.Size(width, heads, batch), mixers=mixers or tuple(list_mixers()), lengths=lengths, rounds=rounds,
        device=device, out=out, console=make_console(),
    )  # fmt: skip


def bench_packages(
    packages: tuple[str, ...] = (),
    lengths: tuple[int, ...] = (1024, 4096),
    width: int = 128,
    heads: int = 4,
    batch: int = 2,
    rounds: int = 7,
    device: Device = "cpu",
    out: Path | None = None,
) -> None:
    """Our layers beside the same layers of other packages at equal sizes, forward and backward.

    Args:
        packages: which ones; by default all that are installed (the extra 'dev' has them).
        lengths: sequence lengths.
        width: channels of a token.
        heads: of the layers that have heads.
        batch: sequences.
        rounds: interleaved rounds; the best of each layer counts.
        device: where to run.
        out: also write the figures and the environment to this JSON file.
    """
    import longlens.bench.packages as bench
    from longlens.bench.layers import Size

    bench.bench_packages(
        Size(width, heads, batch), packages=packages, lengths=lengths, rounds=rounds, device=device, out=out,
        console=make_console(),
    )  # fmt: skip


def data_list() -> None:
    """All tasks: where their data comes from, and which are prepared."""
    from longlens.tasks.commands import print_tasks

    print_tasks(make_console())


def data_verify(names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Compare every file of the prepared sets with its checksum.

    Args:
        names: tasks, or sets by their names; by default all.
    """
    from longlens.tasks.commands import verify_sets

    if not verify_sets(names, make_console()):
        sys.exit(1)


def _data_prepare(name: str, arguments: list[str]) -> Command:
    from longlens.flags import without_checks_class
    from longlens.tasks.base import create_task, task_class, task_options
    from longlens.tasks.commands import prepare_task

    options = without_checks_class(task_class(name))

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
        prepare_task(create_task(name, **task_options(task)), source, workers, force, make_console())

    prepare.__doc__ = f"Prepare {name} ({options.summary}).\n{prepare.__doc__}"
    return prepare


def _data_show(name: str, arguments: list[str]) -> Command:
    from longlens.flags import without_checks_class
    from longlens.tasks.base import SplitName, create_task, task_class, task_options
    from longlens.tasks.commands import show_task

    options = without_checks_class(task_class(name))

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
        show_task(create_task(name, **task_options(task)), split, first, count, out, make_console())

    show.__doc__ = f"Show samples of {name} ({options.summary}).\n{show.__doc__}"
    return show


def list_tasks() -> None:
    """All tasks, and which are prepared: the same as 'longlens data list'."""
    data_list()


def list_mixers(traits: bool = False, length: int = 1024, width: int = 64) -> None:
    """All mixers: what they are, which sides they can see, and their options; or their traits.

    Args:
        traits: what they are made of instead, as in the paper's Table 10, and what can be measured of it.
        length: of the sequences with which traits are measured.
        width: of the layers of which traits are measured.
    """
    if traits:
        from longlens.reports.traits import traits_tables

        console = make_console()
        console.print(*traits_tables(length, width), sep="\n", width=max(console.width, 116), crop=False)
    else:
        from longlens.reports.tables import mixers_table

        make_console().print(mixers_table())


def list_runs(runs: Path = Path("runs")) -> None:
    """All runs of a folder: finished ones with their result, and those that wait to go on.

    Args:
        runs: the folder.
    """
    from longlens.reports.tables import runs_table

    make_console().print(runs_table(runs))


def _train(task: str, arguments: list[str]) -> Command:
    from longlens.flags import Flags

    flags = Flags(task, arguments)

    def train(
        values: Annotated[flags.type(), tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
        mixer: Annotated[str, tyro.conf.arg(name="mixer")] = flags.mixers[0],
        recipe: str = flags.recipe_name,
    ) -> None:
        """
        Args:
            mixer: the layer ('longlens list mixers' has all); its options are the flags --mixer.…
            recipe: smoke, mini or paper, or a TOML file of your own: the defaults of all other flags.
        """
        from longlens.training.commands import train_one

        train_one(flags.config(mixer, flags.changes(values)), flags.runtime_of(values), make_console())

    train.__doc__ = f"Train a model on {task}; the same command goes on with a run that was stopped.\n{train.__doc__}"
    return train


def _compare(task: str, arguments: list[str]) -> Command:
    from longlens.flags import Flags, Many

    flags = Flags(task, arguments, several=True)

    def compare(
        values: Annotated[flags.type(), tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
        many: Annotated[Many, tyro.conf.arg(name="")] = Many(),  # noqa: B008 (it does not change)
        mixers: tuple[str, ...] = tuple(flags.mixers),
        recipe: str = flags.recipe_name,
    ) -> None:
        """
        Args:
            mixers: the layers ('longlens list mixers' has all).
            recipe: smoke, mini or paper, or a TOML file of your own: the defaults of all other flags.
        """
        from longlens.training.commands import compare_mixers

        changes = flags.changes(values)
        configs = [
            flags.config(mixer, changes | {"training.seed": seed}, shared=True)
            for mixer in flags.mixers
            for seed in many.seeds or (values.training.seed,)
        ]
        compare_mixers(configs, flags.runtime_of(values), many, make_console())

    compare.__doc__ = f"Train several mixers on {task} at the same budget, and show who is ahead.\n{compare.__doc__}"
    return compare


def _sweep(task: str, arguments: list[str]) -> Command:
    from longlens.flags import Flags, Many

    flags = Flags(task, arguments)

    def sweep(
        values: Annotated[flags.type(), tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
        many: Annotated[Many, tyro.conf.arg(name="")] = Many(),  # noqa: B008 (it does not change)
        grid: tuple[str, ...] = (),
        mixer: Annotated[str, tyro.conf.arg(name="mixer")] = flags.mixers[0],
        recipe: str = flags.recipe_name,
    ) -> None:
        """
        Args:
            grid: fields and their values, all combinations of which are run: lr=1e-3,3e-4 mixer.window=3,5
                mixer=las,transformer.
            mixer: the layer; its options are the flags --mixer.…
            recipe: smoke, mini or paper, or a TOML file of your own: the defaults of all other flags.
        """
        from longlens.training.commands import sweep_grid

        seeds = many.seeds or (values.training.seed,)
        sweep_grid(flags, flags.changes(values), grid, seeds, flags.runtime_of(values), many, make_console())

    sweep.__doc__ = f"Run a grid over any fields and seeds on {task}.\n{sweep.__doc__}"
    return sweep


def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    split: Literal["train", "valid", "test"] = "test",
    checkpoint: str = "best",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Evaluate a checkpoint of a run on a whole split.

    Args:
        run: the folder of the run.
        split: the samples.
        checkpoint: best, last, or a step.
        device: where to run; auto is a GPU if there is one.
    """
    from longlens.training.commands import evaluate_run

    evaluate_run(run, split, checkpoint, device, make_console())


def help_line(text: str) -> Command:
    """A line of the help. ``longlens.cli`` has gone on before it could be called."""

    def command() -> None: ...

    command.__doc__ = text
    return command


@dataclass(frozen=True)
class ForEachTask:
    """A group with one command for each task, whose flags are made of the options of the task (and of what the
    arguments choose)."""

    command: Callable[[str, list[str]], Command]

    def commands(self) -> dict[str, Any]:
        """The tasks, for help: what a command takes is found out when it is chosen."""
        from longlens.tasks.base import list_tasks, task_class

        return {name: help_line(task_class(name).summary) for name in list_tasks()}


COMMANDS: dict[str, Any] = {
    "demo": demo,
    "list": {"tasks": list_tasks, "mixers": list_mixers, "runs": list_runs},
    "data": {
        "list": data_list,
        "prepare": ForEachTask(_data_prepare),
        "verify": data_verify,
        "show": ForEachTask(_data_show),
    },
    "train": ForEachTask(_train),
    "evaluate": evaluate,
    "compare": ForEachTask(_compare),
    "sweep": ForEachTask(_sweep),
    "bench": {
        "attention": bench_attention,
        "data": bench_data,
        "layers": bench_layers,
        "model": bench_model,
        "packages": bench_packages,
    },
    "figures": {"eld": figures_eld, "kernels": figures_kernels},
}
