"""How a run is carried out: none of this decides its result. No torch here."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from longlens.models.config import Strict


class Runtime(Strict):
    """Where and how to run; the same result up to rounding."""

    runs: Annotated[Path, Field(description="the folder of all runs.")] = Path("runs")
    folder: Annotated[
        Path | None, Field(description="the folder of this run, instead of RUNS/TASK/MIXER/HASH-OF-CONFIG.")
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: a GPU if there is one.")] = "auto"
    threads: Annotated[int | None, Field(ge=1, description="of a process on the CPU; by default torch's choice.")] = (
        None
    )
    parallel: Annotated[
        Literal["ddp", "fsdp"], Field(description="under torchrun: a whole model in each process, or a share of it.")
    ] = "ddp"
    compile: Annotated[bool, Field(description="torch.compile the model.")] = False
    checkpoint_every: Annotated[
        int, Field(ge=1, description="steps between checkpoints, beside those at evaluations.")
    ] = 500
    keep: Annotated[int, Field(ge=1, description="checkpoints to keep, beside the best.")] = 2
    log_every: Annotated[int, Field(ge=1, description="steps between lines of metrics.jsonl.")] = 10
    tensorboard: Annotated[bool, Field(description="also write the metrics for TensorBoard.")] = False
    wandb: Annotated[str | None, Field(description="also send the metrics to this project of Weights & Biases.")] = None
