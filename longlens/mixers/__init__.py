"""Sequence layers (B, L, D) -> (B, L, D): ``from longlens.mixers import S4D``. Imported when they are first used."""

from functools import cache
from typing import Any

from longlens.mixers.registry import REGISTRY, choose_mixer, create_mixer, find_mixer, list_mixers, register

__all__ = ["choose_mixer", "create_mixer", "find_mixer", "list_mixers", "register"]


@cache
def _layers() -> dict[str, str]:
    """The name of a mixer for each class of the package."""
    return {find_mixer(name).layer_name: name for name in REGISTRY.modules}


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in _layers():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its layers are {', '.join(_layers())}")
    return find_mixer(_layers()[name]).layer


def __dir__() -> list[str]:
    return sorted([*__all__, *_layers()])
