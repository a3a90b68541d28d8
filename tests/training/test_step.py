"""The optimizer's groups, and a step: in parts, clipped, in another precision."""

import pytest
import torch
from torch import nn

from longlens.models.model import create_model
from longlens.tasks.base import create_task
from longlens.training.config import TrainingConfig
from longlens.training.distributed import Processes
from longlens.training.optimizer import make_optimizer, set_learning_rate
from longlens.training.step import ahead, train_step

ALONE = Processes(0, 1, torch.device("cpu"))


class StateSpace(nn.Module):
    special_parameters = ("rates",)

    def __init__(self):
        super().__init__()
        self.rates, self.matrix, self.bias = (nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (4, 4), (4,)))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([StateSpace(), nn.LayerNorm(4)])


def test_matrices_decay_and_norms_biases_and_special_parameters_do_not():
    model = Whole()
    optimizer = make_optimizer(model, TrainingConfig(steps=1, lr=0.01, special_lr=0.002, weight_decay=0.1))
    found = {
        name: (group["peak"], group["weight_decay"])
        for group in optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is member for member in group["params"])
    }
    assert found == {
        "layers.0.rates": (0.002, 0.0),
        "layers.0.matrix": (0.01, 0.1),
        "layers.0.bias": (0.01, 0.0),
        "layers.1.weight": (0.01, 0.0),
        "layers.1.bias": (0.01, 0.0),
    }
    set_learning_rate(optimizer, 0.5)
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.001, 0.005, 0.005]


def test_special_parameters_never_learn_faster_than_the_others():
    optimizer = make_optimizer(Whole(), TrainingConfig(steps=1, lr=1e-4, special_lr=1e-3))
    assert {group["peak"] for group in optimizer.param_groups} == {1e-4}


def gradients(task, options, **model_options):
    """Of a step, and its loss."""
    torch.manual_seed(0)
    model = create_model(task, "las", depth=1, width=16, heads=2, **model_options)
    optimizer = make_optimizer(model, options)
    (batch, *_) = task.batches("train", options.batch_size, shuffle=True)
    loss = train_step(model, task.spec, optimizer, batch, options, ALONE)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return loss, found, model, batch


@pytest.mark.parametrize("parts", [2, 3, 5])  # 5 samples: of unequal parts, and one sample each
def test_a_batch_in_parts_has_the_same_loss_and_gradient(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path))
    task = create_task("listops", sizes=(8, 4, 4), min_length=4, max_length=32, max_depth=3, max_args=4)
    whole, wanted, *_ = gradients(task, TrainingConfig(steps=1, batch_size=5))
    loss, found, *_ = gradients(task, TrainingConfig(steps=1, batch_size=5, accumulate=parts))
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_step_is_the_mean_over_its_samples():
    task = create_task("atomic-cumsum", length=16, sizes=(8, 4, 4))
    loss, _, _, batch = gradients(task, TrainingConfig(steps=1, batch_size=5))
    torch.manual_seed(0)
    model = create_model(task, "las", depth=1, width=16, heads=2)
    torch.testing.assert_close(loss, (model(batch.inputs) - batch.targets).square().mean().detach())


def test_clipping_bounds_the_norm_and_keeps_the_direction():
    task = create_task("atomic-cumsum", length=16, sizes=(8, 4, 4))
    _, free, *_ = gradients(task, TrainingConfig(steps=1, batch_size=8))
    _, clipped, *_ = gradients(task, TrainingConfig(steps=1, batch_size=8, clip=0.01))
    norm = torch.stack([gradient.norm() for gradient in free.values()]).norm()
    assert norm > 0.01
    torch.testing.assert_close(clipped, {name: g * (0.01 / norm) for name, g in free.items()}, rtol=1e-3, atol=1e-8)


def test_bfloat16_computes_in_it_and_keeps_weights_in_float32():
    task = create_task("atomic-cumsum", length=16, sizes=(8, 4, 4))
    whole, *_ = gradients(task, TrainingConfig(steps=1, batch_size=8))
    loss, found, model, _ = gradients(task, TrainingConfig(steps=1, batch_size=8, precision="bfloat16"))
    assert loss != whole
    torch.testing.assert_close(loss, whole, rtol=0.05, atol=0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_batches_are_loaded_ahead_in_their_order_and_errors_arrive():
    def numbers():
        yield from range(5)
        raise OSError("the disk is gone")

    batches = ahead(numbers())  # pyright: ignore[reportArgumentType]
    assert [next(batches) for _ in range(5)] == list(range(5))
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
