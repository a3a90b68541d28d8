"""A run from its command to its result."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from longlens.errors import BadInput, Interrupted
from longlens.tasks.atomic import AtomicSplit
from longlens.tasks.base import Task
from longlens.training import loop, machine, open_run
from longlens.training.config import Runtime, load_recipe
from longlens.training.open_run import Clock, TrainState
from longlens.training.run import fingerprint

EVERYTHING = (
    "--dropout 0.2 --norm batch --schedule plateau --patience 0 --accumulate 2 --clip 0.5 --weight-decay 0.1 "
    "--positions learned --ffn glu --depth 2 --precision bfloat16"
).split()


@pytest.mark.parametrize("flags", [[], EVERYTHING], ids=["plain", "everything"])
def test_the_same_command_gives_the_same_bits_and_another_seed_others(runs, compare, flags):
    whole = runs.undisturbed(*flags)
    again = runs.train("again", *flags)
    assert again.code == 0, again.said
    compare.same(again.folder, whole)
    other = runs.train("other", *flags, "--seed", "1")
    assert compare.lines(other.folder)[0]["loss"] != compare.lines(whole)[0]["loss"]


def test_every_step_draws_its_own_random_numbers_and_every_epoch_its_samples(tmp_path, monkeypatch):
    seeds, inputs = [], []

    def remembering(model, spec, optimizer, batch, *rest):
        seeds.append(torch.initial_seed())
        inputs.append(round(batch.inputs.sum().item(), 3))
        return train_step(model, spec, optimizer, batch, *rest)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", remembering)
    changes = {"task.max_length": 8, "task.sizes": (9, 9, 9), "steps": 5}
    for seed in (0, 1):
        recipe = load_recipe("smoke", "atomic-cumsum", ["las"])
        config = recipe.resolve("atomic-cumsum", "las", {**changes, "training.seed": seed})
        loop.train_run(config, Runtime(folder=tmp_path / str(seed)))
    assert len(set(seeds)) == 10
    assert len(set(inputs)) == 5, "a batch an epoch, the same ones for another seed of the weights"


@pytest.mark.parametrize(
    ("split", "values", "place"),
    [
        ("train", "inputs", "the inputs of step 2 of training on atomic-cumsum"),
        ("train", "targets", "the targets of step 2 of training on atomic-cumsum"),
        ("valid", "inputs", "the inputs of the validation set of atomic-cumsum"),
    ],
)
def test_data_that_is_not_finite_is_named_instead_of_the_learning_rate(tmp_path, monkeypatch, split, values, place):
    """Also where it is in a sample that was not looked at when the split was loaded."""
    take, key = AtomicSplit.take, (split, 1 if split == "train" else 0)  # in the second epoch of training

    def damaged(self, indices):
        samples = take(self, indices)
        getattr(samples, values)[indices == 1] += torch.nan if self.key == key else 0
        return samples

    monkeypatch.setattr(AtomicSplit, "take", damaged)
    changes = {"task.max_length": 8, "task.sizes": (150, 150, 9), "batch_size": 150, "steps": 3}
    config = load_recipe("smoke", "atomic-cumsum", ["las"]).resolve("atomic-cumsum", "las", changes)
    with pytest.raises(
        BadInput, match=rf"{place} .* must be finite numbers, got nan: correct or leave out such samples"
    ):
        loop.train_run(config, Runtime(folder=tmp_path / "run"))


def test_a_run_has_its_lines_at_the_steps_that_were_asked_for(runs, compare):
    folder = runs.undisturbed("--steps", "11", "--evaluate-every", "5", "--log-every", "4")
    found = [(line["split"], line["step"]) for line in compare.lines(folder)]
    assert found == [("train", 4), ("valid", 5), ("train", 8), ("valid", 10), ("train", 11), ("valid", 11)]
    each = compare.lines(runs.undisturbed("--steps", "11", "--evaluate-every", "5", "--log-every", "1"))
    losses = [line["loss"] for line in each if line["split"] == "train"]
    means = [line["loss"] for line in compare.lines(folder) if line["split"] == "train"]
    assert means == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:8]) / 4, sum(losses[8:]) / 3], rel=1e-12)
    assert compare.result(folder)["steps"] == 11


def test_epochs_are_passes_over_the_training_set(runs, compare):
    result = compare.result(runs.undisturbed("--steps", "None", "--epochs", "2"))
    assert result["steps"] == 8  # of 4 batches an epoch
    assert result["tokens"] == 2 * 56 * 16
    assert compare.result(runs.undisturbed("--steps", "None", "--epochs", "1.3"))["steps"] == 6


def test_the_folder_is_named_by_the_config_and_nothing_else(runs):
    runtime = ["--checkpoint-every", "7", "--keep", "9", "--log-every", "1"]
    arguments = ["train", "atomic-cumsum", "--recipe", "smoke", "--task.max-length", "8", "--task.sizes", "9", "9", "9"]
    arguments += ["--runs", runs.folder / "runs", "--steps", "1", "--threads", "1"]
    for more in ([], runtime, ["--lr", "1e-5"]):
        run = runs.command(runs.folder / "run", *arguments, *more).wait()
        assert run.code == 0, run.said
    assert len(list((runs.folder / "runs" / "atomic-cumsum" / "las").iterdir())) == 2


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_result(runs, compare):
    """With the backend that only traces, as a real one takes its time."""
    setup = "import torch; torch._dynamo.config.recompile_limit = 64\n" + (
        "real = torch.nn.Module.compile\n"
        "def traced(self, *args, **kwargs):\n"
        "    print('compiled', flush=True)\n"
        "    real(self, *args, backend='eager', **kwargs)\n"
        "torch.nn.Module.compile = traced"
    )
    flags = ["--steps", "6", "--evaluate-every", "3"]
    run = runs.train("run", *flags, "--compile", setup=setup)
    assert run.code == 0, run.said
    assert "compiled" in run.printed
    assert "longlens: compiling the model: the first steps" in run.said
    compare.close(run.folder, runs.undisturbed(*flags))


@pytest.mark.slow
def test_tensorboard_has_the_scalars_of_the_metrics(runs, compare):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = runs.unfinished("run", 12, "--tensorboard")
    run = runs.train("run", "--tensorboard", "--keep", "100")
    assert run.code == 0, run.said
    events = loading.EventAccumulator(str(folder / "tensorboard")).Reload()
    names = {"train/loss", "train/lr", "train/tokens_per_second", "valid/loss", "valid/r2"}
    assert set(events.Tags()["scalars"]) == names
    for split in ("train", "valid"):
        wanted = {line["step"]: line["loss"] for line in compare.lines(folder) if line["split"] == split}
        found = [(event.step, event.value) for event in events.Scalars(f"{split}/loss")]
        assert [step for step, _ in found] == list(wanted), "each step once, though the run was killed"
        assert [value for _, value in found] == pytest.approx(list(wanted.values()))


def test_weights_and_biases_that_are_not_installed_are_a_sentence(runs):
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    run = runs.train("run", "--wandb", "project")
    assert run.code == 2
    assert "longlens: wandb is not installed: pip install 'longlens[wandb]'" in run.said
    assert "Traceback" not in run.said


def test_weights_and_biases_know_a_run_by_its_config(tiny, monkeypatch):
    """Not by the last name of its folder, which others may have as well."""
    started = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **options: started.append(options["id"]) or Mock()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name, seed in (("a", 0), ("b", 1)):
        tiny.unfinished(f"{name}/run", 2, {"steps": 4, "training.seed": seed}, wandb="project", checkpoint_every=2)
        tiny.train(f"{name}/run", {"steps": 4, "training.seed": seed}, wandb="project")
    assert started[0] == started[1] != started[2] == started[3]


@pytest.mark.slow
def test_a_real_command_line_trains_evaluates_and_lists(runs):
    def longlens(*arguments):
        command = [sys.executable, "-m", "longlens", *map(str, arguments)]
        environment = os.environ | runs.environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout

    folder = runs.folder / "runs"
    assert "r2" in longlens("train", "atomic-cumsum", "--recipe", "smoke", "--steps", "3", "--runs", folder)
    (result,) = folder.glob("*/*/*/result.json")
    test = json.loads(result.read_text())["test"]
    assert f"r2 {test:.4f}" in longlens("evaluate", result.parent)


LAYER = """
from torch import nn
from longlens.mixers.registry import register

@register("mine", summary="a layer of one's own")
class Layer(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()

    def forward(self, x, *, mask=None):
        {body}
"""


@pytest.mark.slow
def test_a_layer_of_ones_own_that_changed_is_another_run_and_its_bugs_are_shown(runs):
    file = runs.folder / "random.py"  # named as a module of Python's own
    flags = ["--recipe", "smoke", "--mixer", "mine", "--steps", "2", "--runs", runs.folder / "runs"]
    for body, code in (("return x", 0), ("return 2 * x", 0), ("return x", 0), ("raise TypeError('my bug')", 1)):
        file.write_text(LAYER.format(body=body))
        run = runs.command(runs.folder, "train", "atomic-cumsum", *flags, LONGLENS_IMPORT=str(file)).wait()
        assert run.code == code, run.said
    assert "Traceback" in run.said
    assert "my bug" in run.said
    assert len(list(runs.folder.glob("runs/atomic-cumsum/mine/*/result.json"))) == 2


@pytest.mark.slow
def test_a_run_on_other_data_is_refused(runs, tmp_path):
    """Also where the folder was named by hand."""
    for shift in (0, 1):
        rows = [f"{i % 2},{(i + shift) % 2} {i} 3" for i in range(40)]
        (tmp_path / "train.csv").write_text("\n".join(["label,input", *rows]))
        flags = ["train", "files", "--recipe", "smoke", "--task.path", tmp_path, "--steps", "2"]
        run = runs.command(runs.folder / "run", *flags, "--folder", runs.folder / "run").wait()
        assert run.code == (2 if shift else 0), run.said
    assert "belongs to other data" in run.said


@pytest.mark.slow
def test_the_data_is_looked_at_once_in_a_run(tiny, monkeypatch):
    config = tiny.config()
    real, looked, made = type(config.task).fingerprint, [], []
    monkeypatch.setattr(type(config.task), "fingerprint", lambda self: looked.append(self) or real(self))
    monkeypatch.setattr(Task, "__post_init__", made.append)
    loop.train_run(config, Runtime(folder=tiny.folder / "run", threads=1))
    assert len(looked) == 1
    assert not made, "and the task is not made again"
    loop.train_run(config, Runtime(folder=tiny.folder / "known", threads=1), fingerprint(config))
    assert len(looked) == 2, "whoever knows it already passes it on"


def test_a_batch_of_more_than_all_samples_is_told(tiny, capfd):
    tiny.train("run", {"batch_size": 57, "steps": 2})
    said = capfd.readouterr().err
    assert "longlens: a step has all 56 training samples, as batch_size is 57" in said
    tiny.train("other", {"batch_size": 56, "steps": 2})
    assert "batch_size" not in capfd.readouterr().err


def test_a_run_changes_no_setting_of_the_process(tiny):
    def settings():
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore
            torch.get_float32_matmul_precision(),
            *map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)),
        )

    before = settings()
    tiny.train("run", {"steps": 2}, threads=2 if before[0] == 1 else 1)
    assert settings() == before


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_are_those_that_were_asked_for(deterministic, tf32, device):
    before = torch.get_float32_matmul_precision()
    with machine.choose_kernels(Runtime(deterministic=deterministic, tf32=tf32), torch.device(device)):
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        on_gpu = "high" if tf32 else "highest"
        assert torch.get_float32_matmul_precision() == (on_gpu if device == "cuda" else before)


def test_the_run_uses_the_threads_and_kernels_that_were_asked_for(tiny, monkeypatch):
    seen = []

    def looking(*args):
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return train_step(*args)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", looking)
    tiny.train("run", {"steps": 1}, threads=2, deterministic=False)
    tiny.train("other", {"steps": 1}, threads=1)
    assert seen == [(2, False), (1, True)]


def test_time_is_counted_by_what_it_was_spent_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("longlens.training.open_run.time.perf_counter", lambda: now[0])
    state = TrainState(seconds=7.0, training_seconds=5.0, computing_seconds=4.0, tokens=50)
    clock = Clock(state, began=98.0)  # building the model
    for _ in range(2):
        now[0] += 1.0  # a batch is loaded
        with clock.computing():
            now[0] += 3.0
        state.tokens += 20
        with clock.not_training():
            now[0] += 10.0  # an evaluation
    assert (state.seconds, state.training_seconds, state.computing_seconds) == (7 + 2 + 28, 5 + 8, 4 + 6)
    assert clock.tokens_per_second() == 40 / 8
    assert clock.tokens_per_second() == 0


@pytest.mark.slow
def test_a_keyboard_interrupt_that_is_no_signal_ends_as_interrupted_and_the_run_resumes(tiny, compare, monkeypatch):
    """As notebooks and other threads send it."""
    whole = tiny.train("whole")

    def interrupted(*args):
        if len(calls) == 10:
            raise KeyboardInterrupt
        calls.append(1)
        return train_step(*args)

    calls, train_step = [], loop.train_step
    monkeypatch.setattr(loop, "train_step", interrupted)
    with pytest.raises(Interrupted, match="stopped at once: what came after the last checkpoint is not saved"):
        tiny.train("run")
    monkeypatch.setattr(loop, "train_step", train_step)
    compare.same(tiny.train("run"), whole)


@pytest.mark.slow
def test_a_run_in_another_thread_than_the_main_one(tiny, compare):
    whole = tiny.train("whole")
    with ThreadPoolExecutor(1) as pool:
        folder = pool.submit(tiny.train, "run").result()
    compare.same(folder, whole)


def test_a_signal_before_the_first_step_is_interrupted_and_leaves_nothing(tiny, monkeypatch):
    def asked(config):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(open_run, "find_fingerprint", asked)
    with pytest.raises(Interrupted, match="stopped before the first step"):
        tiny.train("run")
    assert not (tiny.folder / "run").exists()
