"""LongLens: long-range sequence layers for PyTorch, around Local and Smooth (LaS) attention.

>>> from longlens import las_attention, LaSAttention, decay_rates

Names are imported on first use, so that ``import longlens`` (and ``longlens --help``) does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from longlens.mixers.base import create_mixer as create_mixer
    from longlens.mixers.base import list_mixers as list_mixers
    from longlens.mixers.las import LaSAttention as LaSAttention
    from longlens.mixers.las import LaSCache as LaSCache
    from longlens.models.model import create_model as create_model
    from longlens.ops.decay import decay_rates as decay_rates
    from longlens.ops.las import las_attention as las_attention
    from longlens.ops.reference import las_attention_reference as las_attention_reference
    from longlens.ops.smoothing import smooth_values as smooth_values
    from longlens.tasks.base import create_task as create_task
    from longlens.tasks.base import list_tasks as list_tasks

_HOME = {
    "LaSAttention": "longlens.mixers.las",
    "LaSCache": "longlens.mixers.las",
    "create_mixer": "longlens.mixers.base",
    "create_model": "longlens.models.model",
    "create_task": "longlens.tasks.base",
    "decay_rates": "longlens.ops.decay",
    "las_attention": "longlens.ops.las",
    "las_attention_reference": "longlens.ops.reference",
    "list_mixers": "longlens.mixers.base",
    "list_tasks": "longlens.tasks.base",
    "smooth_values": "longlens.ops.smoothing",
}

__all__ = [  # noqa: RUF022
    "LaSAttention",
    "LaSCache",
    "create_mixer",
    "create_model",
    "create_task",
    "decay_rates",
    "las_attention",
    "las_attention_reference",
    "list_mixers",
    "list_tasks",
    "smooth_values",
    "__version__",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'longlens' has no attribute {name!r}; it offers {', '.join(_HOME)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
