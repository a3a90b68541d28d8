"""torch.compile traces all of it without a break and gives the same."""

import pytest
import torch

from longlens import LaSAttention, LaSCache, create_mixer, decay_rates, las_attention

pytestmark = pytest.mark.slow

CASES = {
    "las": {"decay": [0.0, 0.01], "smoothing": 5},
    "tensor of rates": {"decay": decay_rates(2, 0.01), "smoothing": 5},
    "steep tensor of rates": {"decay": torch.tensor([0.0, 9.0]), "smoothing": 5},
    "chunks": {"decay": [0.0, 0.01], "smoothing": 5, "chunk_size": 32},
    "bidirectional": {"decay": [0.0, 0.01], "smoothing": 5, "is_causal": False},
    "linear": {"decay": [0.0, 0.2], "smoothing": 5, "backend": "linear"},
    "padded": {"decay": [0.0, 0.01], "smoothing": 5, "attn_mask": torch.arange(90)[None, None, None] < 80},
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager(name):
    torch._dynamo.reset()
    inputs = [torch.randn(1, 2, 90, 16, requires_grad=True) for _ in range(3)]

    def function(query, key, value):
        return las_attention(query, key, value, **CASES[name])

    compiled = torch.compile(function, fullgraph=True)
    grad = torch.randn(1, 2, 90, 16)
    for _ in range(2):
        actual, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
        grads = torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)
        torch.testing.assert_close(*grads, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 16}, {"bidirectional": True}, {"max_rate": 9.0}])
def test_compiled_layer_at_many_lengths(options):
    """More lengths than torch allows recompilations: the code must not depend on each one."""
    torch._dynamo.reset()
    layer = LaSAttention(32, 4, window=3, **options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in range(33, 143, 10):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=2e-6)


def test_compiled_decoding():
    torch._dynamo.reset()
    layer, x, cache = LaSAttention(32, 4), torch.randn(1, 12, 32), LaSCache()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        steps = [compiled(x[:, t : t + 1], cache=cache) for t in range(12)]
        torch.testing.assert_close(torch.cat(steps, dim=1), layer(x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["s4", "s4d", "dss", "h3", "mega"])
def test_compiled_sums_of_exponentials(name):
    torch._dynamo.reset()
    layer = create_mixer(name, 8, max_length=32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for length in (20, 31):
        x = torch.randn(2, length, 8, requires_grad=True)
        actual, expected = compiled(x), layer(x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
        leaves = x, *layer.parameters()
        gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_bad_rates_are_refused_when_a_compiled_function_runs():
    torch._dynamo.reset()
    inputs = [torch.randn(1, 2, 20, 16) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v, rates: las_attention(q, k, v, decay=rates), fullgraph=True)
    compiled(*inputs, torch.tensor([0.0, 0.1]))
    with pytest.raises(ValueError, match=r"decay must have finite rates of at least 0, got -1\.0 for head 1"):
        compiled(*inputs, torch.tensor([0.0, -1.0]))
