"""A checkpoint that is not as it was written is reported, and the one before it is used."""

import json
import shutil

import pytest

from longlens.training import checkpoint

pytestmark = pytest.mark.faults


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = {
    "a bit of the weights": lambda folder: flip(folder / "model.safetensors"),
    "a bit of the moments": lambda folder: flip(folder / "optimizer.safetensors"),
    "a bit of the state": lambda folder: flip(folder / "state.json"),
    "a bit of the checksums": lambda folder: flip(folder / "SHA256SUMS"),
    "the end of the weights": lambda folder: truncate(folder / "model.safetensors"),
    "the moments": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "the checksums": lambda folder: (folder / "SHA256SUMS").unlink(),
    "all files": empty,
}


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(runs, compare, damage):
    folder = runs.unfinished("run", 12)
    DAMAGES[damage](folder / "checkpoints" / "00000012")
    damaged = _files(folder / "checkpoints" / "00000012")
    run = runs.train("run", "--keep", "100")
    assert run.code == 0
    assert f"checkpoint {folder / 'checkpoints' / '00000012'} is damaged" in run.said
    assert "and kept as 00000012.damaged: the one before it is used" in run.said
    assert run.said.count("is damaged") == 1
    assert _files(folder / "checkpoints" / "00000012.damaged") == damaged, "it is put aside as it was"
    for step in run.checkpoints():  # the damaged one was made again
        checkpoint.read(folder / "checkpoints" / f"{step:08d}")
    compare.same(folder, runs.undisturbed("--keep", "100"))


def test_a_run_without_a_whole_checkpoint_starts_again_and_says_so(runs, compare):
    folder = runs.unfinished("run", 6)
    for path in (folder / "checkpoints").iterdir():
        truncate(path / "model.safetensors")
    run = runs.train("run", "--keep", "100")
    assert run.code == 0
    assert run.said.count("is damaged (model.safetensors is not as it was written)") == 2
    assert "all checkpoints are damaged: starting from step 0" in run.said
    compare.same(folder, runs.undisturbed("--keep", "100"))
    assert run.checkpoints() == [3, 6, 8, 9, 12, 15, 16, 18, 21, 24]


def test_what_a_killed_writer_left_is_not_taken_for_a_checkpoint_and_goes_away(runs, compare):
    folder = runs.unfinished("run", 12)
    half = folder / "checkpoints" / "00000013.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    run = runs.train("run", "--keep", "100")
    assert run.code == 0
    assert "damaged" not in run.said
    assert not half.exists()
    compare.same(folder, runs.undisturbed("--keep", "100"))


@pytest.mark.parametrize("rest", ['{"split": "train", "st', '{"split": "train"}\n', "\xff\xfe\n", "\n", "[1]\n"])
def test_a_torn_last_line_of_the_metrics_is_made_again(runs, compare, rest):
    folder = runs.unfinished("run", 12)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 12]
    (folder / "metrics.jsonl").write_text("".join(kept) + rest, encoding="latin-1")
    run = runs.train("run", "--keep", "100")
    assert run.code == 0, run.said
    compare.same(folder, runs.undisturbed("--keep", "100"))


def test_a_damaged_best_checkpoint_is_reported_and_the_last_model_is_tested(runs, compare):
    flags = ["--lr", "3", "--steps", "18", "--keep", "1"]  # the first evaluation stays the best
    whole = runs.undisturbed(*flags)
    best = compare.result(whole)["best_step"]
    assert best < 18
    folder = runs.folder / "run"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    truncate(folder / "checkpoints" / f"{best:08d}" / "model.safetensors")
    run = runs.train("run", *flags)
    assert run.code == 0, run.said
    assert "is damaged" in run.said
    assert "only the last model is tested" in run.said
    result = compare.result(folder)
    assert result.pop("test") is None
    assert result.items() <= compare.result(whole).items()


def test_a_damaged_result_says_what_to_do(runs):
    folder = runs.unfinished("run", 12)
    (folder / "result.json").write_text('{"test": ')
    run = runs.train("run")
    assert run.code == 2
    assert "result.json cannot be read as JSON" in run.said
    assert "delete it and run the same command again, which repeats the end of the run only" in run.said
    assert "Traceback" not in run.said
