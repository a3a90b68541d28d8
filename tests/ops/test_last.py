"""A single query, the last one: the formulas of LaS and of ALiBi, outputs and gradients."""

import pytest
import torch

from longlens import decay_rates, las_attention, las_attention_reference
from longlens.ops.alibi import alibi_attention_reference, alibi_slopes
from longlens.ops.last import attend_last

MASKS = {"none": None, "half": torch.arange(101) % 2 == 0, "all": torch.zeros(101, dtype=torch.bool)}


def heads(length=101, dtype=torch.float64):
    """A query, and keys and values with other widths than its own."""
    sizes = ((2, 3, 1, 7), (2, 3, length, 7), (2, 3, length, 5))
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("length", [1, 101])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("max_rate", [None, 0.1, 20.0])
def test_it_is_the_formula_of_las(length, mask, max_rate):
    inputs = heads(length)
    options = {"attn_mask": None if MASKS[mask] is None else MASKS[mask][:length]}
    if max_rate is not None:
        options["decay"] = decay_rates(3, max_rate, dtype=torch.float64).requires_grad_()
        inputs.append(options["decay"])
    outputs = [attend(*inputs[:3], **options) for attend in (las_attention, las_attention_reference)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-14)
    grad = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(output, inputs, grad) for output in outputs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_it_is_the_formula_of_alibi():
    (query, key, value), slopes = heads(), alibi_slopes(3)
    queries = torch.cat([torch.zeros_like(key[..., 1:, :]), query], dim=-2)
    expected = alibi_attention_reference(queries, key, value, slopes)[..., -1:, :]
    output, _ = attend_last(query, key, value, 7**-0.5, slopes=torch.tensor(slopes, dtype=torch.float64))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)
    grad = torch.randn_like(output)
    gradients = [torch.autograd.grad(x, (query, key, value), grad) for x in (output, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rate", [1e-4, 1e-2, 1.0])
def test_single_precision_is_enough_for_the_decay(rate):
    """After 100,000 tokens, for scores as large as 30."""
    query, key, value = (x.detach() for x in heads(100_000))
    options = {"decay": (0.0, rate / 2, rate), "scale": 4.0}
    expected = las_attention_reference(query, key, value, **options)
    output = las_attention(query.float(), key.float(), value.float(), **options)
    assert (output - expected).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    inputs = [x.detach().to(dtype) for x in heads(dtype=torch.float32)]
    options = {"decay": (0.0, 0.01, 0.1)}
    output = las_attention(*inputs, **options)
    assert output.dtype == dtype
    assert torch.equal(output, las_attention(*(x.float() for x in inputs), **options).to(dtype))
