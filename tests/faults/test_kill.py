"""kill -9 at any moment loses at most the steps since the last checkpoint, and changes nothing."""

import pytest
from support.runs import SLOWLY

pytestmark = pytest.mark.faults

HARD = "--dropout 0.2 --norm batch --accumulate 2 --schedule plateau --patience 0 --factor 0.9 --lr 0.05".split()
HARD += ["--evaluate-every", "4"]

BEFORE_THE_FIRST = """
import time
import longlens.training.checkpoint as checkpoint
def wait(*_):
    print('writing', flush=True)
    time.sleep(60)
checkpoint.collect = wait
"""
# Stops in the midst of a write, at the files of a checkpoint one after another: a kill there leaves them torn.
SLOW_WRITES = """
import os, time
import longlens.training.checkpoint as checkpoint
def slowly(tensors, path, save=checkpoint._save):
    save(tensors, path)
    if {step} <= int(path.parent.name.partition('.')[0]) and path.name == '{file}':
        os.truncate(path, 100)
        print('writing', flush=True)
        time.sleep(60)
checkpoint._save = slowly
"""


@pytest.mark.parametrize("flags", [[], HARD], ids=["plain", "dropout, batch norm, plateau, accumulation"])
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(runs, compare, flags):
    """Before the first checkpoint, in the midst of writing one, in the midst of writing the first one after that, and
    between two checkpoints."""
    flags = [*flags, "--steps", "60", "--keep", "1"]
    whole = runs.undisturbed(*flags)
    rates = {line["lr"] for line in compare.lines(whole) if line["split"] == "train"}
    assert len(rates) > 4, "the learning rate changes over the run"

    def kill_when(condition, checkpoints, **options):
        run = runs.start("run", *flags, **options)
        run.wait_for(lambda: condition(run))
        before = run.checkpoints()
        run.kill()
        assert run.processes[0].exitcode == -9, f"it ended before: {run.said}"
        assert run.checkpoints()[-1:] >= before[-1:], "a checkpoint was there and is not"
        assert bool(run.checkpoints()) == checkpoints
        assert "damaged" not in run.said
        return run

    run = kill_when(lambda run: "writing" in run.printed, False, setup=BEFORE_THE_FIRST)
    assert (run.folder / "metrics.jsonl").stat().st_size > 0
    for step, file in ((0, "model.safetensors"), (10, "optimizer.safetensors")):
        setup = SLOW_WRITES.format(step=step, file=file)
        run = kill_when(lambda run: "writing" in run.printed, step > 0, setup=setup)
        (torn,) = (run.folder / "checkpoints").glob("*.partial")
        assert (torn / file).stat().st_size == 100
    last = run.checkpoints()[-1]
    run = kill_when(lambda run: run.checkpoints()[-1] > last, True, setup=SLOWLY)
    assert not list((run.folder / "checkpoints").glob(torn.name)), "what was torn is gone"
    assert runs.train("run", *flags).code == 0
    compare.same(runs.folder / "run", whole)
    assert not list((runs.folder / "run").rglob("*.partial"))
