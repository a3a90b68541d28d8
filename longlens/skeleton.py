"""The classes and functions of a module as their signatures and docstrings say, without importing it.

Names and help of layers and commands come from their source, so that they do not wait for torch.
"""

import ast
import math
import typing
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import longlens.options

SIGNATURE_NAMES = vars(typing) | vars(longlens.options) | {"math": math, "Path": Path}
"""What a signature that is read this way may refer to."""


def read_skeleton(
    module: str, wanted: Callable[[ast.ClassDef | ast.FunctionDef], bool], names: Mapping[str, Any]
) -> dict[str, Any]:
    """The wanted classes and functions of a module, with empty bodies, by their names.

    A class has its decorators, its docstring and its ``__init__``, and an attribute ``__skeleton__``. ``names`` are
    what decorators and defaults refer to.
    """
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found: list[ast.stmt] = []
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef) and wanted(node):
            (initialize,) = (
                part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"
            )
            mark = ast.parse("__skeleton__ = True").body
            node.bases, node.body = [], [*_docstring(node), *mark, _empty(initialize)]
            found.append(node)
        elif isinstance(node, ast.FunctionDef) and wanted(node):
            node.decorator_list = []
            found.append(_empty(node))
    known = SIGNATURE_NAMES | dict(names) | {"__name__": module}
    tree = ast.fix_missing_locations(ast.Module(found, []))
    exec(compile(tree, spec.origin, "exec"), known)
    return {node.name: known[node.name] for node in found if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _empty(function: ast.FunctionDef) -> ast.FunctionDef:
    for argument in (*function.args.args, *function.args.kwonlyargs):
        if argument.annotation is not None and "torch" in ast.unparse(argument.annotation):
            argument.annotation = None
    function.body = [*_docstring(function), ast.Pass()]
    function.returns = None
    return function


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> list[ast.stmt]:
    return [node.body[0]] if ast.get_docstring(node) is not None else []
