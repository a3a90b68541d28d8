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
        metric = numbers.choice([0.5, 0.50001, numbers.uniform(0, 1), 0.3])
        schedule.update(metric)
        plateau.step(metric)
        assert schedule.factor(step) == optimizer.param_groups[0]["lr"]
        state, schedule = schedule.state(), Schedule(config, 1000, higher)
        schedule.load(state)
    assert schedule.factor(60) < 0.1


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("metric", [0.5, 0.0, -0.5])
def test_what_stays_equal_is_a_plateau_below_0_as_well(metric, higher):
    """By torch's rule, best·(1 + 1e-4), it would be an improvement there, as an R² below 0 is at first."""
    schedule = Schedule(TrainingConfig(steps=9, schedule="plateau", patience=1, factor=0.5), 9, higher)
    for _ in range(3):
        schedule.update(metric)
    assert schedule.factor(3) == 0.5


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


def factors(steps, **options):
    schedule = Schedule(TrainingConfig(steps=steps, **options), steps, higher_is_better=True)
    return [schedule.factor(step) for step in range(steps)]


@pytest.mark.parametrize(("warmup", "rising"), [(7, 7), (0.1, 5), (0, 0), (1, 1), (1.0, 1)])
def test_linear_falls_to_0_in_even_steps_after_the_warm_up(warmup, rising):
    """A whole number of at least 1 is a number of steps, and less than 1 a fraction of them."""
    expected = [(k + 1) / rising if k < rising else (50 - k) / (50 - rising) for k in range(50)]
    assert factors(50, schedule="linear", warmup=warmup) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("warmup", "rising"), [(7, 7), (0.1, 5), (0, 1), (80, 80)])
def test_inverse_square_root(warmup, rising):
    """min(1, k/W)·√(W/max(k, W)) at the step k = 1, 2, …; with a long warm-up it only rises."""
    expected = [min(1, k / rising) * (rising / max(k, rising)) ** 0.5 for k in range(1, 51)]
    assert factors(50, schedule="inverse-sqrt", warmup=warmup) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_can_be_made_for_other_steps_than_the_run_has(schedule):
    long = factors(80, schedule=schedule, warmup=10)
    assert factors(50, schedule=schedule, warmup=10, decay_steps=80) == long[:50]
    assert factors(100, schedule=schedule, warmup=10, decay_steps=80) == pytest.approx([*long, *[0.0] * 20], abs=1e-12)


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_a_warm_up_is_a_fraction_or_a_number_of_steps(wrong):
    wanted = "warmup must be a number of at least 0 and below 1 or a whole number of at least 1, got"
    with pytest.raises(BadInput, match=wanted):
        TrainingConfig(steps=5, warmup=wrong)
