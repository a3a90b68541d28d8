"""A finished run as a folder for others: a model of transformers, or a program of torch that needs nothing of ours."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from longlens.errors import BadInput
from longlens.files import default_mode
from longlens.integrations.card import write_card
from longlens.options import Option
from longlens.training.evaluate import find_checkpoint
from longlens.training.saved import Run

Target = Literal["hf", "torch-export"]


def export_run(run: Run, folder: Path | str, to: Target = "hf", checkpoint: str = "best") -> Path:
    """Write the model of a finished run to a new or empty folder, with a README.md that says what it is. The folder is
    there whole or not at all.

    Args:
        run: The run, as ``load_run`` gives it.
        folder: Folder to write to.
        to: hf for a model of transformers: config.json, model.safetensors, and a tokenizer or a feature extractor.
            torch-export for a program of torch.export, model.pt2, and model.json about its inputs and outputs.
        checkpoint: Checkpoint to use: best, last, or a step.
    """
    folder, to = Path(folder).absolute(), Option("to", Target).check(to)
    _check_free(folder)
    if to == "hf" and find_spec("transformers") is None:
        raise BadInput("transformers is not installed: pip install 'longlens[hf]'")
    result = run.result
    if result is None:
        raise BadInput(f"{run.folder} must be a finished run, and it has no result yet: the same command resumes it")
    if to == "hf":
        from longlens.integrations.huggingface.write import write
    else:
        from longlens.integrations.torch_export import write
    step = int(find_checkpoint(run.folder, checkpoint).name)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}") from None
    try:
        usage = write(run, checkpoint, partial, folder.name)
        write_card(partial / "README.md", run, result, step, usage, "transformers" if to == "hf" else "torch")
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(default_mode())  # some libraries make files that nobody else may read
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _check_free(folder: Path) -> None:
    """Refuse what is there already, and a place where nothing can be written."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BadInput(f"folder must be new or empty, and {folder} is a file or a link: choose another one")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise BadInput(f"folder must be new or empty, and {folder} has files: choose another one, or delete it")
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}") from None
    if not os.access(folder.parent, os.W_OK):
        raise BadInput(f"cannot write {folder}: permission denied")
