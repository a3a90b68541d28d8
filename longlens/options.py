"""Options: declared once, in a signature and its docstring, and checked by their types wherever they come from.

A class or function declares its options as keyword parameters; ``Args:`` in its docstring describes them. The command
line, recipes, ``config.json`` and Python calls all go through ``options_of`` and ``check_options``.
"""

import difflib
import inspect
import numbers
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MultipleOf, Predicate

from longlens.errors import BadInput

REQUIRED: Any = inspect.Parameter.empty  # the default of an option that has none
LARGEST = 2**31 - 1  # of a size: what is beyond it is a slip of the finger

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Is:
    """In an ``Annotated`` type: how an error says what is allowed."""

    text: str


Count = Annotated[int, Ge(0), Le(LARGEST), Is("a whole number of at least 0")]
Size = Annotated[int, Ge(1), Le(LARGEST), Is("a whole number of at least 1")]
Several = Annotated[int, Ge(2), Le(LARGEST), Is("a whole number of at least 2")]
Even = Annotated[int, Ge(2), Le(LARGEST), MultipleOf(2), Is("an even number of at least 2")]
Odd = Annotated[int, Ge(1), Le(LARGEST), Predicate(lambda n: n % 2 == 1), Is("an odd number of at least 1")]
OneOrEven = Annotated[
    int, Ge(1), Le(LARGEST), Predicate(lambda n: n == 1 or n % 2 == 0), Is("1 or an even number of at least 2")
]
Port = Annotated[int, Ge(0), Le(65535), Is("a whole number from 0 to 65535")]
Seed = Annotated[int, Ge(0), Le(2**63 - 1), Is("a whole number from 0 to 2^63 - 1")]
Positive = Annotated[float, Gt(0), Le(1e12), Is("a number above 0")]
NonNegative = Annotated[float, Ge(0), Le(1e12), Is("a number of at least 0")]
Probability = Annotated[float, Ge(0), Lt(1), Is("a number of at least 0 and below 1")]
Fraction = Annotated[float, Gt(0), Lt(1), Is("a number between 0 and 1")]
Ratio = Annotated[float, Gt(0), Le(1), Is("a number above 0 and at most 1")]
Device = Literal["auto", "cpu", "cuda"]  # auto is a GPU if there is one


@dataclass(frozen=True)
class Option:
    """One option: its name, type, default and description."""

    name: str
    hint: Any
    default: Any = REQUIRED
    help: str = ""
    positional: bool = False

    def check(self, value: Any) -> Any:
        """The value with its type: a list becomes a tuple, and 2000.0 the number 2000. A text is read as typed."""
        from pydantic import ValidationError

        if isinstance(value, str) and value.lower() == "none" and type(None) in get_args(self.hint):
            return None
        given = _plain(value)
        if isinstance(given, list) and _is_table(self.hint):
            given = _read_table(given)
        try:
            # True is no number, though pydantic takes it for 1.
            found = _adapter(self.hint).validate_python(given, strict=isinstance(given, bool) or None)
            if not isinstance(found, Path) or (given and "\0" not in str(given)):  # an empty path would be this folder
                return found
        except (ValidationError, OverflowError, RecursionError):
            pass
        wanted = allowed(self.hint)
        note = ", which is too large" if "number" in wanted and _is_large(given) else ""
        raise BadInput(f"{self.name} must be {wanted}, got {shorten(value)}{note}")


def options_of(declared: Callable[..., Any]) -> dict[str, Option]:
    """The options of a class or a function by their names: its parameters."""
    described = _descriptions(declared)
    hints = get_type_hints(
        declared if hasattr(declared, "__dataclass_fields__") or not isinstance(declared, type) else declared.__init__,
        include_extras=True,
    )
    return {
        name: Option(
            name,
            hints.get(name, _type_of(given.default)),
            given.default,
            described.get(name, ""),
            given.kind != given.KEYWORD_ONLY,
        )
        for name, given in inspect.signature(declared).parameters.items()
        if given.kind in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY)
    }


def _type_of(default: Any) -> Any:
    """The type of an option without an annotation, if its default says it: a text of the command line is read by it."""
    kinds = set(map(type, default)) if isinstance(default, tuple) else {type(default)}
    if len(kinds) != 1 or not kinds <= {bool, int, float, str}:
        return Any
    (kind,) = kinds
    return tuple[kind, ...] if isinstance(default, tuple) else kind


def check_names(options: Mapping[str, Option], values: Iterable[str], what: str) -> None:
    """Refuse unknown names. ``what`` says in an error whose options these are: ``task 'listops'``."""
    for name in values:
        if name not in options:
            raise BadInput(f"{what} has no option {name!r}; {nearest(name, options)}")


def check_options(options: Mapping[str, Option], values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The values with their types. Options without a default must be there."""
    check_names(options, values, what)
    for option in options.values():
        if option.default is REQUIRED and option.name not in values:
            raise BadInput(f"{what} needs the option {option.name!r}")
    return {name: options[name].check(value) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of dataclasses whose fields are options: each is checked, and then does not change."""

    def __post_init__(self) -> None:
        for option in _cached_options(type(self)).values():
            object.__setattr__(self, option.name, option.check(getattr(self, option.name)))

    @classmethod
    def make(cls: type[_Made], values: Mapping[str, Any], what: str) -> _Made:
        """An instance; an unknown name is refused, with the nearest known one."""
        return cls(**check_options(_cached_options(cls), values, what))

    def values(self) -> dict[str, Any]:
        """The options that make this again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def nearest(given: str, known: Iterable[str]) -> str:
    """The end of an error sentence about an unknown name."""
    known = list(known)
    close = difflib.get_close_matches(given, known, n=2)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"choose from {', '.join(known)}" if known else "there is none"


def allowed(hint: Any) -> str:
    """What a type admits, in words: the middle of ``lr must be a number above 0, got -1``."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((note.text for note in parts[1:] if isinstance(note, Is)), None) or allowed(parts[0])
    if origin is Literal:
        return " or ".join(map(str, parts)) if len(parts) < 3 else f"one of {', '.join(map(str, parts))}"
    if origin in (Union, types.UnionType):
        parts = sorted(parts, key=lambda part: get_origin(part) is tuple)  # a list last: "none" is not for its entries
        return " or ".join("none" if part is type(None) else allowed(part) for part in parts)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"a list, each {allowed(parts[0])}"
        return f"{len(parts)} values, each {' or '.join(dict.fromkeys(map(allowed, parts)))}"
    if origin is dict:
        return "a table of tables" if get_origin(parts[1]) is dict else "a table"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def without_none(hint: Any) -> Any:
    """A type that admits none, without it."""
    (kept,) = (part for part in get_args(hint) if part is not type(None))
    return kept


def shorten(value: Any) -> str:
    """A value in an error, on one line that is not too long."""
    if isinstance(value, list | tuple) and value and all(isinstance(entry, str) for entry in value):
        value = " ".join(value)  # as it was typed
    try:
        text = value if isinstance(value, str) and value.strip() else repr(value)
    except (ValueError, RecursionError):  # Python refuses to print numbers of many digits
        text = f"a value that is too long to be shown ({type(value).__name__})"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}…"


def _plain(value: Any, *, in_list: bool = False) -> Any:
    """A value, or a list of them, without the classes of other packages: paths are texts, and numbers of numpy numbers.
    In a list, True is a text: it is no number, though pydantic takes it for 1."""
    if isinstance(value, list | tuple) and not in_list:
        return [_plain(entry, in_list=True) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, int | float | str):
        return str(value) if in_list and isinstance(value, bool) else value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _is_table(hint: Any) -> bool:
    joined = get_origin(hint) in (Annotated, Union, types.UnionType)
    return get_origin(hint) is dict or (joined and any(map(_is_table, get_args(hint))))


def _read_table(entries: list[Any]) -> Any:
    """``ssm.lr=1e-3 ssm.weight_decay=0`` as a table of tables; what is none stays as it is."""
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        names, equals, value = str(entry).partition("=")
        table, dot, name = names.rpartition(".")
        if not (equals and dot) or name in found.setdefault(table, {}):
            return entries
        found[table][name.replace("-", "_")] = value
    return found


def _is_large(given: Any) -> bool:
    for value in given if isinstance(given, list) else [given]:
        try:
            if float(value) > LARGEST:
                return True
        except OverflowError:
            return True
        except (TypeError, ValueError):
            continue
    return False


@cache
def _cached_options(declared: type) -> dict[str, Option]:
    return options_of(declared)


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def _descriptions(declared: Any) -> dict[str, str]:
    """The entries of ``Args:``; a class has those of its bases as well."""
    found: dict[str, str] = {}
    for source in reversed(declared.__mro__) if isinstance(declared, type) else [declared]:
        _, _, entries = inspect.cleandoc(source.__doc__ or "").partition("Args:\n")
        for match in re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", entries, re.MULTILINE):
            found[match[1]] = " ".join(match[2].split())
    return found
