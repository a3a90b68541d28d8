"""``longlens export``: a trained model for use elsewhere."""

from pathlib import Path
from typing import Literal


def export(run: Path, folder: Path, *, to: Literal["hf", "torch-export"] = "hf", checkpoint: str = "best") -> list[str]:
    """Write the model of a finished run to a new folder, with a README.md that says what it is and how to use it.

    Args:
        run: Folder of the run.
        folder: Folder to write to, which must be new or empty.
        to: Kind of the model: hf for transformers, whose from_pretrained reads it, or torch-export for a program that
            needs torch alone.
        checkpoint: Checkpoint to use: best, last, or a step.
    """
    from longlens.training.saved import load_run

    written = load_run(run).export(folder, to, checkpoint=checkpoint)
    files = ", ".join(sorted(file.name for file in written.iterdir()))
    return [f"written to {folder}: {files}", f"{folder / 'README.md'} says how to use it"]
