import hashlib
import math

import numpy as np
import pytest

from longlens.data.datasets import Stream
from longlens.tasks.atomic import _log, normal_of_bits


def test_the_bytes_are_fixed():
    """These digests are a promise: data sets made elsewhere, and by later versions, are the same."""
    stream = Stream("promise", 1)
    parts = [
        stream.raw(5),
        stream.uniform((2, 3)),
        stream.integers(10, 7),
        normal_of_bits(stream.raw(11)),
        stream.permutation(13),
    ]
    digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    assert digest == "77534e117e3c04ab0f5a18495fde3e8ef26426006c81bb2deef68267807fe28f"


def test_streams_of_different_keys_differ_and_of_equal_keys_agree():
    assert (Stream("a", 1, "train", 0).raw(4) == Stream("a", 1, "train", 0).raw(4)).all()
    keys = [("a", 1), ("a", 2), ("b", 1), ("a", 1, 0)]
    assert len({Stream(*key).raw(1).item() for key in keys}) == len(keys)


def test_uniform_integers_and_normal_have_their_moments():
    stream = Stream("moments")
    uniform = stream.uniform(100_000)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert uniform.mean() == pytest.approx(0.5, abs=0.005)
    counts = np.bincount(stream.integers(7, 70_000), minlength=7)
    assert counts.size == 7
    assert np.abs(counts - 10_000).max() < 500
    normal = normal_of_bits(stream.raw((100, 1001)))
    assert normal.shape == (100, 1001)
    assert [normal.mean(), normal.std(), (normal**3).mean(), (normal**4).mean()] == pytest.approx([0, 1, 0, 3], abs=0.1)
    assert np.mean(np.abs(normal) < 1) == pytest.approx(0.6827, abs=0.005)


def test_normal_numbers_are_the_quantiles_of_uniform_ones():
    bits = np.concatenate([Stream("quantiles").raw(1000), np.array([0, 2**64 - 1], dtype=np.uint64)])
    uniform = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52
    normal = normal_of_bits(bits)
    assert np.isfinite(normal).all()
    np.testing.assert_allclose([math.erfc(-x / math.sqrt(2)) / 2 for x in normal], uniform, rtol=1e-6, atol=1e-15)


def test_a_permutation_has_each_number_once():
    order = Stream("order").permutation(1000)
    assert (np.sort(order) == np.arange(1000)).all()
    assert (order != np.arange(1000)).any()


def test_empty_shapes():
    assert normal_of_bits(Stream("none").raw(0)).shape == (0,)
    assert Stream("none").uniform((3, 0)).shape == (3, 0)


def test_the_logarithm_is_one():
    x = np.concatenate([np.logspace(-300, 300, 10_001), np.linspace(0.5, 2, 10_001)])
    np.testing.assert_allclose(_log(x), np.log(x), rtol=4e-16, atol=4e-16)
