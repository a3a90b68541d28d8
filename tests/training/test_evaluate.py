"""Evaluation: each sample once, subsets, and the command."""

import json

import numpy as np
import pytest
import torch

from longlens import load_run
from longlens.data.codec import Codec
from longlens.data.datasets import Stream, Windows
from longlens.errors import BadInput, Interrupted
from longlens.models.model import create_model, sample_scores
from longlens.tasks.base import Spec, create_task
from longlens.training import loop, open_run, step
from longlens.training.config import TrainingConfig
from longlens.training.evaluate import change_by_later_tokens, evaluate_run, load_model
from longlens.training.logs import StopSignals
from longlens.training.machine import Processes
from longlens.training.predict import predict
from longlens.training.step import evaluate

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture
def listops(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path))
    return create_task("listops", sizes=(8, 31, 4), min_length=4, max_length=32, max_depth=3, max_args=4)


def one_by_one(model, task, indices):
    """The accuracy and the loss of some validation samples."""
    split, hits, losses = task.split("valid"), [], []
    for index in indices:
        sample = split.take(np.array([index]))
        with torch.no_grad():
            outputs = model(torch.from_numpy(sample.inputs))
        targets = torch.from_numpy(sample.targets)
        hits.append((outputs.argmax(-1) == targets).float().item())
        losses.append(torch.nn.functional.cross_entropy(outputs, targets).item())
    return np.mean(hits), np.mean(losses)


@pytest.mark.parametrize("batch_size", [1, 4, 31, 50])
def test_every_sample_counts_once(listops, batch_size):
    model = create_model(listops, "las", depth=1, width=16, heads=2, norm="batch", dropout=0.5)
    found = evaluate(model, listops, "valid", TrainingConfig(steps=1, batch_size=batch_size), ALONE)
    assert model.training, "it is left as it was"
    assert found[:2] == pytest.approx(one_by_one(model.eval(), listops, range(31)), rel=1e-5)


@pytest.mark.parametrize("samples", [None, 7])
def test_each_sample_has_its_score(listops, samples):
    """In the order of the split, however the batches are sorted."""
    model = create_model(listops, "las", depth=1, width=16, heads=2).eval()
    options = TrainingConfig(steps=1, batch_size=4, group_by_length=True)
    found = evaluate(model, listops, "valid", options, ALONE, samples=samples, with_scores=True)
    rows = range(31) if samples is None else sorted(Stream("evaluated").permutation(31)[:7].tolist())
    assert found.scores.tolist() == [one_by_one(model, listops, [row])[0] for row in rows]
    assert found.scores.mean().item() == pytest.approx(found.metric)


def test_scores_of_numbers_and_languages_are_losses():
    outputs, targets = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(sample_scores("r2", outputs, targets), (outputs - targets).square().mean(dim=1))
    assert torch.equal(sample_scores("r2", outputs[:, 0], targets[:, 0]), (outputs - targets)[:, 0].square())
    logits, tokens = torch.randn(2, 4, 7), torch.tensor([[1, 2, 3, -100], [4, -100, -100, -100]])
    losses = [-logits[0].log_softmax(-1)[range(3), [1, 2, 3]].mean(), -logits[1, 0].log_softmax(-1)[4]]
    torch.testing.assert_close(sample_scores("bits_per_byte", logits, tokens), torch.stack(losses))


def test_some_samples_are_the_same_ones_each_time(listops):
    model = create_model(listops, "las", depth=1, width=16, heads=2).eval()
    options = TrainingConfig(steps=1, batch_size=4)
    found = evaluate(model, listops, "valid", options, ALONE, samples=6)
    drawn = Stream("evaluated").permutation(31)[:6]
    assert found[:2] == pytest.approx(one_by_one(model, listops, drawn.tolist()), rel=1e-5)
    assert not model.training
    everything = evaluate(model, listops, "valid", options, ALONE)
    assert evaluate(model, listops, "valid", options, ALONE, samples=100) == everything


@pytest.mark.parametrize(("batch_size", "accumulate", "largest"), [(8, 1, 8), (8, 4, 2), (8, 3, 3), (8, 8, 1)])
def test_batches_are_as_large_as_the_micro_batches_of_training(listops, monkeypatch, batch_size, accumulate, largest):
    """Logits of a whole batch of a large vocabulary are larger than all that training ever needs."""
    sizes = []

    def remembering(model, batch, *rest):
        sizes.append(len(batch))
        return forward(model, batch, *rest)

    forward = step.forward
    monkeypatch.setattr(step, "forward", remembering)
    model = create_model(listops, "las", depth=1, width=16, heads=2)
    options = TrainingConfig(steps=1, batch_size=batch_size, accumulate=accumulate)
    found = evaluate(model, listops, "valid", options, ALONE)
    assert (max(sizes), sum(sizes)) == (largest, 31)
    assert found[:2] == pytest.approx(one_by_one(model.eval(), listops, range(31)), rel=1e-5)


LANGUAGE = Spec("tokens", 7, 12, "language", 7, "bits_per_byte")


class TinyLanguage:
    """Enough of a task for an evaluation."""

    name, spec = "tiny", LANGUAGE

    def split(self, name, epoch=0):
        return Windows(Stream("tiny", name).raw(100).astype(np.int64) % 7, 12)


def test_a_language_has_one_cross_entropy_and_its_loss_is_the_metric(monkeypatch):
    model, task, calls = create_model(LANGUAGE, "las", depth=1, width=16, heads=2), TinyLanguage(), []
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda *args, **options: calls.append(1) or real(*args, **options)
    )
    metric, loss, _ = evaluate(model, task, "valid", TrainingConfig(steps=1, batch_size=4), ALONE)  # pyright: ignore
    assert len(calls) == 3  # batches: 9 windows
    assert metric == pytest.approx(loss / np.log(2), rel=1e-12)
    with torch.no_grad():
        windows = task.split("valid").take(np.arange(9))
        logits = model.eval()(torch.from_numpy(windows.inputs))
    wanted = real(logits.flatten(0, 1), torch.from_numpy(windows.targets).flatten(), ignore_index=-100)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)


def test_nobody_waits_for_the_device_before_the_end(listops, monkeypatch):
    """A GPU would have to be waited for at each number that is looked at."""
    looked = []
    for name in ("item", "tolist", "cpu"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, name=name, real=real: looked.append(name) or real(x))
    model = create_model(listops, "las", depth=1, width=16, heads=2)
    looked.clear()
    evaluate(model, listops, "valid", TrainingConfig(steps=1, batch_size=2), ALONE)
    assert len(looked) <= 2, looked


def test_later_tokens_change_what_a_layer_says_that_looks_ahead():
    model, task = create_model(LANGUAGE, "las", depth=1, width=16, heads=2), TinyLanguage()
    assert change_by_later_tokens(model, task) == 0  # pyright: ignore
    model.blocks[0].mixer.forward = lambda x, mask=None: x.mean(1, keepdim=True).expand_as(x)
    assert change_by_later_tokens(model, task) > 1e-3  # pyright: ignore
    assert model.training, "it is left as it was"


def test_a_run_is_evaluated_in_python(tiny, compare):
    folder = tiny.train("run", {"lr": 3.0, "steps": 18}, keep=1)
    result = compare.result(folder)
    assert result["best_step"] < 18
    found = evaluate_run(folder)
    assert (found.split, found.samples, found.step, found.metric) == ("test", 16, result["best_step"], "r2")
    assert found.value == result["test"]
    assert found.config == tiny.config({"lr": 3.0, "steps": 18})
    assert (found.bigram, found.change_by_later_tokens) == (None, None)
    assert evaluate_run(folder, "test", "last").value == result["test_last"]
    assert evaluate_run(folder, "valid", "18").value == result["valid_last"]
    assert evaluate_run(folder, "valid", 18).value == result["valid_last"]
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    evaluate_run(folder)
    assert torch.equal(torch.rand(3), wanted), "the caller's random numbers go on"
    for split, checkpoint, said in (
        ("tets", "best", "split must be one of train, valid, test, got tets"),
        ("test", "7", f"checkpoint must be one of best, last, {result['best_step']}, 18, got 7"),
    ):
        with pytest.raises(BadInput, match=said):
            evaluate_run(folder, split, checkpoint)  # pyright: ignore[reportArgumentType]


def test_the_best_of_a_run_whose_evaluation_was_made_after_a_stop_is_that_evaluation(tiny, monkeypatch):
    """The checkpoint of the step was written before it."""
    real, asked = StopSignals.__enter__, []

    def enter(self):
        asked.append(self)
        return real(self)

    monkeypatch.setattr(StopSignals, "__enter__", enter)

    def stop_then_evaluate(*args, **options):
        asked[-1].asked = True
        return evaluate(*args, **options)

    monkeypatch.setattr(open_run, "evaluate", stop_then_evaluate)
    with pytest.raises(Interrupted, match="stopped during an evaluation, and saved"):
        tiny.train("run", {"steps": 8}, checkpoint_every=100)
    folder = tiny.folder / "run"
    with pytest.raises(BadInput, match="was not evaluated yet: choose the checkpoint last"):
        evaluate_run(folder)
    monkeypatch.setattr(open_run, "evaluate", evaluate)

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    monkeypatch.setattr(loop, "finish", kill)
    with pytest.raises(Killed):
        tiny.train("run", {"steps": 8}, checkpoint_every=100)
    assert evaluate_run(folder).step == 8


def test_predictions_are_those_of_the_model(tiny):
    folder = tiny.train("run")
    model = load_model(folder)
    assert not model.training
    sequences = [np.random.default_rng(0).normal(size=(16, 3)) for _ in range(5)]
    run = load_run(folder)
    found = run.predict(sequences, batch_size=2, encoded=True)
    assert found.shape == (5, 16)
    with torch.no_grad():
        wanted = model(torch.tensor(np.stack(sequences), dtype=torch.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(BadInput, match="probabilities must be False"):
        run.predict(sequences, probabilities=True, encoded=True)
    with pytest.raises(BadInput, match="inputs must be a list of sequences, got one text: put it into a list"):
        run.predict("abc")
    assert run.model(device="auto").training is False
    if not torch.cuda.is_available():
        with pytest.raises(BadInput, match="device must be cpu or auto here, got cuda"):
            run.model(device="cuda")
    for wrong in ("abc", [[1, 2], [3, 4]], [], np.full((16, 3), np.nan)):
        with pytest.raises(BadInput, match=r"inputs\[0\] must be"):
            run.predict([wrong], encoded=True)


def test_predictions_of_classes_pairs_and_languages():
    tokens = [[1, 2, 3], [4, 5, 6, 1, 2], [3]]
    for head, rows in (("classify", tokens), ("language", tokens), ("match", [(tokens[0], tokens[1])] * 3)):
        metric = "accuracy" if head != "language" else "bits_per_byte"
        model = create_model(Spec("tokens", 7, 12, head, 7, metric), "las", depth=1, width=16, heads=2).eval()
        codec = Codec.make(model.spec, {"form": "tokens"})
        chances = predict(model, rows, codec=codec, probabilities=True, batch_size=2)
        assert chances.shape == (3, 7)
        np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)
        classes = predict(model, rows, codec=codec)
        assert classes.tolist() == chances.argmax(1).tolist()
        for row, found in zip(rows, chances, strict=True):  # padding changes nothing
            (alone,) = predict(model, [row], codec=codec, probabilities=True)
            np.testing.assert_allclose(alone, found, rtol=1e-4, atol=1e-6)
    assert predict(model, [], codec=codec).shape == (0,)
    with pytest.raises(BadInput, match=r"inputs\[0\] must be a pair of sequences, got 3"):
        predict(model, [tokens], codec=codec)
    classify = create_model(Spec("tokens", 7, 12, "classify", 7, "accuracy"), "las", depth=1, width=16, heads=2)
    for wrong in ([7], [-1], [1.5], [], [[1]]):
        with pytest.raises(BadInput, match=r"inputs\[0\] must"):
            predict(classify, [wrong], codec=Codec.make(classify.spec, {"form": "tokens"}))


@pytest.mark.slow
def test_the_command_gives_the_numbers_of_the_result(runs, compare):
    """A run whose best model is not its last."""
    folder = runs.undisturbed("--lr", "3", "--steps", "18", "--keep", "1")
    result = compare.result(folder)
    assert result["best_step"] < result["steps"]
    assert result["test"] != result["test_last"]
    valid = {line["step"]: line["r2"] for line in compare.lines(folder) if line["split"] == "valid"}
    assert result["valid"] == max(valid.values()) == valid[result["best_step"]]
    assert result["valid_last"] == valid[18]
    for flags, wanted in (
        ([], f"step {result['best_step']}: r2 {result['test']:.4f}"),
        (["--checkpoint", "last"], f"step 18: r2 {result['test_last']:.4f}"),
        (["--checkpoint", str(result["best_step"]), "--split", "valid"], f"r2 {result['valid']:.4f}"),
    ):
        run = runs.command(folder, "evaluate", folder, *flags).wait()
        assert run.code == 0, run.said
        assert wanted in run.printed
        assert "(16 samples)" in run.printed
    steps = f"{result['best_step']}, 18"
    for name, said in (
        ("worst", f"checkpoint must be one of best, last, {steps}, got worst"),
        ("7", f"checkpoint must be one of best, last, {steps}, got 7"),
    ):
        run = runs.command(folder, "evaluate", folder, "--checkpoint", name).wait()
        assert run.code == 2
        assert said in run.said


@pytest.mark.slow
def test_the_command_says_what_is_missing(runs):
    folder = runs.unfinished("run", 12)
    (folder / "checkpoints" / "00000012" / "model.safetensors").write_bytes(b"")
    for name, code, said in (("last", 3, "00000012 is damaged: model.safetensors"), ("6", 0, "")):
        run = runs.command(folder, "evaluate", folder, "--checkpoint", name).wait()
        assert (run.code, said in run.said) == (code, True), run.said
    nothing = runs.unfinished("nothing", 0)
    run = runs.command(nothing, "evaluate", nothing).wait()
    assert run.code == 2
    assert f"{nothing} has no checkpoint yet" in run.said
    run = runs.command(nothing, "evaluate", runs.folder).wait()
    assert run.code == 2
    assert f"{runs.folder} is not a run: it has no config.json" in run.said


@pytest.mark.slow
def test_tests_of_a_subset_say_so(runs):
    folder = runs.undisturbed("--test-samples", "5", "--valid-samples", "3")
    assert json.loads((folder / "result.json").read_text())["test_samples"] == 5
