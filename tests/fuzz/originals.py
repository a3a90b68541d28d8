"""Runs and prepared sets as they should be, of which each case damages a copy."""

import json
import shutil
from pathlib import Path
from unittest import mock

from fuzz.cases import call
from support.runs import checkpoints, result

TASK = "atomic-cumsum"
RUN = [
    *"--recipe smoke --task.max-length 8 --task.sizes 24 8 8 --batch-size 8 --steps 4 --evaluate-every 2".split(),
    *"--checkpoint-every 1 --keep 100 --log-every 1".split(),
]
STEPS = (1, 2, 3, 4)
HALF = 2  # the step after which the unfinished run was killed
META, RECORD = "meta.json", ".verified.json"
ONE_STEP = "--recipe smoke --steps 1 --batch-size 4 --evaluate-every 1 --threads 1 --folder".split()


class WholeRuns:
    """A finished and an unfinished run of seed 0, and beside each a finished one of seed 1, its sibling."""

    def __init__(self, folder: Path):
        self.folder = folder
        for seed in (0, 1):
            said = call(["train", TASK, *RUN, "--seed", str(seed), "--runs", str(folder / "finished")])
            assert said.code == 0, said
        seeds = {
            json.loads(path.read_text())["training"]["seed"]: path.parent.relative_to(folder / "finished")
            for path in folder.glob("finished/*/*/*/config.json")
        }
        self.name, self.sibling = seeds[0], seeds[1]
        self.finished = folder / "finished" / self.name
        shutil.copytree(folder / "finished", folder / "unfinished")
        unfinished = folder / "unfinished" / self.name
        (unfinished / "result.json").unlink()
        for step in checkpoints(unfinished):
            if step > HALF:
                shutil.rmtree(unfinished / "checkpoints" / f"{step:08d}")
        self.said = {}  # by the checkpoint that is evaluated
        for which in ("best", "last", *map(str, STEPS)):
            said = call(["evaluate", str(self.finished), "--checkpoint", which])
            assert said.code == 0, said
            self.said[which] = said.out


class WholeSets:
    """A cache folder with sets of three kinds, and what the commands say of each."""

    def __init__(self, folder: Path):
        self.home = folder / "home"
        csv = "input,label\n" + "".join(f"{'ab' * (i % 4 + 1)},{'xy'[i % 2]}\n" for i in range(24))
        (folder / "letters").mkdir()
        (folder / "letters" / "train.csv").write_text(csv)
        (folder / "text8").write_text("the quick brown fox jumps over the lazy dog " * 20)
        self.flags = {
            "files": ["--path", str(folder / "letters")],
            "listops": "--sizes 16 4 4 --min-length 4 --max-length 24 --max-depth 3 --max-args 3".split(),
            "text8": ["--stand-in", "--max-length", "16"],
        }
        self.prepare = {  # the flags with which each is made
            "files": self.flags["files"],
            "listops": [*self.flags["listops"], "--workers", "1"],
            "text8": [*self.flags["text8"], "--from", str(folder)],
        }
        self.shown, self.results = {}, {}
        with mock.patch.dict("os.environ", LONGLENS_HOME=str(self.home)):
            for task, flags in self.flags.items():
                run = folder / f"run-{task}"
                for line in (
                    ["data", "prepare", task, *self.prepare[task]],
                    ["train", task, *flags, *ONE_STEP, str(run)],
                ):
                    said = call(line)
                    assert said.code == 0, said
                self.shown[task] = call(["data", "show", task, *flags]).out
                self.results[task] = result(run)
        self.names = {task: next((self.home / "sets").glob(f"{task}-*/{META}")).parent.name for task in self.flags}
        for name in self.names.values():  # what was compared with checksums is noted sooner or later
            (self.home / "sets" / name / RECORD).write_text("{}")
        self.files = {
            task: sorted(path.name for path in (self.home / "sets" / name).iterdir())
            for task, name in self.names.items()
        }
