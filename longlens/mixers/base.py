"""What a mixer is, and how to get one by its name.

A mixer is an ``nn.Module`` from (B, L, D) to (B, L, D), called as ``mixer(x, mask=mask)`` with a boolean (B, L) mask,
True for tokens and False for padding, or None. Its options are the fields of a ``Config``, which builds it.

Some mixers also have

- ``step(x, state=None)``: one token of each sequence, (B, D), and what came before -> (B, D) and the next state;
- ``kernel(length)``: the weights (channels, length) of a convolution with the inputs 0, 1, … steps back; for both sides
  (2·channels, length), of which the second half are the weights of the inputs 1, 2, … steps ahead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from longlens.options import from_options, option_names, required_options
from longlens.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn


_Class = TypeVar("_Class", bound=type)

MAX_LENGTH = 1024  # of the sequences that a layer is built for, where nobody says it


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a layer is made of: the columns of the LaS paper's Table 10, then what it costs.

    Args:
        decays: what is far has less weight, by structure or initialization.
        regularized: its kernels are regularized explicitly.
        special_init: it begins in a special way, as with a HiPPO matrix.
        stable: it is proven stable, or built so.
        gated: it multiplies its result with a function of the input.
        complex: its parameters are complex numbers.
        normalized: it normalizes in a way of its own.
        recurrent: it needs a recurrence in training.
        cost: time in terms of the length: L, L log L, L².
        state: numbers that a step remembers, in terms of the width D, of options and of the length L; None if it has
            no ``step``.
    """

    decays: bool = False
    regularized: bool = False
    special_init: bool = False
    stable: bool = False
    gated: bool = False
    complex: bool = False
    normalized: bool = False
    recurrent: bool = False
    cost: Literal["L", "L log L", "L²"]
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config(ABC):
    """The options of a mixer. Its fields are its options, and the docstring describes them.

    A mixer for one side or both has an option ``bidirectional``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    traits: ClassVar[Traits | None] = None
    # Why its parameters are not about as many as those of attention, for one that cannot help it.
    size_note: ClassVar[str | None] = None

    @abstractmethod
    def build(
        self,
        d_model: int,
        *,
        max_length: int = MAX_LENGTH,
        device: "torch.device | str | None" = None,
        dtype: "torch.dtype | None" = None,
    ) -> "nn.Module":
        """The layer of width ``d_model``, for sequences of at most ``max_length`` tokens if that matters to it.

        Parameters that must not decay and want a careful learning rate, as those of a state space, are named in its
        attribute ``special_parameters``.
        """

    def looks_ahead(self) -> str | None:
        """How an output depends on later inputs, as an error says it; None for a causal layer."""
        return "it sees both sides: choose bidirectional=False" if getattr(self, "bidirectional", False) else None


_REGISTRY: Registry[Config] = Registry(
    "mixer",
    {
        name: f"longlens.mixers.{module}"
        for module, names in {
            "las": "transformer l-attention s-attention las las-chunk las-bidirectional",
            "alibi": "alibi alibi-smooth",
            "local": "local",
            "linformer": "linformer",
            "performer": "performer",
            "reformer": "reformer",
            "bigbird": "bigbird",
            "luna": "luna",
            "lssl": "lssl",
            "s4": "s4 s4-bidirectional",
            "s4d": "s4d",
            "dss": "dss",
            "dlr": "dlr",
            "gss": "gss",
            "h3": "h3",
            "mega": "mega mega-chunk",
            "s5": "s5",
            "lru": "lru",
            "sgconv": "sgconv",
            "long_conv": "long-conv",
            "tnn": "tnn",
            "hyena": "hyena",
            "lstm": "lstm",
        }.items()
        for name in names.split()
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


def sides(chosen: type[Config]) -> tuple[bool, bool]:
    """Whether a layer can be causal, and whether it can see both sides."""
    default = chosen().looks_ahead() is None
    either = "bidirectional" in option_names(chosen)
    return default or either, not default or either


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
    max_length: int = MAX_LENGTH,
    device: "torch.device | str | None" = None,
    dtype: "torch.dtype | None" = None,
    **options: Any,
) -> "nn.Module":
    """A layer by its name: ``create_mixer("las", d_model=256, heads=8)`` is a module from (B, L, 256) to (B, L, 256).

    ``list_mixers()`` has the names, and ``help(longlens.mixers.base.mixer_class(name))`` the options of one.
    """
    return mixer_config(name, **options).build(d_model, max_length=max_length, device=device, dtype=dtype)
