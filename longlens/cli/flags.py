"""Flags made of options: ``--batch-size 32``, checked by the type of the option."""

import argparse
import difflib
import itertools
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from rich_argparse import RichHelpFormatter

from longlens.errors import BadInput
from longlens.options import REQUIRED, Option, nearest

HELP = ("-h", "--help")
WORDS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}
SENTENCES = {  # argparse's, and ours
    r"^argument ([^:]*): expected (one|at least one|\d+) arguments?$": r"\1 must be followed by \2 value(s)",
    r"^argument ([^:]*): ignored explicit argument (.*)$": r"\1 must be without a value, got \2",
    r"^the following arguments are required: (.*)$": r"\1 must be given",
    r"one value\(s\)$": "one value",
    r"value\(s\)$": "values",
}


class Parser(argparse.ArgumentParser):
    """The flags of a command, in groups. Only what was given is in its values, under the names of the options."""

    def __init__(self, command: str, about: str = "", usage: str | None = None):
        super().__init__(
            prog=command,
            description=_escape(about),
            usage=_escape(usage or f"{command} [flags]"),
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=Formatter,
        )
        self.options: dict[str, Option] = {}
        self.hidden: dict[str, argparse.Action] = {}  # other names of flags, which help does not show
        self.refusals: dict[str, str] = {}  # the begin of an error about an unknown flag, by the prefix of the flag
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1e-3 is a number, too

    def add_options(
        self,
        title: str,
        options: Mapping[str, Option],
        *,
        prefix: str = "",
        other_prefix: str | None = None,
        old_names: Mapping[str, str] = MappingProxyType({}),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """A group of flags. ``defaults`` are shown instead of those of the options. With ``other_prefix`` and by their
        old names, options can be given as well, where no other flag is called so."""
        group = self.add_argument_group(title)
        prefixes = {prefix, prefix if other_prefix is None else other_prefix}
        for option in options.values():
            default = (defaults or {}).get(option.name, option.default)
            name = f"{prefix}{option.name}".replace("_", "-")
            self.options[prefix + option.name] = option
            text = _escape(_help(option, default))
            if option.positional:
                word, count = option.name.upper(), _nargs(option.hint) or "?"
                shown = word if option.default is REQUIRED else f"[{word}]" if count == "?" else f"[{word}…]"
                self.usage = (self.usage or "").replace("[flags]", f"{shown} [flags]")
                group.add_argument(word.lower(), help=text, metavar=word, nargs=None if shown == word else count)
                continue
            if option.hint is bool:
                kind: dict[str, Any] = {"action": Switch}
            else:
                kind = {"metavar": _metavar(option.hint), "nargs": _nargs(option.hint)}
            action = group.add_argument(f"--{name}", dest=prefix + option.name, help=text, **kind)
            names = [option.name, *(old for old, new in old_names.items() if new == option.name)]
            switches = ("--", "--no-") if option.hint is bool else ("--",)
            for parts in itertools.product(switches, prefixes, names):
                self.hidden["".join(parts).replace("_", "-")] = action

    def peek(self, arguments: Sequence[str], name: str, default: Any) -> Any:
        """The value of a flag that decides which other flags there are. What is wrong is said when all are read."""
        try:
            values, _ = self.parse_known_args(_with_dashes(argument for argument in arguments if argument not in HELP))
            return self.options[name].check(getattr(values, name))
        except (BadInput, AttributeError):
            return default

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The given values with their types; help is printed instead if it was asked for."""
        if set(arguments) & set(HELP):
            self.print_help()
            raise SystemExit(0)
        for flag, action in self.hidden.items():
            self._option_string_actions.setdefault(flag, action)
        values, unknown = self.parse_known_args(_with_dashes(arguments))
        if unknown:
            self._refuse(unknown[0])
        found = {}
        for name, value in vars(values).items():
            option = self.options[name]
            shown = option.name if option.positional else f"--{name.replace('_', '-')}"
            found[name] = replace(option, name=shown).check(value)
        return found

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            raise BadInput(f"unexpected argument {argument!r} ('{self.prog} --help' shows what it takes)")
        flag = argument.partition("=")[0]
        for prefix, refusal in self.refusals.items():
            if flag.startswith(prefix):
                known = [name.removeprefix(prefix) for name in self._option_string_actions if name.startswith(prefix)]
                option = flag.removeprefix(prefix)
                raise BadInput(f"{refusal} {option!r}; {nearest(option, known)}")
        known = {name.lstrip("-"): name for name in self._option_string_actions}
        close = [known[name] for name in difflib.get_close_matches(flag.lstrip("-"), known, n=2)]
        hint = f" did you mean {' or '.join(close)}?" if close else ""
        raise BadInput(f"unknown flag {flag};{hint} '{self.prog} --help' shows all")

    def error(self, message: str) -> NoReturn:
        for pattern, sentence in SENTENCES.items():
            message = re.sub(pattern, sentence, message)
        raise BadInput(f"{message} ('{self.prog} --help' shows all flags)")


class Switch(argparse.BooleanOptionalAction):
    """``--flag`` or ``--no-flag``, by any of its names."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))


class Formatter(RichHelpFormatter):
    """Argparse's help in the colors of the other tables, with room for the descriptions."""

    group_name_formatter = str

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, max_help_position=28, **options)


def _with_dashes(arguments: Iterable[str]) -> list[str]:
    """``--batch_size`` is a flag as one may type it."""
    return [re.sub(r"^--[^=]*", lambda flag: flag[0].replace("_", "-"), argument) for argument in arguments]


def _help(option: Option, default: Any) -> str:
    if default is REQUIRED or default in (None, (), "", {}):
        return option.help
    if isinstance(default, dict) and all(isinstance(table, dict) for table in default.values()):
        default = [f"{name}.{key}={value}" for name, table in default.items() for key, value in table.items()]
    if isinstance(default, tuple | list):
        default = " ".join(map(str, default))
    elif isinstance(default, bool):
        default = "yes" if default else "no"
    return f"{option.help} (default: {default})"


def _nargs(hint: Any) -> str | int | None:
    """Values of a flag: as many as there are, a number of them, or one."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return "*" if "*" in map(_nargs, parts) else None
    if origin in (dict, Annotated):
        return "*" if origin is dict else _nargs(parts[0])
    return None if origin is not tuple else "*" if parts[-1] is Ellipsis else len(parts)


def _metavar(hint: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _metavar(parts[0])
    if origin is Literal:
        return f"{{{','.join(map(str, parts))}}}"
    if origin in (Union, types.UnionType):
        choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
        words = [_metavar(Literal[*choices])] if choices else []  # of several mixers in one list
        words += [_metavar(part) for part in parts if part is not type(None) and get_origin(part) is not Literal]
        return "|".join(dict.fromkeys([*words, "none"] if type(None) in parts and not _nargs(hint) else words))
    if origin is dict:
        return "NAME.KEY=VALUE"
    if origin is tuple:
        return _metavar(parts[0]) if _nargs(hint) == "*" else tuple(map(_metavar, parts))
    return WORDS.get(hint, "VALUE")


def print_choices(name: str, about: str, word: str, members: Mapping[str, str], end: str = "") -> NoReturn:
    """Help of a command that one of several words follows, each with a summary."""
    parser = Parser(name, about, usage=f"{name} {word} …")
    group = parser.add_argument_group(f"{word.lower()}s")
    for member, summary in members.items():
        group.add_argument(member, help=_escape(summary), metavar=member)
    parser.epilog = " ".join(filter(None, [f"'{name} {word} --help' shows the flags of a {word.lower()}.", end]))
    parser.print_help()
    raise SystemExit(0)


def _escape(text: str) -> str:
    return text.replace("%", "%%")
