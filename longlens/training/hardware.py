"""Threads and kernels for the time of a run: both are as before afterwards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from longlens.training.runtime import Runtime


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def choose_kernels(runtime: Runtime, device: torch.device) -> Iterator[None]:
    """Kernels that give the same bits each time, where torch has them; TF32 for products of float32 on a GPU."""
    settings: Any = torch.utils.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = False
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if runtime.tf32 else "highest")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        settings.fill_uninitialized_memory = filled
        torch.set_float32_matmul_precision(precision)
