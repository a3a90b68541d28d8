"""How commands print."""

import os

from rich.console import Console
from rich.text import Text


def make_console() -> Console:
    """As wide as the terminal, and wide enough for all tables where the output is none."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=120)


def sentence(text: str) -> Text:
    """Words, which may be wrapped; lines that are no such object are printed as they are, for copies and programs."""
    return Text(text)


def say(console: Console, text: str) -> None:
    """A line as it is: paths and texts are neither wrapped nor read as markup."""
    console.print(text, markup=False, soft_wrap=True, highlight=False)
