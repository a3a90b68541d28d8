"""The atomic tasks equal a naive loop."""

import hashlib

import numpy as np
import pytest

from longlens.errors import BadInput
from longlens.tasks.base import create_task

NAMES = ["atomic-cumsum", "atomic-cummax", "atomic-select"]


def samples(name, indices=(0, 1, 2), split="train", epoch=0, **options):
    return create_task(name, **{"max_length": 37} | options).split(split, epoch).take(np.array(indices))


def test_running_sums():
    inputs, _, targets = samples("atomic-cumsum")
    for row, target in zip(inputs[:, :, 0].tolist(), targets, strict=True):
        total, expected = 0.0, []
        for position, value in enumerate(row, start=1):
            total += value
            expected.append(total / position**0.5)
        np.testing.assert_allclose(target, expected, atol=1e-6)


def test_running_maxima():
    inputs, _, targets = samples("atomic-cummax")
    for row, target in zip(inputs[:, :, 0].tolist(), targets.tolist(), strict=True):
        assert target == [max(row[: i + 1]) for i in range(len(row))]


def test_selected_values():
    inputs, lengths, targets = samples("atomic-select", marked=5)
    assert lengths.tolist() == [37 + 10] * 3
    for (values, mark), target in zip(inputs[:, :, :2].transpose(0, 2, 1).tolist(), targets.tolist(), strict=True):
        assert target == [value for value, marked in zip(values, mark, strict=True) if marked == 1]
        assert sum(mark) == 5
        assert set(mark) == {0, 1}
        assert mark[-5:] == values[-5:] == [0] * 5


def test_marks_are_anywhere():
    marks = samples("atomic-select", range(2000), marked=5)[0][:, :42, 1].mean(axis=0)
    np.testing.assert_allclose(marks, 5 / 42, atol=0.04)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_normal_and_scaled_and_positions_on_a_circle(name):
    inputs = samples(name, range(500), max_length=64)[0]
    values = inputs[:, :64, 0]
    np.testing.assert_allclose(np.abs(inputs[:, :, 0]).max(axis=1), 1)
    assert values.mean() == pytest.approx(0, abs=0.01)
    unscaled = values / values.std(axis=1, keepdims=True)
    assert (unscaled**4).mean() == pytest.approx(3, abs=0.3)
    length = inputs.shape[1]
    for position in (0, 1, length // 3, length - 1):
        angle = 2 * np.pi * position / length
        np.testing.assert_allclose(inputs[0, position, -2:], [np.cos(angle), np.sin(angle)], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_of_the_paper(name):
    task = create_task(name)
    assert [len(task.split(split)) for split in ("train", "valid", "test")] == [16_000, 2_000, 2_000]
    assert task.spec.metric == "r2"
    assert (task.spec.max_length, task.spec.size, task.spec.positions) == (
        (576, 4, 32) if name == "atomic-select" else (512, 3, 512)
    )


@pytest.mark.parametrize("name", NAMES)
def test_samples_depend_on_seed_split_epoch_and_index_alone(name):
    def digest(**options):
        return hashlib.sha256(samples(name, [7], **options).inputs.tobytes()).hexdigest()

    alone, together = samples(name, [7]), samples(name, [3, 7, 1])
    assert (alone.inputs[0] == together.inputs[1]).all()
    keys = [{}, {"seed": 1}, {"epoch": 1}, {"split": "valid"}, {"split": "test"}]
    assert len({digest(**key) for key in keys}) == len(keys)
    assert digest(split="valid", epoch=3) == digest(split="valid")  # only training has new samples in each epoch


def test_the_bytes_are_fixed():
    """A promise: the same seed gives the same bytes on any machine, with any version."""
    digest = hashlib.sha256(b"".join(part.tobytes() for name in NAMES for part in samples(name))).hexdigest()
    assert digest == "597f3513208a75a35ab2519a438376b7df89a4257129af9536ee594a342e7d74"


def test_impossible_options():
    for length in (0, 2**24 + 1, 2**63):
        with pytest.raises(BadInput, match="max_length must be a whole number from 1 to 16,777,216, got"):
            create_task("atomic-cumsum", max_length=length)
    with pytest.raises(BadInput, match="sizes must be 3 values, each a whole number of at least 1, got"):
        create_task("atomic-cumsum", sizes=(1, 2, 0))
    with pytest.raises(BadInput, match="marked must be a whole number"):
        create_task("atomic-select", marked=0)
    with pytest.raises(ValueError, match="nothing to import"):
        create_task("atomic-select").prepare("somewhere")


def test_the_old_name_of_the_length():
    assert create_task("atomic-select", length=40) == create_task("atomic-select", max_length=40)
    with pytest.raises(
        BadInput, match="task 'atomic-select' needs 'max_length' once, got it and its old name 'length'"
    ):
        create_task("atomic-select", length=40, max_length=40)


def test_no_samples():
    assert samples("atomic-select", np.empty(0, int)).inputs.shape == (0, 37 + 64, 4)
