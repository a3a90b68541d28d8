"""The Reformer's attention against reformer-pytorch.

The package chunks all rounds in a row and lets the first chunk look back to the last. Within buckets this changes
nothing, as no bucket is in both. Its causal form sees the same tokens as ours as long as no bucket has more of them
than a chunk; in larger ones, what it sees depends on later tokens. It divides scores by √d, unlike its authors' code:
here d is 4, and it gets queries that are twice as large.
"""

import pytest
import torch

from longlens import create_mixer
from longlens.ops.lsh import lsh_attention, lsh_buckets

package = pytest.importorskip(
    "reformer_pytorch.reformer_pytorch", reason="the oracle 'reformer-pytorch' is not installed"
)

LENGTH, SIZE, ROUNDS = 48, 6, 3


def inputs():
    return tuple(torch.randn(2, LENGTH, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))


def compare(oracle, qk, value, buckets, *, atol, tokens=slice(None), **options):
    """Outputs and gradients, (batch, length, d) there, with one head here."""
    expected = oracle(2 * qk, value)[0][:, tokens]
    actual = lsh_attention(qk[:, None], value[:, None], buckets, size=SIZE, **options)[:, 0, tokens]
    weight = torch.randn_like(expected)
    results = [(y, *torch.autograd.grad((y * weight).sum(), (qk, value))) for y in (actual, expected)]
    torch.testing.assert_close(*results, rtol=0, atol=atol)


def with_rotations(monkeypatch, rotations):
    """The package draws its own: (1, d, rounds, buckets / 2)."""
    monkeypatch.setattr(package.torch, "randn", lambda *_, **__: rotations.transpose(0, 1)[None])


@pytest.mark.parametrize("distinct", [False, True])
def test_several_buckets_and_rounds(distinct, monkeypatch):
    qk, value = inputs()
    rotations = torch.randn(ROUNDS, 4, LENGTH // SIZE // 2, dtype=torch.float64)
    oracle = package.LSHAttention(
        bucket_size=SIZE, n_hashes=ROUNDS, attend_across_buckets=False, allow_duplicate_attention=not distinct
    )
    with_rotations(monkeypatch, rotations)
    # The package takes the logarithm of a count + 1e-9.
    atol = 1e-7 if distinct else 1e-12
    compare(oracle, qk, value, lsh_buckets(qk[:, None], rotations), distinct=distinct, atol=atol)


def test_all_tokens_of_two_chunks(monkeypatch):
    """Those of the first chunk aside, which looks back to the last one there."""
    qk, value = (x[:1].detach().requires_grad_() for x in inputs())
    rotations = torch.randn(1, 4, LENGTH // SIZE // 2, dtype=torch.float64)
    buckets = lsh_buckets(qk[:, None], rotations)
    tokens = torch.argsort(buckets[0, 0, 0], stable=True)[SIZE:]
    oracle = package.LSHAttention(bucket_size=SIZE, n_hashes=1)
    with_rotations(monkeypatch, rotations)
    compare(oracle, qk, value, buckets, across_buckets=True, atol=1e-12, tokens=tokens)


@pytest.mark.parametrize("distinct", [False, True])
def test_causal_with_buckets_that_are_not_larger_than_a_chunk(distinct, monkeypatch):
    qk, value = inputs()
    number = LENGTH // SIZE
    buckets = (torch.rand(2, ROUNDS, LENGTH).argsort(dim=-1) % number)[:, None]
    oracle = package.LSHAttention(
        bucket_size=SIZE,
        n_hashes=ROUNDS,
        causal=True,
        attend_across_buckets=False,
        allow_duplicate_attention=not distinct,
    )
    numbered = (buckets[:, 0] + number * torch.arange(ROUNDS)[:, None]).flatten(1)  # no two rounds share a bucket
    monkeypatch.setattr(oracle, "hash_vectors", lambda *_, **__: numbered)
    compare(oracle, qk, value, buckets, is_causal=True, distinct=distinct, atol=1e-7 if distinct else 1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_the_whole_layer_when_one_bucket_covers_the_sequence(causal):
    oracle = package.LSHSelfAttention(dim=16, heads=4, bucket_size=23, causal=causal).double()
    layer = create_mixer(
        "reformer", 16, heads=4, bucket_size=23, max_length=23, bidirectional=not causal, dtype=torch.float64
    )
    with torch.no_grad():
        layer.in_proj.weight.copy_(torch.cat([oracle.toqk.weight / 2, oracle.tov.weight]))
        layer.out_proj.load_state_dict(oracle.to_out.state_dict())
    x = torch.randn(2, 23, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    here = [x, layer.in_proj.weight, *layer.out_proj.parameters()]
    there = [x, oracle.toqk.weight, oracle.tov.weight, *oracle.to_out.parameters()]
    actual, expected = layer(x), oracle(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad((expected * weight).sum(), there)
    expected_gradients = (gradients[0], torch.cat([2 * gradients[1], gradients[2]]), *gradients[3:])
    actual_gradients = torch.autograd.grad((actual * weight).sum(), here)
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=0, atol=1e-11)
