"""A run as a program of torch.export, which runs where there is nothing of ours: ``torch.export.load(file).module()``.

The batch is open. The length is open, too, up to the longest sequence, for layers that compute alike at all lengths, as
attention does; others, which choose the size of an FFT or of a scan by the length, have a program of one length, to
which shorter sequences are padded. Padding never reaches a token, so that the outputs are the same.
"""

import copy
import logging
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from longlens.errors import BadInput, RunError
from longlens.files import write_json
from longlens.models.model import Model
from longlens.training.saved import Run

SHORTEST = 32  # a program of open length takes sequences from here on; shorter ones are padded
ROUNDING = 1e-4  # of float32: a program that differs by more is not that of the model
CODE = """
```python
import torch

model = torch.export.load("{name}/model.pt2").module()  # needs torch alone
outputs = model(inputs, mask)  # {inputs}; {mask}
```

{length} `model.json` says what inputs and outputs mean: vocabulary, scaling, and names of classes.
"""


class Program(NamedTuple):
    """A program, and the lengths of the sequences that it takes."""

    program: ExportedProgram
    shortest: int
    longest: int


def write(run: Run, checkpoint: str, folder: Path, name: str) -> str:
    """Write the files; return how they are used, from a folder that is called ``name``."""
    model, spec = run.model(checkpoint), run.spec
    found = export_model(model)
    torch.export.save(found.program, folder / "model.pt2")
    shape: list[Any] = ["batch", 2, "length"] if spec.head == "match" else ["batch", "length"]
    real = spec.inputs == "real"
    about = {
        "inputs": {"dtype": "float32" if real else "int64", "shape": [*shape, spec.size] if real else shape},
        "mask": {"dtype": "bool", "shape": shape, "meaning": "True for values, False for padding behind them"},
        "length": {"shortest": found.shortest, "longest": found.longest},
        "outputs": _meaning(model),
        "labels": run.codec.names if spec.head in ("classify", "match") else None,
        "torch": torch.__version__,
        "spec": asdict(spec),
        "codec": run.description,
    }
    write_json(folder / "model.json", about)
    how = (
        f"of {found.longest:,}" if found.shortest == found.longest else f"from {found.shortest:,} to {found.longest:,}"
    )
    length = f"The program takes sequences {how} values: pad shorter ones, where `mask` is False."
    kinds = {
        key: f"{key} {about[key]['dtype']} ({', '.join(map(str, about[key]['shape']))})" for key in ("inputs", "mask")
    }
    return CODE.format(name=name, length=length, **kinds)


def _meaning(model: Model) -> str:
    match model.spec.head:
        case "language":
            return "(batch, length, vocabulary): scores of the token after each"
        case "regress":
            numbers = "(batch,)" if model.spec.positions is None else f"(batch, {model.spec.positions})"
            return f"{numbers}: numbers; times label_deviation plus label_mean of the codec, as the labels were"
    return f"(batch, {model.spec.outputs}): scores of the labels"


def export_model(model: Model) -> Program:
    """The program of a model: open in the batch and, if torch can do that, in the length."""
    longest = model.spec.max_length
    shortest = min(SHORTEST, longest // 2)  # torch takes a size of 1 for a special one
    example = _example(model, 3, longest)
    model = copy.deepcopy(model).eval().requires_grad_(False)  # it is called without no_grad where nobody trains it
    problem = ""
    for least in (shortest, longest) if shortest > 1 else (longest,):
        try:
            found = Program(_export(model, example, least, longest), least, longest)
        except Exception as error:  # of whatever kind, as it depends on what the layer does
            problem = " ".join(str(error).split())[:160]
            continue
        _check(found, model)
        return found
    raise BadInput(f"mixer {model.mixer.name!r} cannot be a program of torch.export: {problem}")


def _export(model: Model, example: tuple[Tensor, Tensor], shortest: int, longest: int) -> ExportedProgram:
    last = example[1].ndim - 1
    open_sizes: dict[int, Any] = {0: Dim("batch")}
    if shortest < longest:
        open_sizes[last] = Dim("length", min=shortest, max=longest)
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch explains at length why a length cannot be open
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, example, dynamic_shapes=(open_sizes, open_sizes))
    finally:
        logging.disable(disabled)


def _example(model: Model, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and a mask in which one sequence is padded."""
    spec, random = model.spec, torch.Generator().manual_seed(0)
    shape = (batch, 2, length) if spec.head == "match" else (batch, length)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[0, ..., max(1, length // 2) :] = False
    if spec.inputs == "real":
        return torch.randn(*shape, spec.size, generator=random), mask
    return torch.randint(spec.size, shape, generator=random), mask


@torch.no_grad()
def _check(found: Program, model: Model) -> None:
    """Refuse a program that is not the model, also for other sizes than those of the example."""
    program = found.program.module()
    for batch, length in ((1, found.shortest), (2, found.longest)):
        example = _example(model, batch, length)
        wanted, got = model(*example), program(*example)
        if not (got - wanted).abs().max() <= ROUNDING * wanted.abs().max().clamp(min=1):
            raise RunError(
                f"torch.export made another program of mixer {model.mixer.name!r} than its model: it is not written"
            )
