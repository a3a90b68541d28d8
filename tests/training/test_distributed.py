"""Two processes train as one: DDP and FSDP, started as torchrun does and by torchrun itself."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from support.runs import SLOWLY

pytestmark = pytest.mark.distributed

SMALL = ["--steps", "18", "--evaluate-every", "9", "--checkpoint-every", "9"]
# 33 samples in batches of 16: the last one leaves a process without samples. 17 samples to evaluate do, too.
UNEVEN = [*SMALL, "--task.sizes", "33", "17", "17"]
# A bias before batch norm has no gradient but rounding, which Adam enlarges: running means lag behind it by steps of
# lr.
BATCH_NORM = ["--norm", "batch", "--lr", "1e-4"]

SUBSETS = "--schedule plateau --patience 0 --valid-samples 5 --test-samples 7 --evaluate-every 4".split()

CASES = {
    "layer norm, clipping": [*UNEVEN, "--clip", "0.1"],
    "batch norm, clipping": [*UNEVEN, *BATCH_NORM, "--clip", "0.1"],
    "layer norm, accumulation": [*UNEVEN, "--clip", "None", "--accumulate", "2", "--weight-decay", "0.1"],
    # Batch norm sees each micro-batch by itself, which must have the same samples in any number of processes.
    "batch norm, accumulation": [*UNEVEN, *BATCH_NORM, "--accumulate", "3"],
    "plateau, subsets": [*UNEVEN, *SUBSETS],
}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(runs, compare, case, parallel):
    run = runs.train("run", *CASES[case], "--parallel", parallel, processes=2)
    assert run.code == 0, run.said
    compare.close(run.folder, runs.undisturbed(*CASES[case]))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_padded_samples_weighted_classes_and_batch_norm_in_two_processes(runs, compare, parallel):
    flags = ["--recipe", "smoke", *BATCH_NORM, "--steps", "12", "--evaluate-every", "6", "--log-every", "3"]
    flags += ["--class-weights", "balanced"]
    flags += ["--task.sizes", "65", "33", "33", "--batch-size", "16"]
    run = runs.train("run", *flags, "--parallel", parallel, task="listops", processes=2)
    assert run.code == 0, run.said
    compare.close(run.folder, runs.undisturbed(*flags, task="listops"))


@pytest.fixture
def language(tmp_path) -> list[str]:
    """The flags of a tied language model with a window that is short."""
    recipe = tmp_path / "language.toml"
    recipe.write_text(
        "[model]\ndepth = 2\nwidth = 16\ntied = true\n[mixer]\nheads = 2\n"
        "[training]\nbatch_size = 6\nsteps = 12\nlr = 0.001\nevaluate_every = 6\nclip = 1.0\n"
    )
    return ["--recipe", str(recipe), "--log-every", "3", "--checkpoint-every", "5", "--keep", "9"]


def test_a_tied_language_model_in_two_processes(runs, compare, language):
    alone = runs.train("alone", *language, task="tiny-language")
    assert alone.code == 0, alone.said
    tensors = compare.tensors(alone.folder)
    assert (tensors["model embedding.values.weight"] == tensors["model head.linear.weight"]).all()
    for parallel in ("ddp", "fsdp"):
        run = runs.train(parallel, *language, "--parallel", parallel, task="tiny-language", processes=2)
        assert run.code == 0, run.said
        compare.close(run.folder, alone.folder)
    # It resumes from a checkpoint, in two processes and in one.
    for name, options in (("fsdp", {"processes": 2}), ("ddp", {})):
        _as_killed_at(runs.folder / name, 10)
        run = runs.train(name, *language, "--parallel", name, task="tiny-language", **options)
        assert run.code == 0, run.said
        compare.close(run.folder, alone.folder)


def _as_killed_at(folder: Path, step: int) -> None:
    (folder / "result.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > step:
            path.rename(path.with_name(f"{path.name}.gone"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_checkpoint_belongs_to_no_number_of_processes(runs, compare, parallel):
    flags = [*UNEVEN, *BATCH_NORM, "--checkpoint-every", "4", "--parallel", parallel]
    whole = runs.undisturbed("--keep", "100", *flags)
    folder = runs.unfinished("run", 8, *flags)  # in the midst of an epoch
    flags += ["--keep", "100"]
    run = runs.train("run", *flags, processes=2)
    assert run.code == 0, run.said
    assert "resuming in another environment (processes 1, now 2)" in run.said
    assert run.said.count("another environment") == 1, "only the first process speaks"
    compare.close(folder, whole)
    _as_killed_at(folder, 16)
    run = runs.train("run", *flags)
    assert run.code == 0, run.said
    assert "(processes 2, now 1)" in run.said
    compare.close(folder, whole)


def test_a_signal_to_one_process_stops_all_and_they_resume_bit_by_bit(runs, compare):
    flags = ["--steps", "40", "--dropout", "0.1", "--checkpoint-every", "1000", "--evaluate-every", "1000"]
    whole = runs.undisturbed(*flags, processes=2)
    run = runs.start("run", *flags, processes=2, setup=SLOWLY)
    run.wait_for(lambda: (run.folder / "metrics.jsonl").exists() and (run.folder / "metrics.jsonl").stat().st_size)
    run.signal(signal.SIGTERM, process=1)
    run.wait()
    assert [process.exitcode for process in run.processes] == [75, 75], run.said
    assert len(run.checkpoints()) == 1
    assert runs.train("run", *flags, processes=2).code == 0
    compare.same(run.folder, whole)


def test_torchrun_restarts_after_a_killed_process_and_ends_bit_by_bit(runs, compare):
    flags = ["--steps", "60", "--dropout", "0.1"]
    folder = runs.folder / "run"
    agent = runs.torchrun(folder, *flags, options="--standalone --max-restarts 2")
    try:
        victim = _worker(agent.pid, rank=1)
        _until(lambda: (folder / "checkpoints").exists() and any((folder / "checkpoints").glob("[0-9]*[0-9]")))
        os.kill(victim, signal.SIGKILL)
        assert agent.wait(300) == 0, Path(f"{folder}.said").read_text()
    finally:
        agent.terminate()
        agent.wait(60)
    compare.same(folder, runs.undisturbed(*flags, processes=2))


def _worker(agent: int, rank: int) -> int:
    """The process of a rank, when it is there."""
    children, found = Path(f"/proc/{agent}/task/{agent}/children"), []
    if not children.exists():
        pytest.skip("needs /proc to find the process of a rank")

    def look() -> bool:
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
        return bool(found)

    _until(look)
    return found[0]


def _until(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_two_agents_of_torchrun_train_as_one_process(runs, compare, free_port):
    folder = runs.folder / "run"
    options = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:{free_port}"
    agents = [runs.torchrun(folder, *UNEVEN, options=options) for _ in range(2)]
    try:
        assert [agent.wait(300) for agent in agents] == [0, 0], Path(f"{folder}.said").read_text()
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(60)
    assert Path(f"{folder}.said").read_text().count("run folder:") == 1
    compare.close(folder, runs.undisturbed(*UNEVEN))
