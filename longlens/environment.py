"""What a figure or a result was made on."""

import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from longlens import __version__


def environment(device: torch.device) -> dict[str, object]:
    """Versions, commit, processor and threads."""
    return {
        "longlens": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    """Of the checkout that this package is in, if it is in one; ``+changes`` if files differ from it."""
    folder = Path(__file__).parent
    if not (folder.parent / ".git").exists():
        return None
    try:
        options = {"cwd": folder, "capture_output": True, "text": True, "check": True, "timeout": 10}
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **options).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno", "--", "."], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
