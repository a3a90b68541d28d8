"""LaS in modules that call ``scaled_dot_product_attention`` themselves, as those of nanoGPT and of timm do.

Each call of that function by a method of such a module is answered by LaS. What other modules call within it, and what
``las_attention`` calls, is not its own. The module stays itself, with its weights, though of a class derived from its
own; what it hands to the function says what is seen.
"""

import dis
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial, wraps
from types import CodeType, FunctionType, new_class
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from longlens.errors import BadInput
from longlens.integrations.masked import Seen, attend, read_mask, split_mask
from longlens.integrations.settings import Settings

NAME = "scaled_dot_product_attention"
SKIP = "name this layer in replace_attention(…, skip=[…])"
_RUNNING: ContextVar[frozenset[nn.Module]] = ContextVar("running", default=frozenset())  # the modules, in this thread


def calls_attention(module: nn.Module) -> bool:
    """Whether a method of its class, unless it is one of torch, or a forward of this one module names the function."""
    functions = [*(method for _, method in _methods(type(module))), inspect.unwrap(vars(module).get("forward", id))]
    places = [getattr(function, "__globals__", {}) for function in functions]
    names = {name for place in places for name, value in place.items() if value is F.scaled_dot_product_attention}
    return any(NAME in code.co_names or not names.isdisjoint(_globals_of(code)) for code in _code_in(*functions))


def _globals_of(code: CodeType) -> set[str]:
    """The globals that code reads; in ``co_names`` are names of attributes, too, as in ``self.attention``."""
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}


def answer_calls(module: nn.Module, settings: Settings) -> None:
    """Let the attention of the module be LaS, with these settings, from now on."""
    if not isinstance(module, LaSCalls):
        module.__class__ = _with_las(type(module))
    vars(module)["las_settings"] = settings


def _methods(kind: type) -> list[tuple[str, FunctionType]]:
    """The methods of a class, below their decorators, and those they override; without those of torch."""
    classes = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    found = [(name, inspect.unwrap(value)) for base in classes for name, value in vars(base).items()]
    return [(name, value) for name, value in found if inspect.isfunction(value)]


def _code_in(*functions: Any) -> frozenset[CodeType]:
    """The code of functions, and of the functions in them."""
    code = [each.__code__ for each in map(inspect.unwrap, functions) if hasattr(each, "__code__")]
    for each in code:  # which grows
        code += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    return frozenset(code)


class LaSCalls(nn.Module):
    """The base of a module whose calls are answered, beside its own class, ``las_plain``."""

    las_plain: type[nn.Module]
    las_code: frozenset[CodeType]
    las_settings: Settings

    def __init_subclass__(cls) -> None:
        """To a base that registers the classes derived from it, this is no new one."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Also of a forward of this one module: accelerate sets one, and later the old one again."""
        return _run(self, "forward", super()._call_impl, *args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __reduce__(self) -> tuple[Any, ...]:
        """As that of its own class, since pickles know a class by its name."""
        return _restore, (self.las_plain,), self.__getstate__()


def _restore(plain: type[nn.Module]) -> nn.Module:
    las = _with_las(plain)
    return las.__new__(las)


@cache
def _with_las(plain: type[nn.Module]) -> type[nn.Module]:
    """The class with its name, all of whose methods are run so that their calls are answered."""
    methods = _methods(plain)
    own = {"las_plain": plain, "las_code": _code_in(*[method for _, method in methods])}
    own |= {key: getattr(plain, key) for key in ("__module__", "__qualname__", "__doc__")}
    las = new_class(plain.__name__, (LaSCalls, plain), exec_body=lambda body: body.update(own))
    for name in {name for name, _ in methods if not name.startswith("__")}:
        method = inspect.getattr_static(plain, name)
        if isinstance(method, staticmethod | classmethod):
            setattr(las, name, _OfModules(name, method))
        elif inspect.isfunction(inspect.unwrap(method)):
            setattr(las, name, _answered(name, method))
    return las


def _answered(name: str, method: Any) -> Callable[..., Any]:
    plain = getattr(method, "_torchdynamo_orig_callable", method)  # what is compiled would not be answered

    @wraps(method)
    def run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _run(module, name, plain.__get__(module), *args, **kwargs)  # pyright: ignore[reportCallIssue]

    return run


class _OfModules:
    """A static method, or one of the class: called on a module it is answered, on the class it is what it was."""

    def __init__(self, name: str, method: Any):
        self.name, self.method = name, method

    def __get__(self, module: nn.Module | None, kind: type) -> Callable[..., Any]:
        plain = self.method.__get__(None, kind)
        return plain if module is None else partial(_run, module, self.name, plain)


@torch.compiler.disable  # which would trace what is called, not what answers
def _run(module: nn.Module, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What the method of this name returns if its calls, and those of the methods that it runs, are answered."""
    running = _RUNNING.get()
    if module in running or "las_settings" not in vars(module):  # a new one, which type(module)(…) has made, is plain
        return method(*args, **kwargs)
    calls, token = _Calls(module, vars(module).get("forward", method)), _RUNNING.set(running | {module})
    try:
        with calls:
            output = method(*args, **kwargs)
    finally:
        _RUNNING.reset(token)
    if name == "forward" and not calls.answered:
        raise BadInput(
            f"{type(module).__name__} has not called {NAME}, which LaS would have answered: choose its fused "
            "attention (in timm, fused_attn = True), or name it in skip"
        )
    return output


class _Calls(TorchFunctionMode):
    def __init__(self, module: Any, method: Callable[..., Any]):
        super().__init__()
        self.settings, self.own, self.answered = module.las_settings, module.las_code | _code_in(method), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or _calling_code() not in self.own:
            return func(*args, **(kwargs or {}))
        self.answered = True
        return _answer(self.settings, *args, **(kwargs or {}))


def _calling_code() -> CodeType:
    """The code that calls a function of torch, seen from where it is answered."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # other answers lie between
        frame = frame.f_back
    return frame.f_code


def check_not_nested(query: Tensor) -> None:
    if query.is_nested:
        raise BadInput("query must be an ordinary tensor, got a nested one: LaS attention takes padding as a mask")


def _answer(
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As ``F.scaled_dot_product_attention``, of queries (B, H, L, d) and keys of the same sequence."""
    check_not_nested(query)
    if query.ndim != 4:
        shape = tuple(query.shape)
        raise BadInput(f"queries must be (batch, heads, length, width) for LaS, got the shape {shape}; {SKIP}")
    if query.shape[-2] != key.shape[-2]:
        raise BadInput(
            f"queries and keys must be of one sequence for LaS, got {query.shape[-2]} and {key.shape[-2]}: between two "
            f"there is no distance; {SKIP}, or call las_attention to decode"
        )
    if is_causal and attn_mask is not None:
        raise BadInput("attn_mask must be None if is_causal is True: put what is later into the mask")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise BadInput(f"keys must have the {query.shape[1]} heads of the queries, or enable_gqa, got {key.shape[1]}")
    if isinstance(attn_mask, CausalBias):  # its numbers are not set, and both of its variants are one for one length
        attn_mask, is_causal = None, True
    seen, bias = Seen(is_causal, key.shape[-2]), None
    if attn_mask is not None:
        allowed, bias = split_mask(attn_mask.reshape(*[1] * (4 - attn_mask.ndim), *attn_mask.shape))
        seen = read_mask(allowed.expand(-1, -1, -1, key.shape[-2]), query.shape[-2], causal=False)
    return attend(query, key, value, seen, settings, bias=bias, scale=scale, dropout_p=dropout_p)[0]
