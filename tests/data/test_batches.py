"""Batches: every sample once, in an order that seed and epoch fix, from any batch on, for any number of processes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longlens.data.datasets import Batches, Images, Sequences, Subset, Windows, offsets_of
from longlens.tasks.base import create_task


def ragged(lengths, **options):
    """Sequences of these lengths, sample i being i·1000 + 1, i·1000 + 2, …"""
    lengths = np.array(lengths)
    values = np.concatenate([1000 * i + np.arange(1, n + 1) for i, n in enumerate(lengths)] + [np.empty(0, int)])
    return Sequences(values, offsets_of(lengths), np.arange(len(lengths)), **options)


def indices(batches):
    return [batch.indices.tolist() for batch in batches]


SPLIT = ragged([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])


@given(
    count=st.integers(0, 40),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
    group=st.booleans(),
)
def test_every_sample_belongs_to_one_process_once(count, batch_size, world_size, shuffle, group):
    split = ragged([1 + i % 7 for i in range(count)])
    options = {"shuffle": shuffle, "group_by_length": group, "seed": 3}
    ranks = [
        list(Batches(split, batch_size, rank=rank, world_size=world_size, **options)) for rank in range(world_size)
    ]
    assert sorted(i for batches in ranks for batch in batches for i in batch.indices.tolist()) == list(range(count))
    assert len({len(batches) for batches in ranks}) == 1  # all make the same number of steps
    for whole, *parts in zip(Batches(split, batch_size, **options), *ranks, strict=True):
        assert sorted(i for part in parts for i in part.indices.tolist()) == sorted(whole.indices.tolist())
        assert {part.total for part in parts} == {len(whole)} == {whole.total}


@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    world_size=st.integers(1, 6),
    parts=st.integers(1, 6),
    group=st.booleans(),
)
def test_micro_batches_do_not_depend_on_the_number_of_processes(count, batch_size, world_size, parts, group):
    split = ragged([1 + i % 7 for i in range(count)])
    options = {"shuffle": True, "group_by_length": group, "seed": 3}
    ranks = [Batches(split, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for whole, *others in zip(Batches(split, batch_size, **options), *ranks, strict=True):
        sizes = [len(batch) for batch in others]
        assert max(sizes) - min(sizes) <= 1
        for part in range(parts):
            expected = whole.indices[part::parts].tolist()  # as with one process
            assert whole.part(part, parts).indices.tolist() == expected
            pieces = [batch.part(part, parts) for batch in others]
            assert [index for piece in pieces for index in piece.indices.tolist()] == expected
            lengths = [len(piece) for piece in pieces]
            assert max(lengths) - min(lengths) <= 1 + (max(sizes) > min(sizes))  # nobody waits for long
            for piece in pieces:
                assert piece.total == whole.total
                assert torch.equal(piece.targets, piece.indices)


def test_padding_like_and_the_way_to_a_device(monkeypatch):
    batch = next(iter(Batches(SPLIT, 3)))
    nothing = batch.padding_like()
    assert (len(nothing), nothing.tokens, nothing.inputs.shape) == (1, 0, (1, 4))
    assert nothing.total == batch.total
    moved = batch.to("cpu", non_blocking=True)
    assert torch.equal(moved.inputs, batch.inputs)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    assert batch.pin().offset == batch.offset
    assert len(pinned) == 4


def test_an_empty_part_of_pairs_or_of_a_text():
    pairs = Sequences(np.arange(10), offsets_of(np.array([1, 2, 3, 4])), np.array([0, 1]), pairs=True)
    for split, shape in ((pairs, (0, 2, 1)), (Windows(np.arange(9), 4), (0, 1)), (SPLIT, (0, 1))):
        last = list(Batches(split, 2, rank=4, world_size=5))[-1]
        assert last.inputs.shape == shape
        assert last.mask.shape == shape
        assert len(last) == len(last.targets) == 0


def test_the_total_of_a_text_counts_tokens():
    batches = list(Batches(Windows(np.arange(12), 4), 2))
    assert [batch.total for batch in batches] == [8, 3]


@pytest.mark.parametrize("group", [False, True])
def test_the_order_is_fixed_by_seed_and_epoch(group):
    def order(seed, epoch):
        return indices(Batches(SPLIT, 2, shuffle=True, seed=seed, epoch=epoch, group_by_length=group))

    assert order(0, 0) == order(0, 0)
    assert len({str(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert indices(Batches(SPLIT, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_it_goes_on_at_any_batch():
    whole = list(Batches(SPLIT, 2, shuffle=True, seed=1, epoch=5))
    for start in range(len(whole) + 1):
        rest = Batches(SPLIT, 2, shuffle=True, seed=1, epoch=5, start=start)
        assert len(rest) == len(whole) - start
        for batch, expected in zip(rest, whole[start:], strict=True):
            assert torch.equal(batch.inputs, expected.inputs)
            assert torch.equal(batch.indices, expected.indices)


def test_samples_are_padded_on_the_right():
    batch = next(iter(Batches(SPLIT, 3)))
    assert batch.inputs.tolist() == [[1, 2, 3, 0], [1001, 0, 0, 0], [2001, 2002, 2003, 2004]]
    assert batch.lengths.tolist() == [3, 1, 4]
    assert batch.targets.tolist() == [0, 1, 2]
    assert batch.mask.tolist() == [[True] * 3 + [False], [True] + [False] * 3, [True] * 4]
    assert batch.to("cpu").inputs.dtype == torch.int64


def test_long_samples_are_cut_and_end_with_their_end():
    split = ragged([3, 6], max_length=4, end=7)
    samples = split.take(np.array([0, 1]))
    assert samples.inputs.tolist() == [[1, 2, 3, 7], [1001, 1002, 1003, 7]]
    assert split.lengths.tolist() == [4, 4]
    samples = ragged([3, 6], max_length=4).take(np.array([1, 0]))
    assert samples.inputs.tolist() == [[1001, 1002, 1003, 1004], [1, 2, 3, 0]]


def test_grouping_saves_padding():
    lengths = np.random.default_rng(0).integers(1, 1000, 3000).tolist()

    def padding(**options):
        return sum((~batch.mask).sum().item() for batch in Batches(ragged(lengths), 16, shuffle=True, **options))

    assert padding(group_by_length=True) < 0.1 * padding()


def test_pairs_come_together():
    split = Sequences(np.arange(1, 11), offsets_of(np.array([1, 2, 3, 4])), np.array([0, 1]), pairs=True)
    assert len(split) == 2
    assert split.lengths.tolist() == [2, 4]
    batch = next(iter(Batches(split, 2)))
    assert batch.inputs.tolist() == [[[1, 0, 0, 0], [2, 3, 0, 0]], [[4, 5, 6, 0], [7, 8, 9, 10]]]
    assert batch.lengths.tolist() == [[1, 2], [3, 4]]
    assert batch.mask.shape == (2, 2, 4)
    assert batch.mask.sum(dim=-1).tolist() == [[1, 2], [3, 4]]


@given(total=st.integers(2, 60), length=st.integers(1, 20))
def test_each_token_of_a_text_is_predicted_once(total, length):
    tokens = np.arange(total)
    split = Windows(tokens, length)
    samples = split.take(np.arange(len(split)))
    counted = samples.targets >= 0
    assert samples.targets[counted].tolist() == list(range(1, total))
    assert (samples.inputs[counted] == samples.targets[counted] - 1).all()
    assert counted.sum(axis=1).tolist() == samples.lengths.tolist() == split.lengths.tolist()


def test_subsets_and_images():
    images = Images(np.arange(12, dtype=np.uint8).reshape(4, 3), np.arange(4), lambda x: x[..., None] * 2.0)
    subset = Subset(images, np.array([3, 1]))
    samples = subset.take(np.array([0]))
    assert samples.inputs.tolist() == [[[18.0], [20.0], [22.0]]]
    assert samples.targets.tolist() == [3]
    assert subset.lengths.tolist() == [3, 3]
    reordered = Images(images.values, images.targets, images.transform, order=np.array([2, 0, 1]))
    assert reordered.take(np.array([0])).inputs.ravel().tolist() == [4.0, 0.0, 2.0]
    smaller = Images(np.arange(64, dtype=np.uint8).reshape(4, 16), np.arange(4), images.transform, shrink=2)
    assert smaller.take(np.array([0])).inputs.ravel().tolist() == [5.0, 9.0, 21.0, 25.0]
    assert smaller.take(np.array([], dtype=np.int64)).inputs.shape == (0, 4, 1), (
        "as a batch of validation samples may be"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"start": 7}, "start must be from 0 to 6, the batches of this epoch, got 7"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        Batches(SPLIT, **{"batch_size": 2} | options)


def test_a_task_knows_its_splits_and_epochs():
    task = create_task("atomic-cumsum", max_length=4, sizes=(6, 2, 2))
    with pytest.raises(ValueError, match="split must be one of train, valid, test, got dev"):
        task.batches("dev", 2)
    with pytest.raises(ValueError, match="split must be one of"):
        task.split("validation")
    first, again, second = (next(iter(task.batches("train", 6, epoch=epoch))).inputs for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
