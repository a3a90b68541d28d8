"""The ``longlens`` command: from arguments to one of ``longlens.commands``, from an error to a sentence and a code."""

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import wraps
from typing import Any, NoReturn

import tyro
from rich.console import Console

from longlens import __version__
from longlens.commands import COMMANDS, Command, ForEachTask, help_line
from longlens.console import say
from longlens.naming import nearest


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a bad argument is one clear line on stderr and exit code 2."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself on stderr otherwise
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"longlens {__version__}")
        return
    try:
        _find(arguments)()
    except Exception as error:
        _stop(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _find(arguments: list[str]) -> Callable[[], object]:
    """The command that the arguments name, with its values."""
    name, group = "longlens", COMMANDS
    arguments = list(arguments)
    while True:
        commands = group.commands() if isinstance(group, ForEachTask) else group
        if not arguments or arguments[0].startswith("-"):
            break
        chosen = arguments.pop(0)
        if chosen not in commands:
            raise ValueError(f"'{name}' knows no {chosen!r}; {nearest(chosen, list(commands))}")
        name += f" {chosen}"
        if isinstance(group, ForEachTask):
            return _parse(group.command(chosen, arguments), name, arguments)
        if callable(commands[chosen]):
            return _parse(commands[chosen], name, arguments)
        group = commands[chosen]
    if arguments[:1] not in (["--help"], ["-h"]) and (arguments or name != "longlens"):
        raise ValueError(f"'{name}' must be followed by one of {', '.join(commands)}")
    lines = {key: entry if callable(entry) else _group(f"{name} {key}", entry) for key, entry in commands.items()}
    tyro.extras.subcommand_cli_from_dict(
        lines, prog=name, description="Long-range sequence layers for PyTorch, around Local and Smooth attention.",
        args=["--help"],
    )  # fmt: skip
    raise AssertionError("tyro has shown the help and ended")


def _parse(command: Command, name: str, arguments: list[str]) -> Callable[[], object]:
    """A command with its values; what tyro complains about becomes one line."""

    @wraps(command)
    def later(**values: Any) -> Callable[[], object]:
        return lambda: command(**values)

    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            return tyro.cli(later, prog=name, args=arguments)
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise ValueError(f"{_sentence(complaint.getvalue())} ('{name} --help' shows all flags)") from None


def _sentence(complaint: str) -> str:
    """The first paragraph of tyro's box (which has other lines where there are only plain characters), and the flag
    that it thinks was meant."""
    lines = (line.strip("│╭╮╰╯ ") for line in complaint.splitlines()[1:])  # the first one is the title
    paragraphs = [""]
    for line in lines:
        if line and set(line) <= {"─", "-"}:
            paragraphs.append("")
        else:
            paragraphs[-1] += f" {line}"
    said, *more = (paragraph.strip() for paragraph in paragraphs if paragraph.strip())
    meant = re.search(r"Perhaps you meant:.*?(--[\w.-]+)", " ".join(more))
    return f"{said}; perhaps you meant {meant.group(1)}?" if meant else said


def _stop(error: Exception) -> NoReturn:
    """End with a sentence and a code: 2 for bad input, 3 for a run that cannot go on, 75 for one that was saved."""
    name = type(error).__name__
    if name == "Interrupted":  # by name, so that nothing of torch is imported for an error
        _say(f"{error}; the same command goes on")
        sys.exit(75)
    if name == "RunError":
        _say(str(error))
        sys.exit(3)
    if _is_foreign(error):
        raise error
    if isinstance(error, BrokenPipeError):  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if isinstance(error, ValueError | TypeError | OSError):
        _say(str(error))
        sys.exit(2)
    out_of_memory = ("out of memory", "can't allocate memory", "not enough memory")
    if isinstance(error, MemoryError) or any(words in str(error) for words in out_of_memory):
        _say("not enough memory for these sizes: try smaller ones")
        sys.exit(2)
    raise error


def _is_foreign(error: Exception) -> bool:
    """Whether it came through a layer or task of the user's own: its author wants to see where."""
    from longlens.registry import added_modules

    files = {str(added) for added in added_modules()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in files:
            return True
        trace = trace.tb_next
    return False


def _say(message: str) -> None:
    say(Console(stderr=True), f"longlens: {message}")


def _group(name: str, group: dict[str, Any] | ForEachTask) -> Command:
    members = "one for each task" if isinstance(group, ForEachTask) else ", ".join(group)
    return help_line(f"{members} ('{name} --help' shows more).")


if __name__ == "__main__":
    main()
