"""The fast path equals the formula: outputs and all gradients, over the whole space of options."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longlens import decay_rates, las_attention, las_attention_reference
from longlens.bench.measure import peak_memory
from longlens.ops import las, linear
from longlens.ops.decay import max_exponent

LENGTHS = (1, 2, 63, 127, 500, 1000)
VARIANTS = {
    "plain": {},
    "l-attention": {"decay": 1e-2},
    "s-attention": {"smoothing": 5},
    "las": {"decay": 1e-2, "smoothing": 5},
    "las centered": {"decay": 1e-2, "smoothing": 3, "side": "centered"},
    "las-chunk": {"decay": 1e-2, "smoothing": 5, "chunk_size": 64},
    "bidirectional": {"decay": 1e-2, "smoothing": 5, "side": "centered", "is_causal": False},
    "steep": {"decay": 10.0, "smoothing": 5},
}


def make(shape, *, heads=None, value_width=None, query_length=None, dtype=torch.float64):
    """Query, key and value of (B, H, L, d), with optional other sizes."""
    batch, query_heads, length, width = shape
    query = torch.randn(batch, query_heads, query_length or length, width, dtype=dtype)
    key = torch.randn(batch, heads or query_heads, length, width, dtype=dtype)
    value = torch.randn(batch, heads or query_heads, length, value_width or width, dtype=dtype)
    return tuple(x.requires_grad_() for x in (query, key, value))


def resolve(options, heads):
    """A number for decay stands for the schedule up to it."""
    if isinstance(options.get("decay"), float):
        options = options | {"decay": decay_rates(heads, options["decay"], dtype=torch.float64)}
    return options


def outputs_and_gradients(function, inputs, grad, **options):
    inputs = [x for x in (*inputs, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    output = function(*inputs[:3], **options)
    grads = torch.autograd.grad(output, inputs, grad.to(output.dtype), allow_unused=True)
    return [output, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))]


def largest_error(actual, expected):
    """The largest difference, relative to the size of each tensor but at least to 1."""
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        if a.numel():
            difference = (a.double() - e.double()).abs().max() / e.double().abs().max().clamp_min(1.0)
            assert difference.isfinite()
            worst = max(worst, difference.item())
    return worst


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_formula_in_float64(name, length):
    inputs = make((2, 4, length, 8))
    grad = torch.randn(2, 4, length, 8, dtype=torch.float64)
    options = resolve(VARIANTS[name], 4)
    fast = outputs_and_gradients(las_attention, inputs, grad, **options, backend="sdpa")
    formula = outputs_and_gradients(las_attention_reference, inputs, grad, **options)
    assert largest_error(fast, formula) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_formula_in_float32(name, length):
    inputs = make((1, 4, length, 32), dtype=torch.float32)
    grad = torch.randn(1, 4, length, 32)
    options = resolve(VARIANTS[name], 4)
    fast = outputs_and_gradients(las_attention, inputs, grad, **options, backend="sdpa")
    double = tuple(x.detach().double().requires_grad_() for x in inputs)
    assert largest_error(fast, outputs_and_gradients(las_attention_reference, double, grad, **options)) < 2e-6


@pytest.mark.parametrize("shape", [(), (1,), (9,), (9, 1), (9, 9), (1, 9), (2, 1, 1, 9), (2, 1, 9, 1), (3, 1, 1)])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"is_causal": False}, {"chunk_size": 4, "decay": None}])
def test_masks_of_any_shape_that_broadcasts(options, shape):
    inputs, grad = make((2, 3, 9, 4)), torch.randn(2, 3, 9, 4, dtype=torch.float64)
    options = {"decay": [0.0, 0.1, 3.0], "smoothing": 3, "attn_mask": torch.rand(shape) < 0.6} | options
    fast = outputs_and_gradients(las_attention, inputs, grad, **options)
    assert largest_error(fast, outputs_and_gradients(las_attention_reference, inputs, grad, **options)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_in_low_precision(is_causal, dtype):
    inputs = make((2, 2, 60, 16), dtype=dtype)
    mask = torch.arange(60) < torch.tensor([60, 33])[:, None, None, None]
    options = {"decay": [0.0, 0.05], "smoothing": 5, "is_causal": is_causal, "attn_mask": mask}
    grad = torch.randn(2, 2, 60, 16, dtype=dtype)
    fast = outputs_and_gradients(las_attention, inputs, grad, **options)
    double = tuple(x.detach().double().requires_grad_() for x in inputs)
    formula = outputs_and_gradients(las_attention_reference, double, grad, **options)
    assert largest_error(fast, formula) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VARIANTS)
def test_low_precision_to_its_rounding(name, dtype):
    inputs = make((2, 4, 127, 32), dtype=dtype)
    grad = torch.randn(2, 4, 127, 32, dtype=dtype)
    options = resolve(VARIANTS[name], 4)
    fast = outputs_and_gradients(las_attention, inputs, grad, **options)
    double = tuple(x.detach().double().requires_grad_() for x in inputs)
    formula = outputs_and_gradients(las_attention_reference, double, grad, **options)
    assert all(x.dtype == dtype for x in fast)
    assert largest_error(fast, formula) < 8 * torch.finfo(dtype).eps


@st.composite
def cases(draw):
    """Any combination of options, as keyword arguments for a test."""
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, 40))
    query_length = draw(st.one_of(st.just(length), st.integers(1, length)))
    groups, key_heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]))
    heads = groups * key_heads
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([0.0, 1e-3, 0.1, 1.0, 30.0, 1e4]))
    decay = size * torch.rand(heads, generator=generator, dtype=torch.float64)
    kernel = torch.randn(draw(st.sampled_from([1, 3, 7])), generator=generator, dtype=torch.float64)
    mask_rows = draw(st.sampled_from([None, 1, query_length]))
    mask = None
    if mask_rows is not None:
        shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), mask_rows, length)
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    sizes = {
        "shape": (batch, heads, length, draw(st.sampled_from([1, 4, 17]))),
        "heads": key_heads,
        "query_length": query_length,
        "value_width": draw(st.sampled_from([1, 4, 18])),
    }
    options = {
        "decay": draw(st.sampled_from([None, decay.clone().requires_grad_()])),
        "smoothing": draw(st.sampled_from([None, 1, 3, 5, kernel.requires_grad_()])),
        "side": draw(st.sampled_from(["past", "centered"])),
        "chunk_size": draw(st.sampled_from([None, 1, 5, 16, length])),
        "is_causal": draw(st.booleans()),
        "attn_mask": mask,
        "scale": draw(st.sampled_from([None, 0.3, -1.0, 0.0])),
        "enable_gqa": groups > 1 or draw(st.booleans()),
    }
    return sizes, options, draw(st.sampled_from(["auto", "sdpa"]))


@pytest.mark.slow
@settings(max_examples=400)
@given(cases())
def test_equals_the_formula_for_any_options(case):
    sizes, options, backend = case
    inputs = make(**sizes)
    grad = torch.randn(*inputs[0].shape[:-1], inputs[2].shape[-1], dtype=torch.float64)
    fast = outputs_and_gradients(las_attention, inputs, grad, **options, backend=backend)
    formula = outputs_and_gradients(las_attention_reference, inputs, grad, **options)
    assert largest_error(fast, formula) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"decay": 0.1, "smoothing": 3},
        {"decay": 0.1, "smoothing": 3, "is_causal": False},
        {"decay": 60.0, "smoothing": 3},
        {"decay": 0.1, "smoothing": 3, "chunk_size": 3},
    ],
)
def test_gradcheck(options):
    rates = decay_rates(2, options["decay"], dtype=torch.float64).add_(0.01).requires_grad_()
    kernel = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    options = {k: v for k, v in options.items() if k not in ("decay", "smoothing")}

    def function(query, key, value, rates, kernel):
        return las_attention(query, key, value, decay=rates, smoothing=kernel, **options)

    assert torch.autograd.gradcheck(function, (*make((1, 2, 7, 3)), rates, kernel))


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_chunk_of_the_whole_length_is_full_attention(is_causal):
    inputs = make((2, 2, 50, 8))
    options = {"decay": [0.0, 0.1], "smoothing": 5, "is_causal": is_causal}
    full = las_attention(*inputs, **options)
    assert torch.equal(las_attention(*inputs, **options, chunk_size=50), full)
    assert torch.equal(las_attention(*inputs, **options, chunk_size=10**9), full)


def test_chunks_are_independent_sequences():
    query, key, value = make((2, 2, 50, 8))
    options = {"decay": [0.0, 0.1], "smoothing": 5}
    parts = [las_attention(*(x[..., i : i + 16, :] for x in (query, key, value)), **options) for i in range(0, 50, 16)]
    chunked = las_attention(query, key, value, **options, chunk_size=16)
    torch.testing.assert_close(chunked, torch.cat(parts, dim=-2), rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("product", [1.0, 30.0, 200.0, 1e4, 1e6])
def test_extreme_decay_stays_finite_and_right(product, is_causal, dtype):
    length = 300
    inputs = make((1, 2, length, 16), dtype=dtype)
    grad = torch.randn(1, 2, length, 16, dtype=dtype)
    options = {"decay": [0.0, product / length], "smoothing": 5, "is_causal": is_causal}
    fast = outputs_and_gradients(las_attention, inputs, grad, **options)
    double = tuple(x.detach().double().requires_grad_() for x in inputs)
    formula = outputs_and_gradients(las_attention_reference, double, grad, **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 8 * torch.finfo(dtype).eps)
    assert largest_error(fast, formula) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("fraction", [0.5, 0.99, 1.01, 7.0])
def test_masks_and_dropout_at_the_edge_of_the_exponent(fraction, is_causal, dtype):
    """Above the diagonal the folded products are largest; a mask that is added to them must not meet an infinity."""
    length = 300
    inputs = [x * size for x, size in zip(make((1, 1, length, 32), dtype=dtype), (4, 4, 1), strict=True)]
    rate = fraction * 2 * max_exponent(dtype) / (length - 1)
    mask = (torch.rand(length, length) < 0.9) | torch.eye(length, dtype=torch.bool)
    options = {"decay": [rate], "attn_mask": mask, "is_causal": is_causal}
    output = las_attention(*inputs, **options)
    expected = las_attention_reference(*(x.double() for x in inputs), **options)
    size_of_scores = 16 * 32**0.5
    assert (output - expected).abs().max() < 8 * size_of_scores * torch.finfo(dtype).eps
    assert las_attention(*inputs, decay=[rate], dropout_p=0.1, is_causal=is_causal).isfinite().all()


@pytest.mark.parametrize(("sizes", "grad_size"), [((1 / 300, 300), 1.0), ((300, 1 / 300), 1.0), ((1, 1), 1e-4)])
def test_float16_with_large_keys_and_small_gradients(sizes, grad_size):
    """What plain attention in float16 can represent, LaS can, with an error of the same order."""
    query, key, value = make((1, 2, 200, 32), dtype=torch.float16)
    inputs = [(x * s).detach().requires_grad_() for x, s in zip((query, key, value), (*sizes, 1), strict=True)]
    double = [x.detach().double().requires_grad_() for x in inputs]
    grad = grad_size * torch.randn(1, 2, 200, 32, dtype=torch.float64)
    errors = {}
    for name, options in {"plain": {}, "las": {"decay": [0.0, 0.05]}}.items():
        actual = outputs_and_gradients(las_attention, inputs, grad, **options)
        expected = outputs_and_gradients(las_attention_reference, double, grad, **options)
        pairs = zip(actual, expected, strict=True)
        errors[name] = torch.stack([(a - e).norm() / e.norm() for a, e in pairs])
    assert (errors["las"] < 5 * errors["plain"] + 2e-3).all(), errors


def test_hidden_keys_stay_hidden_for_large_scores_in_float16():
    query = torch.full((1, 1, 4, 64), 40.0, dtype=torch.float16)
    key = torch.tensor([-40.0, -40.0, 40.0, 40.0], dtype=torch.float16).view(1, 1, 4, 1).expand(1, 1, 4, 64)
    value = torch.ones(1, 1, 4, 64, dtype=torch.float16)
    mask = torch.tensor([True, True, False, False])[None, None, None]
    assert torch.equal(las_attention(query, key, value, attn_mask=mask, is_causal=False), value)


def test_large_scores_with_decay_stay_right():
    query, key, value = make((1, 2, 200, 16), dtype=torch.float32)
    query = (query * 100).detach().requires_grad_()
    options = {"decay": [0.0, 0.4]}
    double = [x.double() for x in (query, key, value)]
    difference = las_attention(query, key, value, **options) - las_attention_reference(*double, **options)
    assert difference.abs().max() < 1e-4  # scores of size 400 have a float32 rounding of 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"decay": [0.0, 1e-3]}, {"decay": [0.0, 5.0]}, {"padded": True}])
def test_no_tensor_of_size_length_squared(options, is_causal):
    def memory(length):
        inputs = make((1, 2, length, 16), dtype=torch.float32)
        choices = {k: v for k, v in options.items() if k != "padded"}
        if options.get("padded"):
            choices |= {"decay": [0.0, 1e-3], "attn_mask": torch.arange(length)[None, None, None] < length - 9}

        def job():
            las_attention(*inputs, smoothing=5, is_causal=is_causal, **choices).sum().backward()

        return peak_memory(job, torch.device("cpu"))

    assert memory(4096) < 2.2 * memory(2048)


def test_decay_accepts_floats_and_tensors_alike():
    inputs = make((1, 3, 20, 4))
    rates = decay_rates(3, 0.5, dtype=torch.float64)
    expected = las_attention(*inputs, decay=rates)
    assert torch.equal(las_attention(*inputs, decay=rates.tolist()), expected)
    assert torch.equal(las_attention(*inputs, decay=tuple(rates.tolist())), expected)
    assert not torch.equal(las_attention(*inputs), expected)


def test_queries_are_the_last_positions():
    query, key, value = make((2, 2, 30, 8))
    options = {"decay": [0.0, 0.2], "smoothing": 3}
    whole = las_attention(query, key, value, **options)
    for count in (1, 2, 13, 30):
        last = las_attention(query[..., -count:, :], key, value, **options)
        torch.testing.assert_close(last, whole[..., -count:, :], rtol=0, atol=1e-13)


@pytest.mark.parametrize("side", ["past", "centered"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("pad_left", [True, False])
def test_padding_does_not_reach_the_tokens(side, is_causal, pad_left):
    query, key, value = make((1, 2, 20, 8))
    options = {"decay": [0.0, 0.2], "smoothing": 5, "side": side, "is_causal": is_causal}
    alone = las_attention(query, key, value, **options)
    noise = torch.randn(1, 2, 6, 8, dtype=torch.float64) * 100
    padded = [torch.cat([noise, x] if pad_left else [x, noise], dim=-2) for x in (query, key, value)]
    tokens = torch.arange(26) >= 6 if pad_left else torch.arange(26) < 20
    output = las_attention(*padded, attn_mask=tokens[None, None, None], **options)
    torch.testing.assert_close(output[..., tokens, :], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"decay": [0.0, 0.2]}, {"decay": [0.0, 0.2], "is_causal": False}])
def test_a_row_that_may_attend_to_nothing_gives_zero(options):
    inputs = make((1, 2, 6, 4))
    rows = torch.ones(6, 6, dtype=torch.bool)
    rows[2] = False
    for mask in (rows, torch.zeros(1, 1, 1, 6, dtype=torch.bool)):
        output = las_attention(*inputs, smoothing=3, attn_mask=mask, **options)
        assert torch.equal(output[..., 2, :], torch.zeros(1, 2, 4, dtype=torch.float64))
        grads = torch.autograd.grad(output.sum(), inputs)
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"chunk_size": 8}, {"decay": [0.0, 9.0]}])
def test_dropout_drops_weights_and_keeps_their_mean(options, monkeypatch):
    query, key, value = (x.detach() for x in make((1, 2, 20, 4)))
    monkeypatch.setattr(linear, "BLOCKS", (2, 2))
    monkeypatch.setattr(las, "fixed_windows", lambda rates, *_: [5 if rate == 9.0 else 20 for rate in rates])
    options = {"decay": [0.0, 0.2], "smoothing": 3, **options}
    expected = las_attention(query, key, value, **options)
    samples = [las_attention(query, key, value, **options, dropout_p=0.5) for _ in range(2000)]
    assert not torch.equal(samples[0], samples[1])
    assert (torch.stack(samples).mean(0) - expected).abs().max() < 0.2
    assert torch.equal(las_attention(query, key, value, **options, dropout_p=1.0), torch.zeros_like(expected))


def test_empty_inputs():
    for shape in ((0, 2, 5, 4), (1, 2, 0, 4)):
        inputs = make(shape)
        assert las_attention(*inputs, decay=[0.0, 0.1], smoothing=3).shape == shape
    query, key, value = make((1, 2, 5, 4))
    assert las_attention(query[..., :0, :], key, value, decay=[0.0, 0.1]).shape == (1, 2, 0, 4)


def test_works_on_strided_views():
    """(B, L, H, d) transposed, as a layer has it; the values of an unused neighbor must not matter."""
    packed = torch.randn(2, 40, 3, 4, 8, dtype=torch.float64)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    for options in ({}, {"chunk_size": 16}, {"is_causal": False}):
        views = las_attention(query, key, value, decay=[0, 0.1, 0.2, 0.3], smoothing=5, **options)
        copies = las_attention(
            *(x.contiguous() for x in (query, key, value)), decay=[0, 0.1, 0.2, 0.3], smoothing=5, **options
        )
        torch.testing.assert_close(views, copies, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(2, 4, 32, 50).mT,  # channels before the sequence, as after a convolution
        lambda: torch.randn(2, 50, 32, 4).permute(0, 3, 1, 2),  # heads last
        lambda: torch.randn(2, 4, 50, 64)[..., ::2],
        lambda: torch.randn(2, 4, 50, 1).expand(2, 4, 50, 32),
    ],
    ids=["convolution", "heads-last", "every-second", "expanded"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"decay": 0.01},
        {"decay": 10.0},
        {"decay": 0.01, "is_causal": False},
        {"decay": 0.01, "is_causal": False, "chunk_size": 16, "smoothing": 3},
        {"decay": 0.5, "backend": "linear", "tolerance": 1e-4},
        {"is_causal": False},
    ],
    ids=["causal", "steep", "both-sides", "chunks", "linear", "plain"],
)
def test_rows_need_not_be_packed(view, options):
    """Kernels that are called past torch's own checks would read memory of others."""
    inputs = [view().detach().requires_grad_() for _ in range(3)]
    options = dict(options)
    if "decay" in options:
        options["decay"] = [options["decay"] * head / 4 for head in range(1, 5)]
    output = las_attention(*inputs, **options)
    expected = las_attention_reference(
        *inputs, **{k: v for k, v in options.items() if k not in ("backend", "tolerance")}
    )
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-3)
    upstream = torch.randn(2, 4, 32, 50).mT
    grads, wanted = (torch.autograd.grad(y, inputs, upstream) for y in (output, expected))
    torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-2)


def test_autocast_computes_in_bfloat16():
    inputs = make((1, 2, 64, 16), dtype=torch.float32)
    for options in ({"is_causal": True}, {"is_causal": False}):
        expected = las_attention(*inputs, decay=[0.0, 0.1], smoothing=5, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = las_attention(*inputs, decay=[0.0, 0.1], smoothing=5, **options)
        assert low.dtype == torch.bfloat16
        assert (low - expected).abs().max() < 0.03
        grads = torch.autograd.grad(low.sum(), inputs)
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": False},
        {"chunk_size": 16},
        {"dropout_p": 1e-9},
        {"attn_mask": torch.arange(64) < 50},
        {"backend": "linear"},
        {"backend": "reference"},
    ],
    ids=lambda options: " ".join(options),
)
def test_autocast_takes_values_of_another_precision(options):
    """As torch's function does: rotations and norms of queries and keys are often in float32, and values are not."""
    query, key, value = make((1, 2, 64, 16), dtype=torch.float32)
    low = value.detach().bfloat16().requires_grad_()
    how = {"decay": [0.05, 0.1], "smoothing": 5} | options
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = las_attention(query, key, low, **how)
        expected = las_attention(query, key, low.float(), **how)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)
    grads = torch.autograd.grad(found.sum(), (query, key, low))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, torch.bfloat16]
    assert all(grad.isfinite().all() for grad in grads)
    with pytest.raises(TypeError, match="value must have the dtype of query"):
        las_attention(query, key, low, **how)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="value must have the dtype of"):
        las_attention(query, key, value.double(), **how)  # which autocast leaves as it is


def test_transforms_of_torch_func():
    query, key, value = (x.detach() for x in make((1, 2, 9, 4)))

    def loss(value):
        return las_attention(query, key, value, decay=[0.0, 0.1], smoothing=3).square().sum()

    gradient = torch.func.grad(loss)(value)
    value.requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(value), value)[0])
