"""Tasks and mixers by name: those of the package, of installed packages (entry points ``longlens``), and of the modules
or files that ``LONGLENS_IMPORT`` names."""

import ast
import dis
import inspect
import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, resolve_name, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar

import longlens.options
from longlens.errors import BadInput, LongLensError
from longlens.options import nearest

_Entry = TypeVar("_Entry")

HERE = Path(__file__).resolve().parent
WRAPPERS = {property: "fget", cached_property: "func", classmethod: "__func__", staticmethod: "__func__"}
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
        """An entry, after what is added from outside: there, a name of the package is refused."""
        import_added()
        return self.look_up(name)

    def look_up(self, name: str) -> _Entry:
        """An entry. One of the package is found without what is added, which may be what asks for it."""
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
    """The source of a user's class and of what it is made of, which a result belongs to: its file and the user's
    modules that this imports; of a notebook or a prompt, its methods, its bases and what they name. Nothing for this
    package's: the environment of a run has its version and commit."""
    found: dict[Any, str] = {}
    module = sys.modules.get(chosen.__module__)
    file = _file_of(module)
    if file is None:
        _add_part(chosen, found)
    elif not file.resolve().is_relative_to(HERE):  # an installed package may be a user's
        _add_file(file, getattr(module, "__package__", None), found)
    return "\n".join(filter(None, found.values()))


def _add_file(file: Path, package: str | None, found: dict[Any, str]) -> None:
    """A file, and those of the user's modules that it imports."""
    if file in found:
        return
    found[file] = file.read_text(errors="replace")
    for name in _imports(file, package):
        spec = _find_unimported(name)
        if spec is not None and _is_of_a_user(spec.origin):
            _add_file(Path(str(spec.origin)), spec.parent, found)


def _imports(file: Path, package: str | None) -> Iterator[str]:
    """What may be a module: of ``from a import b``, that is a and a.b."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # relative, in a file that is used without its package
                home = resolve_name("." * node.level + (node.module or ""), package)
                yield from (home, *(f"{home}.{alias.name}" for alias in node.names))


def _find_unimported(name: str) -> ModuleSpec | None:
    """Where a module is, also if a function imports it later: whether it did must not matter."""
    spec, path = None, None
    for parent in accumulate(name.split("."), "{}.{}".format):
        module = sys.modules.get(parent)
        spec = PathFinder.find_spec(parent, path) if module is None else getattr(module, "__spec__", None)
        path = [] if spec is None else spec.submodule_search_locations or []
    return spec


def _file_of(module: ModuleType | None) -> Path | None:
    """None for a prompt, a notebook, or a script from the standard input, which says that its file is <stdin>."""
    file = getattr(module, "__file__", None)
    return Path(file) if file and Path(file).is_file() else None


def _is_of_a_user(file: str | None) -> bool:
    """Neither of Python, nor installed, nor ours."""
    path = Path(file or "").resolve()
    is_known = any(map(path.is_relative_to, (HERE, Path(os.__file__).resolve().parent)))
    return path.suffix == ".py" and not is_known and not {"site-packages", "dist-packages"} & {*path.parts}


def _add_part(part: Any, found: dict[Any, str], name: str = "") -> None:
    """Add a part of a notebook or a prompt: a function and what it names, a class and its bases, a module, or a plain
    value."""
    if type(part) in WRAPPERS:
        part = getattr(part, WRAPPERS[type(part)])
    if not (inspect.isfunction(part) or inspect.isclass(part) or inspect.ismodule(part)):
        with suppress(TypeError, ValueError):  # not plain
            line = f"{name} = {json.dumps(part)}"
            found[line] = line
        return
    module = part if inspect.ismodule(part) else sys.modules.get(part.__module__)
    file = _file_of(module)
    if file is not None:
        if _is_of_a_user(str(file)):
            _add_file(file, getattr(module, "__package__", None), found)
    elif inspect.isfunction(part):
        _add_function(inspect.unwrap(part), found)
    elif inspect.isclass(part) and part not in found:
        found[part] = ""  # it is that of its methods
        for entry, value in vars(part).items():
            if inspect.isroutine(value) or not entry.startswith("__"):
                _add_part(value, found, entry)
        for base in part.__bases__:
            _add_part(base, found)


def _add_function(function: Any, found: dict[Any, str]) -> None:
    if function in found:
        return
    try:
        found[function] = inspect.getsource(function)
    except OSError:  # of a prompt
        defaults = function.__defaults__, function.__kwdefaults__
        found[function] = f"{_describe_code(function.__code__)} {defaults}"
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            _add_part(function.__globals__[name], found, name)


def _describe_code(code: CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {[*map(_describe_constant, code.co_consts)]}"


def _describe_constant(value: Any) -> Any:
    """The same in each process: the order of a set is not."""
    if isinstance(value, CodeType):
        return _describe_code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):  # a function in it
            yield from _global_names(instruction.argval)


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
