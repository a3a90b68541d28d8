"""kill -9 at any moment loses at most the steps since the last checkpoint, and changes nothing."""

import random
import time

import pytest

HARD = [
    "--dropout", "0.2", "--norm", "batch", "--accumulate", "2", "--schedule", "plateau", "--patience", "0",
    "--factor", "0.9", "--lr", "0.05", "--evaluate-every", "4",
]  # fmt: skip


@pytest.mark.parametrize("flags", [[], HARD], ids=["plain", "dropout, batch norm, plateau, accumulation"])
def test_a_run_that_is_killed_ten_times_ends_as_if_it_had_not_been(runs, compare, flags):
    flags = [*flags, "--steps", "60", "--keep", "1"]
    whole = runs.undisturbed(*flags)
    rates = {line["lr"] for line in compare.lines(whole) if line["split"] == "train"}
    assert len(rates) > 4, "the learning rate changes over the run"
    moments, folder = random.Random(0), runs.folder / "run"
    for kills in range(10):
        run = runs.start("run", *flags)
        before = run.checkpoints()
        goal = moments.choice([0, 0, 1, 2])  # checkpoints to wait for
        run.wait_for(lambda before=before, goal=goal, run=run: _newer(run.checkpoints(), before) >= goal)
        time.sleep(moments.uniform(0, 0.02) if goal else moments.uniform(0, 0.3))
        seen = run.checkpoints()
        run.kill()
        assert run.processes[0].exitcode == -9, f"it ended after {kills} kills: {run.said}"
        assert run.checkpoints()[-1:] >= seen[-1:], "a checkpoint was there and is not"
        assert "damaged" not in run.said
    assert runs.train("run", *flags).code == 0
    compare.same(folder, whole)


def _newer(now, before):
    return sum(step > max(before, default=0) for step in now)
