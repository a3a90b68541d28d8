"""The Performer against performer-pytorch, with the same random features."""

import functools

import pytest
import torch

from longlens.mixers.performer import log_features, orthogonal_rows
from longlens.ops.linear_attention import kernel_attention

package = pytest.importorskip(
    "performer_pytorch.performer_pytorch", reason="the oracle 'performer-pytorch' is not installed"
)


@pytest.fixture
def exact_features(monkeypatch):
    """Without the 10⁻⁴ that the package adds to each feature of its softmax kernel."""
    monkeypatch.setattr(package, "softmax_kernel", functools.partial(package.softmax_kernel, eps=0.0))


def oracle_of(rows, **options):
    oracle = package.FastAttention(rows.shape[1], nb_features=len(rows), **options)
    oracle.projection_matrix = rows
    return oracle


def ours(query, key, value, rows, kernel="softmax", **options):
    return kernel_attention(*(log_features(x, rows, kernel) for x in (query, key)), value, **options)


def heads(length=101, size=1.0):
    return [(size * torch.randn(2, 3, length, 8, dtype=torch.float64)).requires_grad_() for _ in range(3)]


def assert_same(actual, expected, inputs, atol):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weight).sum(), inputs) for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=atol)


@pytest.mark.parametrize("length", [23, 101])
@pytest.mark.usefixtures("exact_features")
def test_softmax_kernel(length):
    rows, inputs = orthogonal_rows(19, 8), heads(length)
    assert_same(ours(*inputs, rows), oracle_of(rows)(*inputs), inputs, atol=1e-10)


def test_what_the_package_adds_to_its_features_is_small():
    rows, inputs = orthogonal_rows(19, 8), heads(size=0.5)
    difference = (ours(*inputs, rows) - oracle_of(rows)(*inputs)).abs().max()
    assert 1e-6 < difference < 1e-2


def test_relu_kernel():
    rows, inputs = orthogonal_rows(19, 8), heads()
    assert_same(ours(*inputs, rows, "relu"), oracle_of(rows, generalized_attention=True)(*inputs), inputs, atol=1e-10)


def test_causal_sums():
    """Its causal sums, from features without what it adds: there, its stabilizer cancels."""
    rows, (query, key, value) = orthogonal_rows(19, 8), heads()
    features = functools.partial(package.softmax_kernel, projection_matrix=rows, eps=0.0)
    expected = package.causal_linear_attention_noncuda(
        features(query, is_query=True), features(key, is_query=False), value, eps=0.0
    )
    assert_same(ours(query, key, value, rows, is_causal=True), expected, [query, key, value], atol=1e-10)


def test_unlike_the_package_nothing_leaks_from_later_keys(capsys):
    rows, (query, key, value) = orthogonal_rows(19, 8), (x.detach() for x in heads(20))
    later = key.clone()
    later[:, :, 10:] *= 4
    oracle = oracle_of(rows, causal=True)
    capsys.readouterr()  # it prints that it has no CUDA
    leak = (oracle(query, later, value) - oracle(query, key, value))[:, :, :10]
    assert leak.abs().max() > 1e-3
    before, after = (ours(query, k, value, rows, is_causal=True)[:, :, :10] for k in (key, later))
    assert torch.equal(before, after)
