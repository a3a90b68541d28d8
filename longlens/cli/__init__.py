"""The ``longlens`` command: from arguments to a function, from an error to a sentence and an exit code."""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.text import Text

from longlens import __version__
from longlens.cli.flags import Parser, print_choices
from longlens.cli.output import BESIDE, ENDINGS, Failed, Output, table_options, take_output
from longlens.errors import BadInput, Interrupted, LongLensError
from longlens.files import write_atomic
from longlens.options import nearest, options_of
from longlens.registry import read_skeleton
from longlens.reports.sheet import Sheet, plain_text, write_sheets


class Command(NamedTuple):
    """A function and what it does. Of ``module:function``, the parameters are the flags, and the result is printed;
    ``module:*function`` gets the name of the command and all arguments instead: its flags depend on them."""

    target: str
    summary: str


COMMANDS = {
    "demo": Command("longlens.cli.demo:demo", "Compare LaS with its formula, and try a claim of the paper."),
    "train": Command("longlens.cli.train:*train", "Train a model on a task; the same command resumes a stopped run."),
    "compare": Command("longlens.cli.train:*compare", "Train several mixers on a task, and rank them."),
    "sweep": Command("longlens.cli.train:*sweep", "Train all combinations of some values, and choose the best."),
    "evaluate": Command("longlens.cli.train:evaluate", "Evaluate a checkpoint of a run on a split or a file."),
    "predict": Command("longlens.cli.predict:predict", "Predict the labels of new sequences with a trained model."),
    "generate": Command("longlens.cli.generate:*generate", "Generate text with a trained language model."),
    "explain": Command("longlens.cli.predict:explain", "Draw which part of a sequence decided its prediction."),
    "export": Command("longlens.cli.export:export", "Prepare a trained model for transformers, or for torch alone."),
    "reproduce": Command("longlens.cli.reproduce:reproduce", "Reproduce tables, figures and theorems of the paper."),
    "report": Command("longlens.cli.report:report", "Show runs on a page for the browser, or follow them there."),
    "check": Command("longlens.cli.check:check", "Check what a layer must keep: causality, padding, steps, gradients."),
    "list tasks": Command("longlens.cli.lists:list_tasks", "List the tasks, and which are prepared."),
    "list mixers": Command("longlens.cli.lists:list_mixers", "List the mixers (layers), or describe one of them."),
    "list runs": Command("longlens.cli.lists:list_runs", "List the runs of a folder by what differs between them."),
    "list recipes": Command("longlens.cli.lists:list_recipes", "List the recipes that come with the package."),
    "recipe show": Command("longlens.cli.lists:show_recipe", "Print a recipe, to start one of your own from."),
    "data list": Command("longlens.cli.lists:list_tasks", "List the tasks, and which are prepared."),
    "data prepare": Command("longlens.cli.data:*prepare", "Generate, download or import the data of a task."),
    "data verify": Command("longlens.cli.data:verify", "Compare every file of the prepared sets with its checksum."),
    "data show": Command("longlens.cli.data:*show", "Show samples of a task, as text or as a picture."),
    "bench attention": Command("longlens.bench.attention:bench_attention", "Time LaS beside plain attention."),
    "bench layers": Command("longlens.bench.layers:bench_layers", "Time every layer, forward and backward."),
    "bench decode": Command("longlens.bench.decode:bench_decode", "Time a token that follows a long text."),
    "bench model": Command("longlens.bench.model:bench_model", "Time a training step beside GPT-2, and the loop."),
    "bench data": Command("longlens.bench.data:bench_data", "Time the generators, imports and loading."),
    "bench packages": Command("longlens.bench.packages:bench_packages", "Time our layers beside other packages'."),
    "figures curves": Command("longlens.reports.learning:draw_learning", "Draw learning curves of runs."),
    "figures attention": Command(
        "longlens.reports.attention:draw_attention", "Draw attention maps of a trained model."
    ),
    "figures sweep": Command("longlens.reports.sweeps:draw_sweep", "Draw results of a sweep by what was varied."),
    "figures eld": Command("longlens.paper.figure_eld:draw_eld", "Draw how scores decay with distance (Section 4.1)."),
    "figures linear": Command("longlens.reports.linear:draw_linear", "Draw the error of linear-time attention."),
    "figures kernels": Command("longlens.paper.figure1:draw_kernels", "Draw kernels of layers (Figure 1)."),
}
GROUPS = {
    "list": "List tasks, mixers, runs or recipes.",
    "recipe": "Print a recipe.",
    "data": "Prepare, verify or show the data of a task.",
    "bench": "Measure time and memory.",
    "figures": "Draw curves, attention maps and sweeps of runs, and figures of the paper.",
}
TABLES = {  # commands that print tables, and the endings with which --out is a file for them
    **dict.fromkeys(("list tasks", "list mixers", "list runs", "list recipes", "data list"), tuple(ENDINGS)),
    **dict.fromkeys(("evaluate", "reproduce", "check"), tuple(ENDINGS)),
    **dict.fromkeys((name for name in COMMANDS if name.startswith("bench ")), BESIDE),
    "predict": (),  # its --out is for the predictions
}
WIDE = 100_000  # columns, of which a table takes what it needs
RESUMABLE = ("train", "compare", "sweep", "reproduce", "data prepare", "demo")


def main(arguments: list[str] | None = None) -> None:
    """Run a command; bad input is one clear line on stderr and exit code 2."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself on stderr otherwise
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    resumes = any(arguments[: len(words)] == words for words in map(str.split, RESUMABLE))
    try:
        before = signal.signal(signal.SIGTERM, _stop)
    except ValueError:  # not in the main thread
        before = None
    try:
        run(arguments)
    except LongLensError as error:
        _say(f"{error}; the same command resumes" if resumes and isinstance(error, Interrupted) else str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("stopped; the same command resumes" if resumes else "stopped")
        sys.exit(Interrupted.exit_code if resumes else 130)
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if (reason := _environment_problem(error)) is None:
            raise
        _say(reason)
        sys.exit(BadInput.exit_code)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def run(arguments: list[str]) -> None:
    """Find the command that the arguments name, and call it."""
    if arguments in (["--version"], ["-V"], ["version"]):
        print(f"longlens {__version__}")
        return
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    name = _find(arguments)
    command, rest = COMMANDS[name], arguments[len(name.split()) :]
    module, _, function = command.target.partition(":")
    if function.startswith("*"):
        show(getattr(import_module(module), function[1:])(f"longlens {name}", command.summary, rest))
        return
    # Help does not import what the command needs: its source declares the flags.
    declared = read_skeleton(module, lambda node: node.name == function, {})[function]
    parser = Parser(f"longlens {name}", (declared.__doc__ or "").partition("\n\n    Args:")[0])
    options, endings = options_of(declared), TABLES.get(name)
    parser.add_options("options", options if endings is None else table_options(options, endings))
    values = parser.read(rest)
    output = None if endings is None else take_output(values, endings)
    try:
        show(getattr(import_module(module), function)(**values), output)
    except Failed as failed:
        show(failed.printed, output)
        raise


def _find(arguments: list[str]) -> str:
    """The command that the first arguments name. Without one, help is printed."""
    word = next(iter(arguments), "--help")
    if word in COMMANDS:
        return word
    if word in GROUPS:
        members = {name.split()[1]: command for name, command in COMMANDS.items() if name.split()[0] == word}
        second = arguments[1] if len(arguments) > 1 else None
        if second in members:
            return f"{word} {second}"
        if second in ("-h", "--help"):
            summaries = {name: command.summary for name, command in members.items()}
            print_choices(f"longlens {word}", GROUPS[word], "COMMAND", summaries)
        if second is None:
            raise BadInput(f"'longlens {word}' must be followed by one of {', '.join(members)}")
        raise BadInput(f"unknown command 'longlens {word} {second}'; {nearest(second, members)}")
    summaries = {name: command.summary for name, command in COMMANDS.items() if " " not in name} | GROUPS
    if word in ("-h", "--help"):
        about = "Long-range sequence layers (mixers) for PyTorch, around Local and Smooth attention."
        print_choices("longlens", about, "COMMAND", summaries, "longlens --version prints the version.")
    if word.startswith("-"):
        raise BadInput(f"unknown flag {word}; 'longlens --help' shows the commands")
    raise BadInput(f"unknown command {word!r}; {nearest(word, summaries)}")


def show(printed: Any, output: Output | None = None) -> None:
    """Print what a command returned: a line, a table, or several of them. As wide as the terminal, and wide enough for
    all tables where the output is none. Lines are neither wrapped nor read as markup, for copies and programs. In
    another format than the terminal's, all but the tables goes to stderr."""
    output = output or Output()
    parts = [part for part in (printed if isinstance(printed, list | tuple) else [printed]) if part is not None]
    tables = [part for part in parts if isinstance(part, Sheet)]
    if output.out is not None and tables:
        write_atomic(output.out, write_sheets(tables, output.written))
        parts.append(f"written to {output.out}")
    if output.printed == "terminal":
        _print(parts, sys.stdout)
    else:
        words = [part for part in parts if not isinstance(part, Sheet)]
        _print([*(plain_text(note) for table in tables for note in table.notes), *words], sys.stderr)
        sys.stdout.write(write_sheets(tables, output.printed) if tables else "")
    if parts and not tables and output != Output():
        raise BadInput("there is no table in what this prints: leave out --format and --out")


def _print(parts: Sequence[Any], file: Any) -> None:
    console = Console(highlight=False, markup=False, emoji=False, file=file)
    for part in parts:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = WIDE if isinstance(part, Sheet) else 120
        console.print(part, soft_wrap=isinstance(part, str))


def sentence(text: str) -> Text:
    """Words of a command, which may be wrapped, as a line may not."""
    return Text(text)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted("stopped before anything was to be saved")


def _environment_problem(error: Exception) -> str | None:
    """What to say of an error that is no bug of ours or of a user's layer: memory, or a file that we touched."""
    memory = ("out of memory", "can't allocate memory", "not enough memory")
    if isinstance(error, MemoryError) or any(words in str(error) for words in memory):
        return "not enough memory for these sizes: try smaller ones"
    if isinstance(error, OSError):
        package = str(Path(__file__).parent.parent) + os.sep
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        library = str(Path(os.__file__).parent)
        own = [f for f in files if f.startswith(package) or not (f.startswith(library) or "site-packages" in f)]
        if own and own[-1].startswith(package):
            return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
    return None


def _say(message: str) -> None:
    print(f"longlens: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
