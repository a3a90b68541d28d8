"""LongLens: long-range sequence layers for PyTorch, around Local and Smooth (LaS) attention.

>>> from longlens import las_attention, LaSAttention, decay_rates

Names are imported on first use, so that ``import longlens`` (and ``longlens --help``) does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from longlens.api import Comparison as Comparison
    from longlens.api import Result as Result
    from longlens.api import Run as Run
    from longlens.api import compare as compare
    from longlens.api import load_run as load_run
    from longlens.api import sweep as sweep
    from longlens.api import train as train
    from longlens.integrations.pytorch import replace_attention as replace_attention
    from longlens.mixers.cache import LaSCache as LaSCache
    from longlens.mixers.las import LaSAttention as LaSAttention
    from longlens.mixers.registry import create_mixer as create_mixer
    from longlens.mixers.registry import list_mixers as list_mixers
    from longlens.models.model import create_model as create_model
    from longlens.ops.decay import decay_rates as decay_rates
    from longlens.ops.las import las_attention as las_attention
    from longlens.ops.reference import las_attention_reference as las_attention_reference
    from longlens.ops.smoothing import smooth_values as smooth_values
    from longlens.tasks.base import create_task as create_task
    from longlens.tasks.base import list_tasks as list_tasks

_HOME = {
    "Comparison": "longlens.api",
    "LaSAttention": "longlens.mixers.las",
    "LaSCache": "longlens.mixers.cache",
    "Result": "longlens.api",
    "Run": "longlens.api",
    "compare": "longlens.api",
    "create_mixer": "longlens.mixers.registry",
    "create_model": "longlens.models.model",
    "create_task": "longlens.tasks.base",
    "decay_rates": "longlens.ops.decay",
    "las_attention": "longlens.ops.las",
    "las_attention_reference": "longlens.ops.reference",
    "list_mixers": "longlens.mixers.registry",
    "list_tasks": "longlens.tasks.base",
    "load_run": "longlens.api",
    "replace_attention": "longlens.integrations.pytorch",
    "smooth_values": "longlens.ops.smoothing",
    "sweep": "longlens.api",
    "train": "longlens.api",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'longlens' has no attribute {name!r}; it offers {', '.join(_HOME)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
