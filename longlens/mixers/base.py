"""What a mixer is, and how to get one by its name.

A mixer is an ``nn.Module`` from (B, L, D) to (B, L, D), called as ``mixer(x, mask=mask)`` with a boolean (B, L) mask,
True for tokens and False for padding, or None. Its options are the fields of a ``Config``, which builds it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from longlens.options import from_options, required_options
from longlens.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn


_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, kw_only=True)
class Config(ABC):
    """The options of a mixer. Its fields are its options, and the docstring describes them."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def build(
        self,
        d_model: int,
        *,
        max_length: int | None = None,
        device: "torch.device | str | None" = None,
        dtype: "torch.dtype | None" = None,
    ) -> "nn.Module":
        """The layer of width ``d_model``, for sequences of at most ``max_length`` tokens if that matters to it.

        Parameters that must not decay and want a careful learning rate, as those of a state space, are named in its
        attribute ``special_parameters``.
        """

    def looks_ahead(self) -> str | None:
        """How an output depends on later inputs, as an error says it; None for a causal layer."""
        return None


_REGISTRY: Registry[Config] = Registry(
    "mixer",
    {
        "transformer": "longlens.mixers.las",
        "l-attention": "longlens.mixers.las",
        "s-attention": "longlens.mixers.las",
        "las": "longlens.mixers.las",
        "las-chunk": "longlens.mixers.las",
        "las-bidirectional": "longlens.mixers.las",
    },
)


def register(name: str) -> Callable[[_Class], _Class]:
    """``@register("my-layer")`` above a Config makes it one that ``create_mixer`` knows."""

    def add(added: _Class) -> _Class:
        for option in required_options(added):
            raise ValueError(f"mixer {name!r} has no default for its option {option!r}: give it one")
        return _REGISTRY.register(name)(added)

    return add


def list_mixers() -> list[str]:
    """The names of all mixers."""
    return _REGISTRY.names()


def mixer_class(name: str) -> type[Config]:
    """The options of a mixer, by its name."""
    return _REGISTRY.find(name)


def mixer_config(name: str, **options: Any) -> Config:
    """The options of a mixer, checked."""
    return from_options(mixer_class(name), f"mixer {name!r}", options)


def mixer_options(config: Config) -> dict[str, Any]:
    """The options that make this mixer again."""
    return asdict(config)


def create_mixer(
    name: str,
    d_model: int,
    *,
    max_length: int | None = None,
    device: "torch.device | str | None" = None,
    dtype: "torch.dtype | None" = None,
    **options: Any,
) -> "nn.Module":
    """A layer by its name: ``create_mixer("las", d_model=256, heads=8)`` is a module from (B, L, 256) to (B, L, 256).

    ``list_mixers()`` has the names, and ``help(longlens.mixers.base.mixer_class(name))`` the options of one.
    """
    return mixer_config(name, **options).build(d_model, max_length=max_length, device=device, dtype=dtype)
