"""The settings of LaS that other people's models take: those of the layer, by the names of its variants."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from longlens.errors import BadInput
from longlens.mixers.las import LaSAttention
from longlens.mixers.registry import find_mixer
from longlens.ops.decay import Schedule, decay_rates
from longlens.options import check_options, nearest, options_of

VARIANTS = ("las", "las-chunk", "l-attention", "s-attention", "las-bidirectional")


class Settings(NamedTuple):
    """What LaS needs beside queries, keys and values; ``LaSAttention`` describes it."""

    max_rate: float
    window: int | None
    side: Literal["past", "centered"]
    chunk_size: int | None
    schedule: Schedule

    def rates(self, heads: int) -> tuple[float, ...] | None:
        """The decay rate of each head; None if no head decays."""
        return _rates(heads, self.max_rate, self.schedule) if self.max_rate > 0 else None

    @property
    def smooths(self) -> bool:
        return self.window not in (None, 1)


def choose_settings(name: str, given: Mapping[str, Any], what: str) -> Settings:
    """The settings of a variant with what was given, checked. ``what`` says in an error whose settings these are."""
    if name not in VARIANTS:
        raise BadInput(f"there is no attention {name!r} to take the place of another; {nearest(name, VARIANTS)}")
    preset, declared = find_mixer(name), options_of(LaSAttention)
    known = {option: declared[option] for option in Settings._fields if option not in preset.fixed}
    defaults = {option: preset.options[option].default for option in known}
    fixed = {option: preset.fixed[option] for option in Settings._fields if option in preset.fixed}
    settings = Settings(**(defaults | check_options(known, given, what) | fixed))
    if settings.schedule == "literal" and not 0 < settings.max_rate < 1:
        raise BadInput(f"max_rate must be a number between 0 and 1 for schedule=literal, got {settings.max_rate}")
    return settings


def takes(name: str) -> set[str]:
    """The settings that a variant does not decide itself."""
    return set(Settings._fields) - set(find_mixer(name).fixed)


@cache
def _rates(heads: int, max_rate: float, schedule: Schedule) -> tuple[float, ...]:
    return tuple(decay_rates(heads, max_rate, schedule, device="cpu", dtype=torch.float32).tolist())  # as the layer
