"""Tasks and mixers by name: those of the package, of installed packages (entry points ``longlens``), and of the modules
or files that ``LONGLENS_IMPORT`` names."""

import ast
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module, metadata
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import longlens.options
from longlens.errors import BadInput, LongLensError
from longlens.options import nearest

_Entry = TypeVar("_Entry")

DECORATOR = re.compile(r'^@register\(\s*"([\w-]+)"', re.MULTILINE)


class Registry(Generic[_Entry]):
    """Entries by name. Those of the package are found in its source, where ``@register("name"`` stands above a class,
    so that a name can be known without an import. ``kind`` is what an error calls an entry; ``load`` adds those of a
    module of the package."""

    def __init__(self, kind: str, package: str, load: Callable[[str], object] = import_module):
        self.kind = kind
        self.package = package
        self.load = load
        self.entries: dict[str, _Entry] = {}
        self.homes: dict[str, str] = {}

    @cached_property
    def modules(self) -> dict[str, str]:
        """The module of each name of the package."""
        return {
            name: f"{self.package}.{file.stem}"
            for file in sorted((Path(__file__).parent / self.package.split(".")[-1]).glob("*.py"))
            for name in DECORATOR.findall(file.read_text())
        }

    def add(self, name: str, entry: _Entry, module: str) -> None:
        """Give an entry its name. The module that had it before, reloaded, may have it again."""
        if (self.modules | self.homes).get(name, module) != module:
            raise BadInput(f"there is a {self.kind} {name!r} already: choose another name")
        self.entries[name] = entry
        self.homes[name] = module

    def names(self) -> list[str]:
        import_added()
        return [*self.modules, *(name for name in self.entries if name not in self.modules)]

    def find(self, name: str) -> _Entry:
        if name not in self.entries and name in self.modules:
            self.load(self.modules[name])
        if name not in self.entries:
            import_added()
        if name not in self.entries:
            raise BadInput(f"unknown {self.kind} {name!r}; {nearest(name, self.names())}")
        return self.entries[name]


_begun: list[bool] = []


def added_modules() -> list[str | Path]:
    """The modules or files that ``LONGLENS_IMPORT`` names, separated by commas."""
    names = filter(None, os.environ.get("LONGLENS_IMPORT", "").split(","))
    return [Path(name).absolute() if name.endswith(".py") else name for name in names]


def import_added() -> None:
    """Import layers and tasks from outside of the package, once. A bug in one of them keeps its traceback."""
    if _begun:  # perhaps by a file that is being imported, and asks for a name
        return
    _begun.append(True)
    try:
        for entry in metadata.entry_points(group="longlens"):
            _import(entry.module, f"the entry point {entry.name!r}")
        for added in added_modules():
            _import(added, "LONGLENS_IMPORT")
    except BaseException:
        _begun.clear()
        raise


def _import(added: str | Path, where: str) -> None:
    try:
        is_there = added.is_file() if isinstance(added, Path) else find_spec(added) is not None
    except ModuleNotFoundError as error:
        if not str(added).startswith(error.name or " "):  # it is something that the package needs
            raise
        is_there = False
    if not is_there:
        raise BadInput(f"{where} names {added}, and there is no such {'module' if isinstance(added, str) else 'file'}")
    try:
        if isinstance(added, str):
            import_module(added)
        else:
            name = f"longlens_added_{added.stem}"
            while name in sys.modules and sys.modules[name].__file__ != str(added):  # of the same name, elsewhere
                name += "_"
            import_file(added, name)
    except LongLensError as error:
        raise type(error)(f"{added}: {error}") from None
    except Exception:
        print(f"longlens: {where} names {added}, which raises an error when it is imported:", file=sys.stderr)
        raise


def import_file(file: Path, name: str) -> ModuleType:
    """The module of a file, under a name by which no import would find it."""
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def foreign_source(chosen: type) -> str:
    """The source of a user's class, which a result belongs to. Nothing for this package's: the environment of a run has
    its version and commit."""
    file = getattr(sys.modules.get(chosen.__module__), "__file__", None)
    if file is not None:
        is_ours = Path(file).resolve().is_relative_to(Path(__file__).resolve().parent)
        return "" if is_ours else Path(file).read_text()
    functions = [inspect.unwrap(entry) for entry in vars(chosen).values() if inspect.isfunction(entry)]
    try:  # of a notebook or a prompt
        return "\n".join(map(inspect.getsource, functions))
    except OSError:
        return "\n".join(f"{code.co_code.hex()} {code.co_consts}" for code in (entry.__code__ for entry in functions))


def read_skeleton(
    module: str, wanted: Callable[[ast.ClassDef | ast.FunctionDef], bool], names: Mapping[str, Any]
) -> dict[str, Any]:
    """The wanted classes and functions of a module, with empty bodies, by their names. A class has its decorators,
    docstring, ``__init__`` and ``causal``, and an attribute ``__skeleton__``. Signatures refer to typing, math, Path
    and ``longlens.options``; ``names`` are what decorators and defaults refer to besides."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found: list[ast.stmt] = []
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef) and wanted(node):
            body = [*_docstring(node), *ast.parse("__skeleton__ = True").body]
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    body.append(_empty(part))
                elif isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "causal":
                    body.append(part)
            node.bases, node.body = [], body
            found.append(node)
        elif isinstance(node, ast.FunctionDef) and wanted(node):
            node.decorator_list = []
            found.append(_empty(node))
    known = vars(typing) | vars(longlens.options) | {"math": math, "Path": Path, **names, "__name__": module}
    tree = ast.fix_missing_locations(ast.Module(found, []))
    exec(compile(tree, f"<signatures of {module}>", "exec"), known)
    return {node.name: known[node.name] for node in found if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _empty(function: ast.FunctionDef) -> ast.FunctionDef:
    for argument in (*function.args.args, *function.args.kwonlyargs):
        if argument.annotation is not None and "torch" in ast.unparse(argument.annotation):
            argument.annotation = None
    function.body, function.returns = [*_docstring(function), ast.Pass()], None
    return function


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> list[ast.stmt]:
    return [node.body[0]] if ast.get_docstring(node) is not None else []
