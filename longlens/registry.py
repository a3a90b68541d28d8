"""Classes by name, imported when they are first asked for."""

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
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


def added_modules() -> list[str | Path]:
    """The modules or files that ``LONGLENS_IMPORT`` names, separated by commas: layers and tasks of the user's own."""
    names = filter(None, os.environ.get("LONGLENS_IMPORT", "").split(","))
    return [Path(name).absolute() if name.endswith(".py") else name for name in names]


@cache
def _import_added() -> None:
    for added in added_modules():
        try:
            if isinstance(added, str):
                import_module(added)
                continue
            spec = spec_from_file_location(f"longlens_added_{added.stem}", added)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[spec.name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[spec.name])
        except (ImportError, OSError) as error:
            raise ValueError(f"LONGLENS_IMPORT names {str(added)!r}, which cannot be imported: {error}") from error


def is_ours(file: str | None) -> bool:
    """Whether a source file belongs to this package."""
    return file is not None and Path(file).resolve().is_relative_to(Path(__file__).resolve().parent)


def foreign_source(chosen: type) -> str:
    """The source of a user's class, as a result belongs to it. Of this package's, nothing: the environment of a run
    has its version and commit."""
    file = getattr(sys.modules.get(chosen.__module__), "__file__", None)
    return "" if file is None or is_ours(file) else Path(file).read_text()
