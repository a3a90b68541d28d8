"""The linear-time form: close to exact attention, with an error that falls as promised."""

import itertools

import pytest
import torch

from longlens import las_attention
from longlens.bench.measure import peak_memory
from longlens.ops import las, linear


def relative_errors(length=3000, rates=(0.0, 0.004, 0.02, 0.3), size=1.0, **options):
    """Of the output and the gradients, head by head: the worst."""
    shape = (1, len(rates), length, 16)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    inputs[0] *= size
    results = []
    for backend in ("sdpa", "linear"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = las_attention(*leaves, decay=rates, backend=backend, **options)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    size_of = lambda x: x.square().sum((0, 2, 3)).sqrt()  # noqa: E731
    return torch.stack([size_of(a - b) / size_of(a).clamp_min(1e-9) for a, b in zip(*results, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("options", [{}, {"smoothing": 5}, {"smoothing": 3, "scale": 0.1}, {"chunk_size": 1200}])
def test_close_to_exact_attention(options, size):
    errors = relative_errors(size=size, **options)
    assert errors.max() < 2e-4
    assert errors[:, 0].max() < 1e-12, "a head without decay is exact"
    assert errors[:, 1:].max() > 1e-12, "the others are not: the far field was used"


def test_padding():
    tokens = torch.rand(1, 1, 1, 2000) > 0.2
    assert relative_errors(length=2000, smoothing=5, attn_mask=tokens).max() < 2e-4
    assert relative_errors(length=2000, attn_mask=torch.arange(2000)[None, None, None] > 1500).max() < 2e-4


def test_the_error_falls_with_the_reach(monkeypatch):
    """Like exp(-2aW): by exp(-2) = 0.135 for each unit of a·W."""
    errors = []
    for reach in (1.28, 2.56, 3.84):  # windows of 128, 256 and 384
        monkeypatch.setattr(las, "REACH", reach)
        errors.append(relative_errors(rates=(0.01,)).max().item())
    ratios = [later / earlier for earlier, later in itertools.pairwise(errors)]
    assert all(0.03 < ratio < 0.16 for ratio in ratios), errors


def formula(query, key, value, rate, window, block, present):
    """The linear form by its definition: weights exp(x) for near keys and 1 + x for far ones."""
    position = torch.arange(query.shape[2])
    distance = position[:, None] - position
    scores = query @ key.mT * query.shape[-1] ** -0.5 * torch.exp(-rate * distance.clamp_min(0))
    far = position < ((position - window) // block * block)[:, None]
    weights = torch.where(far, 1 + scores, scores.exp()) * (distance >= 0) * present
    return weights @ value / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("window", [1, 5, 16, 20])
@pytest.mark.parametrize("length", [17, 38])
def test_outputs_and_gradients_equal_the_definition(monkeypatch, window, length):
    """Two sequences, two heads in one call; blocks of 4, the last of which is short; hidden keys; learned rates."""
    monkeypatch.setattr(linear, "BLOCKS", (4, 4))
    monkeypatch.setattr(linear, "FOLDED", 2 * 2 * (window + 4) * 3 * 2)  # two blocks a call
    inputs = [torch.randn(2, 2, length, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    rates = torch.tensor([0.2, 0.4], dtype=torch.float64, requires_grad=True)
    present = torch.rand(2, 1, 1, length) > 0.3
    present[..., 0] = True
    windows = torch.tensor([window, window])
    output, _ = linear.linear_attention(*inputs, rates, present, windows, 3**-0.5, torch.float64)
    expected = formula(*inputs, rates[:, None, None], window, 4, present)
    grad = torch.randn_like(output)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    ours, theirs = (torch.autograd.grad(x, (*inputs, rates), grad) for x in (output, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


def test_heads_of_one_window_share_their_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(linear, "_forward", lambda heads, real=linear._forward: (calls.append(heads), real(heads))[1])
    inputs = [torch.randn(1, 5, 1500, 8) for _ in range(3)]
    las_attention(*inputs, decay=[0.0, 0.02, 0.021, 0.03, 0.02], backend="linear")
    assert sorted((heads.query.shape[0], heads.window) for heads in calls) == [(1, 128), (1, 1500), (3, 192)]


def test_short_sequences_are_exact():
    assert relative_errors(length=7, rates=(0.0, 0.1)).max() < 1e-12
    assert relative_errors(length=1, rates=(0.0, 50.0)).max() < 1e-12


def test_steep_decay_is_finite_and_right():
    assert relative_errors(length=500, rates=(2.0, 50.0, 1e4)).max() < 2e-4
    rates = torch.tensor([2.0, 50.0], requires_grad=True)
    output = las_attention(*torch.randn(3, 1, 2, 500, 8), decay=rates, backend="linear")
    assert torch.autograd.grad(output.sum(), rates)[0].isfinite().all()


@pytest.mark.parametrize("rate", [0.05, 10.0])
def test_memory_is_linear(rate):
    def memory(length):
        inputs = [torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3)]
        job = lambda: las_attention(*inputs, decay=[rate], backend="linear").sum().backward()  # noqa: E731
        return peak_memory(job, torch.device("cpu"))

    assert memory(4096) < 2.2 * memory(2048)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    inputs = [torch.randn(1, 2, 900, 16, dtype=dtype) for _ in range(3)]
    expected = las_attention(*(x.double() for x in inputs), decay=[0.0, 0.05], smoothing=5)
    output = las_attention(*inputs, decay=[0.0, 0.05], smoothing=5, backend="linear")
    assert output.dtype == dtype
    assert (output - expected).abs().max() < 2e-4 + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": False}, "is_causal must be True for backend='linear'; use backend='auto' otherwise"),
        ({"dropout_p": 0.1}, "dropout_p must be 0 for backend='linear'"),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.bool)}, "attn_mask must be the same for all queries"),
    ],
)
def test_what_it_does_not_take(options, message):
    inputs = [torch.zeros(1, 2, 6, 4)] * 3
    with pytest.raises(ValueError, match=message):
        las_attention(*inputs, decay=[0.0, 0.1], backend="linear", **options)
    with pytest.raises(ValueError, match="query and key must have the same length"):
        las_attention(inputs[0][..., :2, :], *inputs[1:], decay=[0.0, 0.1], backend="linear")


def test_autocast_keeps_the_states_in_float32():
    """With sums of bfloat16 numbers, the far half would be as wrong as with inputs in bfloat16."""
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 1, 4096, 16)
    how = {"decay": [0.02], "backend": "linear"}
    expected = las_attention(*inputs.double(), **how)
    with torch.autocast("cpu", torch.bfloat16):
        found = las_attention(*inputs, **how)
    low = las_attention(*inputs.bfloat16(), **how)
    errors = [(x - expected)[..., 2048:, :].square().mean().sqrt() for x in (found, low)]
    assert errors[0] < 0.9 * errors[1]
