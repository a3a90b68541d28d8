"""Files with other content and the right checksums, as a bug, another version or a stranger would write them: whatever
they say, a command ends in order."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fuzz.cases import fuzz, new_case, run_here
from fuzz.damage import PLACES, Damage, json_values, make_beside
from fuzz.originals import ONE_STEP, RUN, TASK, WholeSets
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from longlens.errors import BadInput
from longlens.files import write_sealed
from longlens.training.config import Config


def mutate(path: Path, damage: Damage, beside: Path) -> Any:
    """Other JSON at this place, and its value."""
    damage.apply(path, beside)
    return json.loads(path.read_text())


mutations = st.builds(Damage, st.just("json"), PLACES, json_values)


@pytest.mark.parametrize("command", ["list", "evaluate", "train", "compare"])
@fuzz(
    50,
    name=st.sampled_from(["result.json", "checkpoints/00000002/state.json", "config.json"]),
    damage=mutations,
)
def test_sealed_json_of_a_run(whole_runs, command, name, damage):
    with new_case("forged") as case:
        kind = "finished" if name == "result.json" else "unfinished"
        shutil.copytree(whole_runs.folder / kind, case.here / "runs")
        run = case.here / "runs" / whole_runs.name
        values = mutate(run / name, damage, make_beside(case.folder / "beside"))
        if name == "config.json":
            _seal_config(run, values)
        elif isinstance(values, dict):
            values.pop("sha256", None)
            write_sealed(run / name, values)
        _use(case, command, run)


def _seal_config(run: Path, values: Any) -> None:
    """The identity of another config, if it is one."""
    identity = json.loads((run / "identity.json").read_text())
    try:
        digest = Config.from_json(values, "it").digest(identity["fingerprint"])
    except BadInput:
        return
    (run / "identity.json").write_text(json.dumps(identity | {"digest": digest}))


def _use(case: Any, command: str, run: Path) -> None:
    if command == "list":
        case.longlens("list", "runs")
    elif command == "evaluate":
        case.longlens("evaluate", run)
        case.longlens("evaluate", run, "--checkpoint", "2")
    elif command == "train":
        case.longlens("train", TASK, *RUN, "--folder", run)
    else:
        with mock.patch("longlens.training.many.launch", run_here):
            case.longlens("compare", TASK, *RUN, "--mixers", "las", "--seeds", "0", "1", may_fail=True)


def forge(tensors: dict[str, torch.Tensor], how: str, at: int) -> dict[str, torch.Tensor]:
    """Other tensors."""
    name = sorted(tensors)[at % len(tensors)]
    tensor = tensors[name]
    found = dict(tensors)
    if how == "missing":
        del found[name]
    elif how == "none":
        found = {}
    elif how == "more":
        found[f"{name}.more"] = tensor.clone()
    elif how == "another name":
        found["[/red]" * (at % 3)] = found.pop(name)
    elif how == "another shape":
        found[name] = torch.zeros([(), (0,), (1,), (2, 3), (*tensor.shape, 1)][at % 5])
    elif how == "another type":
        found[name] = tensor.to([torch.int64, torch.float16, torch.float64, torch.bool, torch.bfloat16][at % 5])
    else:
        found[name] = torch.full_like(tensor, [float("nan"), float("inf"), -1e30, 0.0][at % 4])
    return found


FORGERIES = ("missing", "none", "more", "another name", "another shape", "another type", "not finite")


@pytest.mark.parametrize("command", ["evaluate", "train"])
@fuzz(60, name=st.sampled_from(["model", "optimizer"]), how=st.sampled_from(FORGERIES), at=PLACES)
def test_tensors_of_a_checkpoint(whole_runs, command, name, how, at):
    with new_case("forged") as case:
        shutil.copytree(whole_runs.folder / "unfinished", case.here / "runs")
        run = case.here / "runs" / whole_runs.name
        path = run / "checkpoints" / "00000002" / f"{name}.safetensors"
        save_file(forge(load_file(path), how, at), path)
        sums = {file: hashlib.sha256((path.parent / file).read_bytes()).hexdigest() for file in TENSORS}
        (path.parent / "SHA256SUMS").write_text("".join(f"{total}  {file}\n" for file, total in sums.items()))
        _use(case, command, run)


TENSORS = ("model.safetensors", "optimizer.safetensors")


def seal_set(folder: Path, values: dict[str, Any]) -> None:
    """meta.json with these values and the checksums of the files that are there."""
    try:
        for name, facts in values["files"].items():
            facts["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        write_sealed(folder / "meta.json", {key: value for key, value in values.items() if key != "sha256"})
    except (KeyError, TypeError, AttributeError, OSError, ValueError):  # what cannot be sealed is refused
        (folder / "meta.json").write_text(json.dumps(values))


@pytest.mark.parametrize("task", ["files", "listops", "text8"])
@pytest.mark.parametrize("command", ["list", "verify", "show", "train"])
@fuzz(30, damage=mutations)
def test_what_a_set_says_of_itself(whole_sets, task, command, damage):
    with new_case("forged") as case:
        shutil.copytree(whole_sets.home, case.home, dirs_exist_ok=True)
        folder = case.home / "sets" / whole_sets.names[task]
        seal_set(folder, mutate(folder / "meta.json", damage, make_beside(case.folder / "beside")))
        _use_set(whole_sets, case, task, command)


def _use_set(whole_sets: WholeSets, case: Any, task: str, command: str) -> None:
    if command in ("list", "verify"):
        case.longlens("data", command, may_fail=command == "verify")
    elif command == "show":
        for split in ("train", "test"):
            case.longlens("data", "show", task, *whole_sets.flags[task], "--split", split)
    else:
        case.longlens("train", task, *whole_sets.flags[task], *ONE_STEP, "run")
