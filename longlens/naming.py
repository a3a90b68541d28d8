"""What to say about a name that is not known."""

import difflib


def nearest(given: str, allowed: list[str]) -> str:
    """The end of an error sentence about an unknown name."""
    close = difflib.get_close_matches(given, allowed, n=2)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"it can be {', '.join(allowed)}"
