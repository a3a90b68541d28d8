"""The bigram model against a naive count."""

import math
from collections import Counter

from longlens.data.bigram import bigram_bits
from longlens.tasks.base import create_task


def test_bits_of_a_bigram_model_equal_a_naive_count(tmp_path):
    text = b"the cat sat on the mat and the rat sat on the cat " * 400
    (tmp_path / "text8").write_bytes(text)
    task = create_task("text8", stand_in=True, max_length=31)
    task.prepare(tmp_path)
    tokens = {name: task.split(name).tokens.tolist() for name in ("train", "test")}
    pairs = Counter(zip(tokens["train"], tokens["train"][1:], strict=False))
    befores = Counter(tokens["train"][:-1])
    bits = [
        -math.log2((pairs[before, after] + 1) / (befores[before] + 27))
        for before, after in zip(tokens["test"], tokens["test"][1:], strict=False)
    ]
    train, test = (task.split(name) for name in ("train", "test"))
    assert math.isclose(bigram_bits(train, test, 27), sum(bits) / len(bits), rel_tol=1e-12)
    assert bigram_bits(train, test, 2000) is None
