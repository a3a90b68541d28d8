"""What a mixer is, and how to get one by its name.

A mixer is an ``nn.Module`` from (B, L, D) to (B, L, D), called as ``mixer(x, mask=mask)`` with a boolean (B, L) mask,
True for tokens and False for padding, or None. The parameters of its ``__init__`` are its options; a name is a preset
of a layer. It is causal, unless its attribute ``causal`` is False or ``bidirectional`` is True. Some also have

- ``step(x, state=None)``: one token of each sequence, (B, D), and what came before -> (B, D) and the next state, which
  may hold what the first step computed of the parameters: where these change, a new text starts;
- ``prefill(x)``: the first tokens, (B, n, D), in parallel -> (B, n, D), as of ``forward``, and the state of ``step``;
- ``kernel(length)``: the weights (channels, length) of a convolution with the inputs 0, 1, … steps back; for both sides
  (2·channels, length), of which the second half are the weights of the inputs 1, 2, … steps later;
- ``kernel_parameters``, ``no_decay``: names of parameters that learn at most at ``kernel_lr``, or have no weight decay;
- ``groups``: names of parameters by the name of their group, to which a recipe gives a rate and a decay of their own;
- ``longest``: the most tokens that it can take, if there is a limit;
- ``takes_residual = True``: it is called with ``residual=stream``, too, the sum that the block adds its result to (None
  for x), from which x differs by a norm. Dropout of what it returns is then its own, and not the block's.

What ``__init__`` may declare beside options: ``max_length`` of the sequences; ``number`` of the layer in its model,
from 0; ``shape``, height and width of an image whose rows make the sequence, None for others; ``device`` and ``dtype``.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, get_type_hints

from longlens.errors import BadInput
from longlens.options import REQUIRED, Option, check_options, nearest, options_of, without_none
from longlens.registry import Registry, read_skeleton

if TYPE_CHECKING:
    import torch
    from torch import nn

_Layer = TypeVar("_Layer", bound=type)

MAX_LENGTH = 1024  # the default of ``max_length``
OTHER_NAMES = {"num_heads": "heads"}  # nn.MultiheadAttention's name, and that of all mixers
NOT_OPTIONS = ("d_model", "embed_dim", "max_length", "number", "shape", "device", "dtype")
SHARED = {  # descriptions of options that many layers of the package have, whose docstrings leave them out
    "d_model": "Width D.",
    "heads": "Number of heads H, which divides the width.",
    "state_size": "State size N of each channel.",
    "window": "Odd window P of the moving average over the weights; none turns smoothing off.",
    "side": "Side of the window: past, or centered as in the paper, which sees (P - 1) / 2 later tokens.",
    "chunk_size": "Length of independent chunks; none for the whole sequence.",
    "dt_min": "Smallest step size at initialization.",
    "dt_max": "Largest step size at initialization.",
    "bidirectional": "See both sides.",
    "output": "Output projection: glu (gated) or linear.",
    "bias": "Biases in the projections.",
    "dropout": "Dropout of the attention weights.",
    "rotary": "Rotate queries and keys by their positions (Su et al. 2021).",
}


class Factory(TypedDict, total=False):
    """What a layer accepts as ``**factory: Unpack[Factory]`` and gives to those of torch that it is made of."""

    device: "torch.device | str | None"
    dtype: "torch.dtype | None"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a layer is made of: the columns of the LaS paper's Table 10, then its cost."""

    decays: bool = False  # distant inputs have less weight, by structure or initialization
    regularized: bool = False  # its kernels are regularized explicitly
    special_init: bool = False  # such as a HiPPO matrix
    stable: bool = False  # proven, or built so
    gated: bool = False  # it multiplies its result with a function of the input
    complex: bool = False  # its parameters are complex numbers
    normalized: bool = False  # in a way of its own
    recurrent: bool = False  # it needs a recurrence in training
    cost: Literal["L", "L log L", "L²"]  # time in terms of the length
    state: str | None = None  # numbers that a step remembers, of the width D, options and the length L


@dataclass(frozen=True)
class Preset:
    """A name for a layer with some of its options chosen."""

    name: str
    module: str
    layer_name: str
    summary: str
    options: Mapping[str, Option] = field(repr=False)  # with the defaults of this name
    fixed: Mapping[str, Any]  # what the name means: no options of it
    traits: Traits | None = None
    size_note: str | None = None  # why the parameter count differs from attention's, if it must
    causal: bool | None = field(default=None, compare=False)  # what the class says, if that was read without an import
    registered: type | None = field(default=None, compare=False, repr=False)  # the class, unless it was only read

    @property
    def layer(self) -> "type[nn.Module]":
        return getattr(import_module(self.module), self.layer_name)


@dataclass(frozen=True)
class Mixer:
    """A mixer with its options, which builds layers."""

    name: str
    options: Mapping[str, Any]

    @property
    def preset(self) -> Preset:
        return find_mixer(self.name)

    def build(
        self,
        d_model: int,
        *,
        max_length: int = MAX_LENGTH,
        number: int = 0,
        shape: tuple[int, int] | None = None,
        **factory: Unpack[Factory],
    ) -> "nn.Module":
        """The layer of width ``d_model``; the other arguments are for layers to which they matter (see above)."""
        values = {**self.options, **self.preset.fixed}
        context = {"max_length": max_length, "number": number, "shape": shape}
        return build_layer(self.preset.layer, d_model, values, **context, **factory)


def build_layer(layer: "type[nn.Module]", d_model: int, options: Mapping[str, Any], **others: Any) -> "nn.Module":
    """A layer of a class, registered or not, with those of ``others`` (``max_length``, ``device``, …) that it has."""
    known = _full_signature(layer).parameters
    names = {ours: name for name, ours in OTHER_NAMES.items() if name in known}
    values = {names.get(name, name): value for name, value in options.items()}
    others = {"max_length": MAX_LENGTH, **others}
    values |= {name: value for name, value in others.items() if name in known or name not in NOT_OPTIONS}
    try:
        return layer(d_model, **values)
    except BadInput as error:  # about the options that we were given
        for ours, name in names.items():
            error.args = (str(error).replace(name, ours),)
        raise


def register(
    name: str,
    summary: str = "",
    traits: Traits | None = None,
    *,
    size_note: str | None = None,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    needs: tuple[str, ...] = (),
    **defaults: Any,
) -> Callable[[_Layer], _Layer]:
    """Above a layer: a name for it, which ``create_mixer`` and ``--mixer`` take. The parameters of its ``__init__`` are
    its options.

    Args:
        summary: a line for lists; by default the first line of the docstring.
        traits, size_note: see ``Preset``.
        fixed: options that the name decides; nobody else can.
        needs: options that cannot be none under this name.
        defaults: other defaults than those of the signature.
    """

    def add(layer: _Layer) -> _Layer:
        if not isinstance(layer, type):
            raise BadInput(f"mixer {name!r} must be a class, a torch.nn.Module, got the {type(layer).__name__} {layer}")
        if layer.__module__.startswith(f"{REGISTRY.package}."):
            layer.__doc__ = _describe_shared(layer)
        options = layer_options(layer, name)
        for option in (*fixed, *defaults):
            if option not in options:
                raise BadInput(f"mixer {name!r} chooses {option!r}, and {layer.__name__} has no such option")
        options = {key: option for key, option in options.items() if key not in fixed}
        options |= {key: replace(options[key], default=value) for key, value in defaults.items()}
        options |= {key: replace(options[key], hint=without_none(options[key].hint)) for key in needs}
        for option in options.values():
            if option.default is REQUIRED:
                raise BadInput(f"mixer {name!r} has no default for its option {option.name!r}: give it one")
            if option.hint is Any:
                wanted = f"write one, as in {option.name}: int | None = None"
                raise BadInput(f"mixer {name!r} has no type for its option {option.name!r}: {wanted}")
        about = summary or (layer.__doc__ or "").partition("\n")[0]
        known = REGISTRY.entries.get(name)
        if known is not None and known.layer_name != layer.__name__:
            raise BadInput(f"there is a mixer {name!r} already: choose another name")
        is_skeleton = getattr(layer, "__skeleton__", False)
        causal, registered = (getattr(layer, "causal", True), None) if is_skeleton else (None, layer)
        home = layer.__module__
        preset = Preset(name, home, layer.__name__, about, options, fixed, traits, size_note, causal, registered)
        REGISTRY.add(name, preset, home)
        return layer if is_skeleton else _with_checks(layer)

    return add


def _describe_shared(layer: type) -> str:
    """The docstring of a layer, with the shared options that it leaves out."""
    text = inspect.cleandoc(layer.__doc__ or "")
    names = [name for name in inspect.signature(layer).parameters if name in SHARED and f"\n    {name}: " not in text]
    heading = "\n\nArgs:" if names and "\nArgs:\n" not in text else ""
    return text + heading + "".join(f"\n    {name}: {SHARED[name]}" for name in names)


def layer_options(layer: type, name: str) -> dict[str, Option]:
    """The options of a layer, which the parameters of its ``__init__`` are. ``name`` is that of an error."""
    own = inspect.signature(layer).parameters
    if not any(given.kind == given.POSITIONAL_OR_KEYWORD for given in own.values()):
        raise BadInput(f"mixer {name!r}: the first parameter of {layer.__name__} must be its width, d_model")
    forward = getattr(layer, "forward", None)
    if forward is not None and "mask" not in inspect.signature(forward).parameters:
        raise BadInput(f"mixer {name!r}: {layer.__name__}.forward must accept a mask: forward(self, x, *, mask=None)")
    found = [option for option in list(options_of(layer).values())[1:] if option.name not in NOT_OPTIONS]
    found = [replace(option, name=OTHER_NAMES.get(option.name, option.name), positional=False) for option in found]
    return {option.name: option for option in found}


def _with_checks(layer: _Layer) -> _Layer:
    """The layer, whose arguments are checked by the types of its signature."""
    from torch import nn

    initialize, signature = layer.__init__, _full_signature(layer.__init__)
    if hasattr(initialize, "__wrapped__"):  # it has another name already
        return layer
    options = {name: option for name, option in options_of(layer).items() if name not in ("device", "dtype")}

    @wraps(initialize)
    def checked(*args: Any, **values: Any) -> None:
        try:
            given = signature.bind(*args, **values)
        except TypeError as error:
            unknown = next((name for name in values if name not in signature.parameters), None)
            hint = "" if unknown is None else f"; {nearest(unknown, list(signature.parameters)[1:])}"
            raise TypeError(f"{layer.__name__}: {error}{hint}") from None
        for name, option in options.items():
            if name in given.arguments:
                given.arguments[name] = option.check(given.arguments[name])
        initialize(*given.args, **given.kwargs)
        given.apply_defaults()
        args[0].__dict__["arguments"] = {name: given.arguments[name] for name in options}

    plain = get_type_hints(initialize)  # without what checks them, for people who ask for help
    parameters = [
        given.replace(annotation=plain.get(name, given.annotation)) for name, given in signature.parameters.items()
    ]
    checked.__dict__["__signature__"] = signature.replace(parameters=parameters)
    layer.__init__ = checked
    if layer.extra_repr is nn.Module.extra_repr:
        layer.extra_repr = lambda self: ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
    return layer


def _full_signature(layer: Callable[..., Any]) -> inspect.Signature:
    """The signature, with the entries of ``**factory: Unpack[Factory]`` as arguments of their own."""
    signature = inspect.signature(layer)
    parameters = [given for given in signature.parameters.values() if given.annotation != Unpack[Factory]]
    if len(parameters) < len(signature.parameters):
        named = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(name, named, default=None) for name in Factory.__annotations__]
    return signature.replace(parameters=parameters)


def _load(module: str) -> None:
    """Register the layers of a module by their skeletons: the module, which imports torch, is imported when one is
    built."""
    names = {"register": register, "Traits": Traits, "Factory": Factory, "MAX_LENGTH": MAX_LENGTH}
    read_skeleton(module, lambda node: any("register(" in ast.unparse(call) for call in node.decorator_list), names)


REGISTRY: Registry[Preset] = Registry("mixer", "longlens.mixers", _load)


def list_mixers() -> list[str]:
    return REGISTRY.names()


def find_mixer(name: str) -> Preset:
    return REGISTRY.look_up(name)


def choose_mixer(name: str, **options: Any) -> Mixer:
    """A mixer with its options, checked; nothing is built, and torch is not imported."""
    known = REGISTRY.find(name).options
    given = check_options(known, options, f"mixer {name!r}")
    return Mixer(name, {option: given.get(option, known[option].default) for option in known})


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

    ``list_mixers()`` has the names, ``longlens list mixers NAME`` the options of one.
    """
    return choose_mixer(name, **options).build(d_model, max_length=max_length, device=device, dtype=dtype)


def layer_is_causal(layer: "nn.Module") -> bool:
    """Whether no output of a layer depends on later inputs, as the layer says itself."""
    return bool(getattr(layer, "causal", not getattr(layer, "bidirectional", False)))


def seen_sides(name: str) -> Literal["causal", "both", "either"]:
    """What a mixer sees: "either" by an option ``bidirectional``. A layer from outside of the package is built to ask
    it."""
    preset = find_mixer(name)
    if "bidirectional" in preset.options:
        return "either"
    causal = preset.causal and not preset.fixed.get("bidirectional", False)
    if preset.causal is None:
        import torch

        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            causal = layer_is_causal(create_mixer(name, 64))
    return "causal" if causal else "both"
