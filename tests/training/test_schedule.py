"""The learning rate against torch's own schedules."""

import random

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR

from longlens.errors import BadInput
from longlens.training.config import TrainingConfig
from longlens.training.step import Schedule


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize(("steps", "warmup", "rising"), [(50, 0.2, 10), (47, 0.1, 5), (10, 0.0, 0)])
def test_cosine_with_warm_up_is_that_of_torch(steps, warmup, rising):
    schedule = Schedule(TrainingConfig(steps=steps, warmup=warmup), steps, higher_is_better=True)
    optimizer = sgd()
    cosine = CosineAnnealingLR(optimizer, T_max=steps - rising)
    if rising:
        linear = LinearLR(optimizer, start_factor=1 / rising, total_iters=rising - 1)
        cosine = SequentialLR(optimizer, [linear, cosine], milestones=[rising])
    for step in range(steps):
        assert schedule.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        cosine.step()
    assert schedule.factor(steps) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_is_that_of_torch_also_if_it_resumes_from_its_state(higher, patience):
    config = TrainingConfig(steps=1000, schedule="plateau", patience=patience, factor=0.5)
    schedule = Schedule(config, 1000, higher)
    optimizer = sgd()
    plateau = ReduceLROnPlateau(optimizer, "max" if higher else "min", factor=0.5, patience=patience, eps=0)
    numbers = random.Random(0)
    for step in range(60):
        metric = numbers.choice([0.5, 0.50001, numbers.uniform(-1, 1), 0.3])
        schedule.update(metric)
        plateau.step(metric)
        assert schedule.factor(step) == optimizer.param_groups[0]["lr"]
        state, schedule = schedule.state(), Schedule(config, 1000, higher)
        schedule.load(state)
    assert schedule.factor(60) < 0.1


@pytest.mark.parametrize("wrong", [{}, {"level": "x", "best": None, "waited": 0}, {"level": 1.0, "best": 1.0}])
def test_a_state_that_is_none_is_a_sentence(wrong):
    schedule = Schedule(TrainingConfig(steps=10), 10, higher_is_better=True)
    with pytest.raises(BadInput, match="the state of a schedule must have the numbers level, best, waited"):
        schedule.load(wrong)


def test_constant_stays():
    schedule = Schedule(TrainingConfig(steps=10, schedule="constant"), 10, higher_is_better=True)
    for step in range(10):
        schedule.update(-step)
        assert schedule.factor(step) == 1
