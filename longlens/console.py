"""How commands speak."""

import os

from rich.console import Console


def make_console() -> Console:
    """Wide enough for its tables also where the output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=120)


def say(console: Console, text: str) -> None:
    """A line as it is: paths and texts are neither wrapped nor read as markup."""
    console.print(text, markup=False, soft_wrap=True, highlight=False)
