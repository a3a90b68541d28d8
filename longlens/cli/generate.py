"""``longlens generate``: a trained language model goes on with a text."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unicodedata import category

from longlens.cli.flags import Parser
from longlens.files import check_out, open_atomic
from longlens.models.config import Writing
from longlens.options import REQUIRED, Device, Option, options_of

RUN = Option("run", Path, REQUIRED, "Folder of the run of a language model, which may have been moved.", True)
PROMPT = Option("prompt", str, "", "Text to go on from, in the symbols of the task.")
OUT = Option("out", Path | None, None, "File to write the whole text to, instead of showing it.")
CHECKPOINT = Option("checkpoint", str, "best", "Checkpoint to use: best, last, or a step.")
DEVICE = Option("device", Device, "auto", "Device to run on; auto is a GPU if there is one.")


def generate(name: str, about: str, arguments: list[str]) -> str | None:
    """Show the prompt and what follows it as it is written, or write both to a file."""
    parser = Parser(name, about)
    own = {option.name: option for option in (RUN, PROMPT, OUT, CHECKPOINT, DEVICE)}
    parser.add_options("options", own)
    parser.add_options("the text", options_of(Writing))
    values = parser.read(arguments)
    values = {name: option.default for name, option in own.items()} | values
    writing = Writing(**{name: value for name, value in values.items() if name not in own})
    out = check_out(values["out"])

    from longlens.training.generate import Continuation
    from longlens.training.saved import load_run

    run = load_run(values["run"])
    with run.opened(values["checkpoint"], values["device"]) as model:
        text = Continuation(model, run.codec, values["prompt"], writing)
        for note in text.notes:
            print(f"longlens: {note}", file=sys.stderr, flush=True)
        with _place(out) as write:
            write(text.prompt)
            for piece in text:
                write(piece)
            write("\n")
    return None if out is None else f"written to {out}"


@contextmanager
def _place(out: Path | None) -> Iterator[Callable[[str], object]]:
    """A function that writes a piece of text: to a file that is there when it is whole, or to the screen at once."""
    if out is not None:
        with open_atomic(out) as file:
            yield lambda piece: file.write(piece.encode())
        return

    def show(piece: str) -> None:
        if sys.stdout.isatty():  # which would take a byte of a young model for a command
            piece = "".join("\N{REPLACEMENT CHARACTER}" if _is_control(sign) else sign for sign in piece)
        kind = sys.stdout.encoding or "utf-8"  # not all can show all that there is
        sys.stdout.write(piece.encode(kind, "replace").decode(kind))
        sys.stdout.flush()

    yield show


def _is_control(sign: str) -> bool:
    return category(sign) == "Cc" and sign not in "\n\t"
