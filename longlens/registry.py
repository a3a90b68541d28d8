"""Classes by name, imported when they are first asked for."""

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar

from longlens.naming import nearest

_Base = TypeVar("_Base")
_Class = TypeVar("_Class", bound=type)


class Registry(Generic[_Base]):
    """The tasks or the mixers: those of the package, of which only the module's name is known before they are used,
    and those that a user adds, in a module that was imported or that ``LONGLENS_IMPORT`` names.

    Args:
        kind: what an error calls one of them.
        modules: the module of each name.
    """

    def __init__(self, kind: str, modules: Mapping[str, str]):
        self.kind, self.modules = kind, modules
        self.classes: dict[str, type[_Base]] = {}

    def register(self, name: str) -> Callable[[_Class], _Class]:
        """A decorator that gives a class its name."""

        def add(added: _Class) -> _Class:
            taken = self.classes.get(name)
            home = self.modules.get(name) or (taken and taken.__module__)
            if home not in (None, added.__module__) or (taken and taken.__qualname__ != added.__qualname__):
                raise ValueError(f"there is a {self.kind} {name!r} already: choose another name")
            added.name = name
            classes: dict[str, type] = self.classes  # pyright: ignore[reportAssignmentType]
            classes[name] = added
            return added

        return add

    def names(self) -> list[str]:
        _import_added()
        return [*self.modules, *(name for name in self.classes if name not in self.modules)]

    def find(self, name: str) -> type[_Base]:
        if name not in self.classes and name in self.modules:
            import_module(self.modules[name])
        _import_added()
        if name not in self.classes:
            raise ValueError(f"there is no {self.kind} {name!r}; {nearest(name, self.names())}")
        return self.classes[name]


@cache
def _import_added() -> None:
    """The modules or files of ``LONGLENS_IMPORT``, separated by commas: layers and tasks of the user's own. Other
    processes inherit it."""
    for name in filter(None, os.environ.get("LONGLENS_IMPORT", "").split(",")):
        path = Path(name)
        if path.suffix == ".py":
            sys.path.insert(0, str(path.resolve().parent))
        try:
            import_module(path.stem if path.suffix == ".py" else name)
        except ImportError as error:
            raise ValueError(f"LONGLENS_IMPORT names {name!r}, which cannot be imported: {error}") from error
