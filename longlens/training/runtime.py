"""How a run is carried out: none of this decides its result. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longlens.options import Options, Size


@dataclass(frozen=True, kw_only=True)
class Runtime(Options):
    """Where and how to run; the result is the same up to rounding.

    Args:
        runs: Folder of all runs.
        folder: Folder of this run, instead of RUNS/TASK/MIXER/HASH.
        device: Device to train on; auto is a GPU if there is one.
        threads: Threads of a process on the CPU; by default as many as the machine has free cores.
        parallel: Under torchrun: a whole model in each process (ddp), or a part of it (fsdp).
        compile: Compile the model with torch.compile.
        deterministic: Choose kernels that give the same bits each time, where torch has them.
        tf32: Use TF32 for float32 matrix products on GPUs that have it.
        checkpoint_every: Steps between checkpoints, beside those at evaluations.
        keep: Number of checkpoints to keep, beside the best.
        log_every: Steps between lines of metrics.jsonl.
        tensorboard: Write the metrics for TensorBoard as well.
        wandb: Project of Weights & Biases to send the metrics to.
    """

    runs: Path = Path("runs")
    folder: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Size | None = None
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool = False
    deterministic: bool = True
    tf32: bool = False
    checkpoint_every: Size = 500
    keep: Size = 2
    log_every: Size = 10
    tensorboard: bool = False
    wandb: str | None = None
