"""The layer that is checked: found, and built with options with which its parts show in short sequences."""

import textwrap
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longlens.errors import BadInput
from longlens.mixers.registry import REGISTRY, Mixer, Preset, build_layer, find_mixer, layer_options
from longlens.options import REQUIRED, Option, check_options, shorten

SMALL = {
    "heads": 4,
    "max_rate": 0.3,
    "chunk_size": 7,
    "block_size": 4,
    "bucket_size": 4,
    "rounds": 2,
    "state_size": 8,
    "features": 12,
    "memory": 5,
    "projected": 9,
}
"""Options with which each part of a layer shows at lengths of about 25."""


@dataclass(frozen=True)
class Check:
    """The outcome for one property. ``passed`` is None if the property does not apply to the layer."""

    name: str
    passed: bool | None
    detail: str
    traceback: str = ""


@dataclass(frozen=True)
class Subject:
    """A layer that is checked: how to build it, and what is said of it."""

    layer: type[nn.Module]
    options: Mapping[str, Any]  # small where nobody chose another value
    defaults: Mapping[str, Any]
    d_model: int
    length: int
    preset: Preset | None

    def build(self, dtype: torch.dtype = torch.float64, *, seed: int = 0, device: str = "cpu") -> nn.Module:
        """The layer, in evaluation mode. The random numbers of the program stay as they are."""
        sizes: dict[str, Any] = {"max_length": self.length + 13, "device": device, "dtype": dtype}
        with torch.random.fork_rng(devices=[]), torch.device(device):  # for a layer without the argument device
            torch.manual_seed(seed)
            return build_layer(self.layer, self.d_model, self.options, **sizes).to(dtype=dtype).eval()

    def inputs(self, batch: int, length: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(batch, self.length if length is None else length, self.d_model, dtype=dtype)


def sides(name: str) -> list[dict[str, Any]]:
    """The options with which a mixer sees one side, and both if it can do either."""
    return [{"bidirectional": both} for both in (False, True)] if "bidirectional" in find_mixer(name).options else [{}]


def find_subject(
    mixer: str | Mixer | type[nn.Module], *, d_model: int = 16, length: int = 27, **options: Any
) -> Subject:
    """The layer of ``check_mixer``, for single properties."""
    if length < 8:
        raise BadInput(f"length must be at least 8, got {length}: shorter sequences do not show what a layer does")
    if isinstance(mixer, type) and issubclass(mixer, nn.Module):
        layer, known = mixer, layer_options(mixer, mixer.__name__)
        registered = [entry for entry in REGISTRY.entries.values() if entry.layer_name == layer.__name__]
        preset = next((entry for entry in registered if entry.module == layer.__module__), None)
        fixed, chosen, what = {}, options, f"layer {layer.__name__}"
    elif isinstance(mixer, str | Mixer):
        preset = find_mixer(mixer if isinstance(mixer, str) else mixer.name)
        layer, known, fixed, what = preset.layer, preset.options, preset.fixed, f"mixer {preset.name!r}"
        given = {} if isinstance(mixer, str) else mixer.options
        chosen = {name: value for name, value in given.items() if value != known[name].default} | options
    else:
        raise BadInput(f"mixer must be a name, a Mixer or a class of layers, got {shorten(mixer)}")
    small = small_options(known)
    required = {name: value for name, value in small.items() if known[name].default is REQUIRED}
    chosen = check_options(known, required | chosen, what)
    defaults = {**{name: option.default for name, option in known.items()}, **required, **fixed}
    subject = Subject(layer, defaults | small | chosen, defaults, d_model, length, preset)
    try:
        subject.build()
    except Exception:  # perhaps what is small elsewhere is no value here
        return replace(subject, options=defaults | chosen)
    return subject


def small_options(known: Mapping[str, Option]) -> dict[str, Any]:
    """Those of ``SMALL`` that a layer has."""
    found = {}
    for name in filter(known.__contains__, SMALL):
        if name == "chunk_size" and known[name].default is None:
            continue  # a layer that can have chunks, but is not about them
        with suppress(BadInput):
            found[name] = known[name].check(SMALL[name])
    return found


def describe_error(error: Exception, own: str | None) -> str:
    """The type, the place, if possible in the layer's own file, and the words of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    skipped = (str(Path(__file__).parent), torch.__path__[0])
    outside = [frame for frame in frames if not frame.filename.startswith(skipped)] or frames
    place = next((frame for frame in reversed(frames) if frame.filename == own), outside[-1])
    text = textwrap.shorten(str(error), 160, placeholder=" …")
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}, in {place.name}: {text}{notes}"
