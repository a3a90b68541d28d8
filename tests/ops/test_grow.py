"""Tokens behind tokens: what ``torch.cat`` gives, whoever goes on from what, and mostly without a copy."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from longlens.ops import grow as module
from longlens.ops.grow import grow


def tokens(count, start=0):
    """(2, 3, count, 4), all numbers different."""
    return torch.arange(24.0 * count).view(2, 3, count, 4) + 1000 * start


@torch.no_grad()
def test_it_is_cat_and_copies_rarely():
    found, places = tokens(1), set()
    for step in range(1, 100):
        expected = torch.cat([found, tokens(1, step)], dim=-2)
        found = grow(found, tokens(1, step))
        assert torch.equal(found, expected)
        places.add(found.data_ptr())
    assert len(places) <= 6, "a new place whenever the length has doubled, at most"


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3])
def test_two_that_go_on_from_the_same_do_not_meet(count):
    past = grow(tokens(5), tokens(1, 1))
    before = past.clone()
    first, second = grow(past, tokens(count, 2)), grow(past, tokens(count, 3))
    assert first.data_ptr() == past.data_ptr() != second.data_ptr()
    assert torch.equal(past, before)
    assert torch.equal(first, torch.cat([before, tokens(count, 2)], dim=-2))
    assert torch.equal(second, torch.cat([before, tokens(count, 3)], dim=-2))


def test_two_threads_do_not_take_the_same_room(monkeypatch):
    """Both look whether it is free before either takes it, if they can."""
    both, is_free = threading.Barrier(2), module._is_free

    def look(*given):
        free = is_free(*given)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return free

    with torch.no_grad():
        past = grow(tokens(5), tokens(1, 1))
    monkeypatch.setattr(module, "_is_free", look)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(torch.no_grad()(grow), (past, past), (tokens(1, 2), tokens(1, 3))))
    for number, grown in enumerate(found, start=2):
        assert torch.equal(grown, torch.cat([past, tokens(1, number)], dim=-2))


@torch.no_grad()
@pytest.mark.parametrize(
    "part",
    [
        lambda past: past[..., 2:, :],
        lambda past: past[..., :4, :],
        lambda past: past[:1],
        lambda past: past[..., :2],
        lambda past: past.transpose(0, 1)[:2, :2],
        lambda past: past.unsqueeze(0),
        copy.deepcopy,
    ],
)
def test_a_part_of_what_was_there_is_another_beginning(part):
    past = grow(tokens(5), tokens(1, 1))
    before, some = past.clone(), part(past)
    new = torch.ones_like(some[..., :2, :])
    expected = torch.cat([some, new], dim=-2)
    assert torch.equal(grow(some, new), expected)
    assert torch.equal(past, before)
    assert torch.equal(grow(past, tokens(1, 2)), torch.cat([before, tokens(1, 2)], dim=-2))


@torch.no_grad()
def test_what_does_not_fit_is_as_with_cat():
    past = grow(tokens(5), tokens(1, 1))
    assert grow(past, tokens(1).double()).dtype == torch.float64
    for new in (tokens(1)[:1], tokens(1)[..., :2]):  # neither is repeated
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            grow(past, new)


def test_gradients_pass():
    leaf = tokens(3).requires_grad_()
    found = grow(grow(leaf, 2 * leaf), leaf)
    found.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 4))


def test_inference_mode():
    with torch.inference_mode():
        assert torch.equal(grow(grow(tokens(2), tokens(1)), tokens(1)), torch.cat([tokens(2), *[tokens(1)] * 2], -2))
