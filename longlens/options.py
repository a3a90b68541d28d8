"""Options by name: checked against the fields of a dataclass, so that a typo never becomes a default."""

import math
import os
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from longlens.naming import nearest

_Made = TypeVar("_Made")


def from_options(chosen: type[_Made], what: str, options: dict[str, Any]) -> _Made:
    """An instance of a dataclass. ``what`` says in an error whose options these are: ``task 'listops'``."""
    known = option_names(chosen)
    for option in options:
        if option not in known:
            raise ValueError(f"{what} has no option {option!r}; {nearest(option, known)}")
    for option in required_options(chosen):
        if option not in options:
            raise ValueError(f"{what} needs the option {option!r}")
    return chosen(**typed_options(chosen, options))


def option_names(chosen: type) -> list[str]:
    return [field.name for field in fields(chosen)]


def required_options(chosen: type) -> list[str]:
    """The options without a default."""
    return [f.name for f in fields(chosen) if f.default is MISSING and f.default_factory is MISSING]


def typed_options(chosen: type, options: dict[str, Any]) -> dict[str, Any]:
    """Options as their fields want them: a list from a JSON file becomes a tuple, and 2000.0 the number 2000."""
    from pydantic import TypeAdapter, ValidationError

    hints, typed = get_type_hints(chosen), {}
    for option, value in options.items():
        try:
            given = os.fspath(value) if isinstance(value, os.PathLike) else value
            # True is no number, though pydantic takes it for 1.
            typed[option] = TypeAdapter(hints[option]).validate_python(given, strict=isinstance(given, bool))
            if isinstance(typed[option], float) and not math.isfinite(typed[option]):
                raise ValueError(f"{option} is {value!r}; it must be a finite number")
        except ValidationError as error:
            kind = hints[option]
            if get_origin(kind) is Literal:
                raise ValueError(f"{option} is {value!r}; it can be {', '.join(get_args(kind))}") from None
            reason = error.errors()[0]["msg"].lower()
            raise ValueError(f"{option} is {value!r}, which is not possible: {reason}") from None
    return typed
