"""Attention within the buckets of a hash: against all pairs of tokens, and against loops over tokens."""

import pytest
import torch
import torch.nn.functional as F

from longlens.ops import lsh
from longlens.ops.lsh import lsh_attention, lsh_attention_reference, lsh_buckets

KINDS = [
    {},
    {"is_causal": True},
    {"across_buckets": True},
    {"distinct": True},
    {"distinct": True, "is_causal": True},
    {"distinct": True, "across_buckets": True},
]


def vectors(length, requires_grad=True):
    return (torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=requires_grad) for _ in range(2))


def random_buckets(length, rounds=3, buckets=4):
    return torch.randint(buckets, (2, 3, rounds, length))


def test_buckets_are_the_largest_of_both_signs():
    x, rotations = torch.randn(2, 3, 7, 4), torch.randn(5, 4, 3)
    buckets = lsh_buckets(x, rotations)
    assert buckets.shape == (2, 3, 5, 7)
    for r in range(5):
        for t in range(7):
            turned = torch.cat([x[1, 2, t] @ rotations[r], -x[1, 2, t] @ rotations[r]])
            assert buckets[1, 2, r, t] == turned.argmax()
    assert not lsh_buckets(x, torch.empty(5, 4, 0)).any()


def test_buckets_of_two_hashes_are_all_pairs_of_theirs():
    x, first, second = torch.randn(2, 3, 200, 4), torch.randn(5, 4, 2), torch.randn(5, 4, 3)
    buckets = lsh_buckets(x, torch.cat([first, second], dim=2), (4, 6))
    assert torch.equal(buckets, 6 * lsh_buckets(x, first) + lsh_buckets(x, second))
    assert set(buckets.unique().tolist()) <= set(range(24))


def seen_by(buckets, size, is_causal=False, across_buckets=False, tokens=None):
    """The set of tokens that each sees in a round: one sequence, with lists and sets."""
    length = len(buckets)
    tokens = range(length) if tokens is None else tokens
    order = sorted(tokens, key=lambda t: (buckets[t], t))
    seen = []
    for t in range(length):
        if t not in tokens:
            seen.append(set())
            continue
        mates = [u for u in tokens if buckets[u] == buckets[t]]
        if is_causal:
            seen.append(set([u for u in mates if u < t][-size:]))
            continue
        chunk = order.index(t) // size
        near = set(order[max(chunk - 1, 0) * size : (chunk + 1) * size]) - {t}
        seen.append(near if across_buckets else near & set(mates))
    return seen


@pytest.mark.parametrize("options", KINDS[:3])
def test_the_formula_token_by_token(options):
    qk, value = vectors(11, requires_grad=False)
    buckets, tokens = random_buckets(11, rounds=2, buckets=3), [0, 1, 2, 4, 5, 6, 8, 9]
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[:, tokens] = True
    expected = torch.zeros_like(value)
    for b in range(2):
        for h in range(3):
            rounds = [seen_by(buckets[b, h, r].tolist(), 3, **options, tokens=tokens) for r in range(2)]
            for t in tokens:
                scores = [qk[b, h, t] @ qk[b, h, u] / qk[b, h, u].norm() for seen in rounds for u in seen[t]]
                values = [value[b, h, u] for seen in rounds for u in seen[t]]
                if not scores:
                    scores, values = [torch.zeros((), dtype=torch.float64)], [value[b, h, t]]
                expected[b, h, t] = torch.stack(scores).softmax(dim=0) @ torch.stack(values)
    for attention in (lsh_attention, lsh_attention_reference):
        actual = attention(qk, value, buckets, size=3, mask=mask, **options)
        torch.testing.assert_close(actual[:, :, tokens], expected[:, :, tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "chunks"), [(1, 1), (6, 1), (23, 1), (67, 5), (67, 100)])
@pytest.mark.parametrize("options", KINDS)
def test_outputs_and_gradients_are_those_of_all_pairs(options, length, chunks, masked, monkeypatch):
    """With all chunks at once, or a few after the other."""
    monkeypatch.setattr(lsh, "_PAIRS", {"cpu": 2 * 3 * 6 * 12 * chunks})
    qk, value = vectors(length)
    buckets, mask = random_buckets(length), None
    weight = torch.randn(2, 3, length, 4, dtype=torch.float64)
    if masked:
        mask = torch.rand(2, length) < 0.7
        weight *= mask[:, None, :, None]
    results = []
    for attention in (lsh_attention, lsh_attention_reference):
        y = attention(qk, value, buckets, size=6, mask=mask, **options) * (weight != 0)
        results.append((y, *torch.autograd.grad((y * weight).sum(), (qk, value))))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_one_bucket_in_one_chunk_is_attention_to_all_others():
    qk, value = vectors(9, requires_grad=False)
    key = F.normalize(qk, dim=-1)
    for is_causal in (False, True):
        seen = ~torch.eye(9, dtype=torch.bool)
        if is_causal:
            seen = seen.tril()
            seen[0, 0] = True  # the first has nobody else
        expected = F.scaled_dot_product_attention(qk, key, value, attn_mask=seen, scale=1.0)
        actual = lsh_attention(qk, value, torch.zeros(2, 3, 4, 9, dtype=torch.int64), size=9, is_causal=is_causal)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", KINDS[:3])
def test_distinct_rounds_are_one_softmax_over_all_that_is_seen(options):
    qk, value = vectors(31, requires_grad=False)
    buckets = random_buckets(31)
    seen = torch.zeros(2, 3, 31, 31, dtype=torch.bool)
    for b in range(2):
        for h in range(3):
            for r in range(3):
                for t, others in enumerate(seen_by(buckets[b, h, r].tolist(), 5, **options)):
                    seen[b, h, t, list(others)] = True
    alone = ~seen.any(dim=-1, keepdim=True) & torch.eye(31, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(qk, F.normalize(qk, dim=-1), value, attn_mask=seen | alone, scale=1.0)
    actual = lsh_attention(qk, value, buckets, size=5, distinct=True, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    repeated = lsh_attention(qk, value, buckets, size=5, **options)
    assert (repeated - expected).abs().max() > 1e-3, "several rounds count more otherwise"


@pytest.mark.parametrize("distinct", [False, True])
def test_later_tokens_and_their_buckets_do_not_reach_earlier_ones(distinct):
    qk, value = vectors(40, requires_grad=False)
    buckets = random_buckets(40, buckets=3)
    before = lsh_attention(qk, value, buckets, size=4, is_causal=True, distinct=distinct)
    for t in range(1, 40, 3):
        changed = [x.clone() for x in (qk, value, buckets)]
        changed[0][:, :, t:].normal_()
        changed[1][:, :, t:].normal_()
        changed[2][..., t:] = torch.randint(5, changed[2][..., t:].shape)
        after = lsh_attention(*changed, size=4, is_causal=True, distinct=distinct)
        torch.testing.assert_close(after[:, :, :t], before[:, :, :t], rtol=0, atol=1e-13)


def test_dropout_has_the_gradient_of_what_it_kept():
    qk, value = vectors(7)
    buckets = random_buckets(7, rounds=2, buckets=2)
    buckets[..., 3] = 2  # alone in both rounds, and dropped in one of them perhaps

    def dropped(qk, value):
        torch.manual_seed(3)
        return lsh_attention(qk, value, buckets, size=3, dropout_p=0.4)

    assert torch.autograd.gradcheck(dropped, (qk, value), fast_mode=True)
    assert not torch.equal(dropped(qk, value), lsh_attention(qk, value, buckets, size=3))
    assert not lsh_attention(qk, value, buckets, size=3, dropout_p=1.0).any()


def test_dropout_keeps_the_mean():
    qk, value = (torch.randn(1, 1, 7, 4).expand(800, 3, 7, 4) for _ in range(2))
    buckets = torch.zeros(800, 3, 1, 7, dtype=torch.int64)
    mean = lsh_attention(qk, value, buckets, size=4, dropout_p=0.3).mean(dim=(0, 1))
    torch.testing.assert_close(mean, lsh_attention(qk, value, buckets, size=4)[0, 0], rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    qk, value = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(2))
    buckets = random_buckets(40)
    actual = lsh_attention(qk.to(dtype), value.to(dtype), buckets, size=8)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), lsh_attention(qk, value, buckets, size=8), rtol=0, atol=0.05)
    for gradient in torch.autograd.grad(actual.sum(), (qk, value)):
        assert gradient.isfinite().all()


def test_large_scores_are_no_trouble():
    qk, value = vectors(20)
    y = lsh_attention(1e4 * qk, value, random_buckets(20), size=4)
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), (qk, value)))


def test_errors():
    qk, value = vectors(5)
    for attention in (lsh_attention, lsh_attention_reference):
        with pytest.raises(ValueError, match="across_buckets cannot be causal: later tokens decide"):
            attention(qk, value, random_buckets(5), size=2, is_causal=True, across_buckets=True)
    assert lsh_attention(qk, value, random_buckets(5), size=2).isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (0, 3, 5, 4)], ids=str)
def test_nothing(shape, kind):
    qk, value = (torch.randn(shape, requires_grad=True) for _ in range(2))
    y = lsh_attention(qk, value, lsh_buckets(qk, torch.randn(2, 4, 3)), size=2, **kind)
    assert y.shape == shape
    y.sum().backward()
    assert value.grad is not None
