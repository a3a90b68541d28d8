"""The most memory that a run held."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Bytes beyond those at the start: of tensors on a GPU, of the whole process on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
        self.before = _now()

    def value(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, _peak() - self.before)


def _now() -> int:
    return _status("VmRSS") or _peak()


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
