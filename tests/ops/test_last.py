"""A single query, the last one: the formulas of LaS and of ALiBi, outputs and gradients."""

import pytest
import torch

from longlens import decay_rates, las_attention, las_attention_reference
from longlens.ops.alibi import alibi_attention_reference, alibi_slopes
from longlens.ops.last import attend_last

MASKS = {
    "none": None,
    "half": torch.arange(101) % 2 == 0,
    "all": torch.zeros(101, dtype=torch.bool),
    "by head": torch.arange(4 * 101).reshape(4, 1, 101) % 3 > 0,
}
VARIANTS = {
    "plain": {},
    "decay": {"decay": 0.1},
    "steep": {"decay": 20.0},
    "smooth": {"smoothing": 5},
    "las": {"decay": 0.1, "smoothing": 5},
    "centered": {"decay": 0.1, "smoothing": 3, "side": "centered"},
    "a learned kernel": {"smoothing": torch.tensor([0.5, 0.3, -0.2], dtype=torch.float64, requires_grad=True)},
    "chunks": {"decay": 0.1, "smoothing": 5, "chunk_size": 30},
    "both sides": {"decay": 0.1, "smoothing": 5, "is_causal": False},
    "grouped keys": {"decay": 0.1, "smoothing": 5, "enable_gqa": True},
}


def heads(length=101, dtype=torch.float64, key_heads=4):
    """A query, and keys and values with other widths than its own."""
    sizes = ((2, 4, 1, 7), (2, key_heads, length, 7), (2, key_heads, length, 5))
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("length", [1, 2, 101])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_the_formula_of_las(length, mask, name):
    options = VARIANTS[name] | {"attn_mask": None if MASKS[mask] is None else MASKS[mask][..., :length]}
    inputs = heads(length, key_heads=2 if "enable_gqa" in options else 4)
    if "decay" in options:
        options["decay"] = decay_rates(4, options["decay"], dtype=torch.float64).requires_grad_()
    learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    outputs = [attend(*inputs, **options) for attend in (las_attention, las_attention_reference)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-14)
    grad = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(output, [*inputs, *learned], grad) for output in outputs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["las", "chunks", "grouped keys"])
def test_a_hidden_value_need_not_be_a_number(name):
    """In each head that does not see it, though others of its group may."""
    query, key, value = (x.detach() for x in heads(key_heads=2 if name == "grouped keys" else 4))
    value[..., 95, :] = torch.nan
    from_all = torch.arange(101) != 95
    from_some = from_all | torch.tensor([True, False, True, False])[:, None, None]
    for mask in (from_all, from_some):
        options = VARIANTS[name] | {"decay": (0.0, 0.01, 0.1, 1.0), "attn_mask": mask}
        outputs = [las_attention(query, key, value, backend=backend, **options) for backend in ("auto", "sdpa")]
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-14, equal_nan=True)
        assert outputs[0][:, 1].isfinite().all()


def test_it_is_the_formula_of_alibi():
    (query, key, value), slopes = heads(), alibi_slopes(4)
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
    options = {"decay": (0.0, rate / 4, rate / 2, rate), "scale": 4.0}
    expected = las_attention_reference(query, key, value, **options)
    output = las_attention(query.float(), key.float(), value.float(), **options)
    assert (output - expected).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    inputs = [x.detach().to(dtype) for x in heads(dtype=torch.float32)]
    options = {"decay": (0.0, 0.01, 0.1, 1.0)}
    output = las_attention(*inputs, **options)
    assert output.dtype == dtype
    assert torch.equal(output, las_attention(*(x.float() for x in inputs), **options).to(dtype))
