"""The tolerance of the linear form: no error is larger than its bound, for any queries and keys."""

import itertools

import pytest
import torch

from longlens import LaSAttention, las_attention
from longlens.ops import linear, windows
from longlens.ops.windows import choose_windows, fixed_windows, longest_window, round_up, window_bound

LENGTH, RATE = 700, 0.02


def aligned(size):
    """All scores of one sign, and as large as the norms allow."""
    query = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(2, 1, LENGTH, 8)
    return query, query * size


def outlier(size):
    query, key = torch.randn(2, 2, 1, LENGTH, 8, dtype=torch.float64)
    key[:, :, 100] = size * query[:, :, 300]
    return query, key


INPUTS = {
    "random": lambda: tuple(torch.randn(2, 2, 1, LENGTH, 8, dtype=torch.float64)),
    "large": lambda: tuple(5 * torch.randn(2, 2, 1, LENGTH, 8, dtype=torch.float64)),
    "aligned": lambda: aligned(1.0),
    "negative": lambda: aligned(-3.0),
    "an outlier": lambda: outlier(50.0),
    "a negative outlier": lambda: outlier(-50.0),
}


def worst_values(query, key):
    """Values of ±1 that agree with the sign of what the linear form loses."""
    return torch.where((query[..., -1:, :] @ key.mT).mT > 0, 1.0, -1.0).double().expand(-1, -1, -1, 8).contiguous()


def error(query, key, value, rate, window, mask=None):
    """Relative to the largest value of each sequence."""
    given = torch.tensor([rate], dtype=torch.float64), mask, torch.tensor([window]), 8**-0.5, torch.float64
    exact = las_attention(query, key, value, decay=[rate], attn_mask=mask, backend="reference")
    found = linear.linear_attention(query, key, value, *given)[0]
    return ((found - exact).abs().amax((1, 2, 3)) / value.abs().amax((1, 2, 3))).max().item()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_no_error_exceeds_its_bound(kind, masked):
    query, key = INPUTS[kind]()
    mask = torch.rand(2, 1, 1, LENGTH) > 0.4 if masked else None
    present = None if mask is None else mask[:, 0].mT
    bounds = []
    for window in (64, 128, 256, 448):
        bound = window_bound(query[:, 0], key[:, 0], RATE, window, mask=present)
        for value in (torch.randn_like(query), worst_values(query, key)):
            value = value if mask is None else value.masked_fill(~mask.mT, 0.0)
            assert error(query, key, value, RATE, window, mask) <= bound.error
        bounds.append(bound.error)
    assert all(later <= earlier for earlier, later in itertools.pairwise(bounds))
    assert bounds[-1] < 1, "a bound that says nothing cannot be wrong"


def test_the_bound_is_within_reach():
    """It is no empty one: within a factor of six of the error, where all far scores and values have one sign."""
    query, key = aligned(1.0)
    query, key = query * 0.2, key * 0.2
    sign = torch.where(torch.arange(LENGTH) < 100, 1.0, -1.0)[:, None].expand(2, 1, LENGTH, 8).double()
    bound = window_bound(query[:, 0], key[:, 0], RATE, 64).error
    assert bound / 6 < error(query, key, sign, RATE, 64) <= bound


def test_each_part_of_the_bound_is_at_least_what_it_bounds(monkeypatch):
    """Σ x², ε and Z of one query, by their definitions."""
    query, key = INPUTS["random"]()
    window, block, row = 128, linear.block_size(RATE), 128 + 3 * linear.block_size(RATE)
    distance = row - torch.arange(row + 1)
    scores = (query[0, 0, row] @ key[0, 0, : row + 1].mT) * 8**-0.5 * torch.exp(-RATE * distance)
    far = scores[: 3 * block]
    lost = (far.exp() - 1 - far).sum()
    alone = torch.zeros_like(query[:1, 0])
    alone[:, row] = query[0, 0, row]
    part = lost / scores.exp().sum()
    bound = window_bound(alone, key[:1, 0], RATE, window).error
    assert 2 * part / (1 - part) <= bound < 3 * part / (1 - part)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_a_tolerance_is_kept(monkeypatch, tolerance, scale):
    monkeypatch.setattr(windows, "SHORT", 0)
    inputs = torch.randn(3, 2, 3, 1500, 8, dtype=torch.float64)
    rates = [0.0, 0.02, 0.3]
    options = {"decay": rates, "smoothing": 3, "scale": scale}
    chosen = choose_windows(*inputs[:2], torch.tensor(rates), None, scale, tolerance)
    assert chosen[0] == 1500, "without decay there is no far field"
    assert chosen[2] < 1500
    exact = las_attention(*inputs, **options)
    found = las_attention(*inputs, **options, backend="linear", tolerance=tolerance)
    assert (found - exact).abs().max() <= tolerance * inputs[2].abs().max()
    assert (found - exact).abs().max() > 1e-12, "the far field was used"
    again = choose_windows(*inputs[:2], torch.tensor(rates), None, scale, tolerance / 100)
    assert (again >= chosen).all()
    assert again[1] > chosen[1]


def test_the_chosen_window_is_about_the_shortest(monkeypatch):
    monkeypatch.setattr(windows, "SHORT", 0)
    query, key = torch.randn(2, 1, 1, 3000, 16)
    (window,) = choose_windows(query, key, torch.tensor([0.01]), None, 0.25, 1e-3).tolist()
    assert window_bound(query[:, 0], key[:, 0], 0.01, window).error <= 1e-3
    assert window_bound(query[:, 0], key[:, 0], 0.01, window - 128).error > 1e-3


def test_gradients_are_close(monkeypatch):
    """They have no bound; an error of the output of 1e-4 goes with one of 1e-3 of them."""
    monkeypatch.setattr(windows, "SHORT", 0)
    inputs = [torch.randn(1, 2, 1500, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    outputs = [las_attention(*inputs, decay=[0.01, 0.02], backend="linear", tolerance=1e-3)]
    outputs.append(las_attention(*inputs, decay=[0.01, 0.02]))
    ours, theirs = (torch.autograd.grad(output.square().sum(), inputs) for output in outputs)
    for mine, exact in zip(ours, theirs, strict=True):
        assert 1e-9 < (mine - exact).norm() / exact.norm() < 1e-3


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
def test_what_does_not_pay_stays_exact(tolerance):
    inputs = torch.randn(3, 1, 2, 2500, 8)
    decay = [1e-4, 0.004 if tolerance < 1e-3 else 1e-3]
    assert choose_windows(*inputs[:2], torch.tensor(decay), None, 8**-0.5, tolerance).tolist() == [2500, 2500]
    found = las_attention(*inputs, decay=decay, backend="linear", tolerance=tolerance)
    torch.testing.assert_close(found, las_attention(*inputs, decay=decay), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [1e15, 1e25, float("inf"), float("nan")])
def test_inputs_beyond_all_bounds_stay_exact(size):
    query, key = torch.randn(2, 1, 1, 2500, 8)
    key[..., 7, :] = size
    assert choose_windows(query, key, torch.tensor([0.01]), None, 1.0, 1e-3).tolist() == [2500]
    assert choose_windows(query, torch.zeros_like(key), torch.tensor([0.01]), None, 1.0, 1e-3).tolist() == [64]


def test_rows_without_keys():
    inputs, mask = torch.randn(3, 1, 1, 2500, 8), (torch.arange(2500) >= 2000)[None, None, None]
    found = las_attention(*inputs, decay=[0.02], attn_mask=mask, backend="linear", tolerance=1e-3)
    assert (found[..., :2000, :] == 0).all()
    expected = las_attention(*inputs, decay=[0.02], attn_mask=mask)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_trained_activations(monkeypatch):
    """Of a layer that has learned to copy a token from 40 steps before: its scores are large."""
    monkeypatch.setattr(windows, "SHORT", 0)
    torch.manual_seed(0)
    layer = LaSAttention(32, 2, max_rate=0.02, schedule="positive", window=None, rotary=True)
    optimizer = torch.optim.AdamW(layer.parameters(), 2e-2)
    for _ in range(40):
        x = torch.randn(4, 200, 32)
        loss = (layer(x)[:, 40:] - x[:, :-40]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        query, key, value = (part.double() for part in layer._project(torch.randn(1, 2000, 32)))
        assert (query @ key.mT).abs().max() / 4 > 3
        found = las_attention(query, key, value, decay=layer.rates, backend="linear", tolerance=1e-3)
        exact = las_attention(query, key, value, decay=layer.rates)
    assert 1e-12 < (found - exact).abs().max() <= 1e-3 * value.abs().max()


def test_windows_lie_on_a_grid():
    assert [round_up(x) for x in (0.1, 64, 65, 1000, 1025, 2049, 2177, 5000)] == [
        64,
        64,
        128,
        1024,
        1088,
        2176,
        2304,
        5120,
    ]
    assert fixed_windows([0.0, 0.01, 1e-4, 100.0], 2000, 3.0) == [2000, 320, 2000, 64]
    assert longest_window(100, 64) == 0
    lengths = [longest_window(length, 256) / length for length in (2000, 10_000, 100_000)]
    assert 0 < lengths[0] < lengths[1] < lengths[2] < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(monkeypatch, dtype):
    monkeypatch.setattr(windows, "SHORT", 0)
    inputs = [torch.randn(1, 2, 900, 16, dtype=dtype) for _ in range(3)]
    expected = las_attention(*(x.double() for x in inputs), decay=[0.03, 0.05], smoothing=5)
    found = las_attention(*inputs, decay=[0.03, 0.05], smoothing=5, backend="linear", tolerance=1e-3)
    assert found.dtype == dtype
    assert (found - expected).abs().max() < 1e-3 + 4 * torch.finfo(dtype).eps


@pytest.mark.slow
def test_compiled(monkeypatch):
    """The windows depend on the inputs, and are chosen inside of the graph."""
    monkeypatch.setattr(windows, "SHORT", 0)
    inputs = [torch.randn(1, 2, 600, 8, requires_grad=True) for _ in range(3)]

    def function(*inputs):
        return las_attention(*inputs, decay=(0.05, 0.08), smoothing=3, backend="linear", tolerance=1e-3)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), inputs) for x in (ours, theirs)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 1e-3}, "tolerance must be None for backend='auto', got 0.001; use backend='linear'"),
        ({"tolerance": 0.0, "backend": "linear"}, "tolerance must be a finite number above 0, got 0.0"),
        ({"tolerance": float("nan"), "backend": "linear"}, "tolerance must be a finite number above 0, got nan"),
    ],
)
def test_wrong_tolerances(options, message):
    with pytest.raises(ValueError, match=message):
        las_attention(*torch.zeros(3, 1, 2, 6, 4), decay=[0.0, 0.1], **options)
    with pytest.raises(TypeError, match="tolerance must be a number, got '1e-3'"):
        las_attention(*torch.zeros(3, 1, 2, 6, 4), decay=[0.0, 0.1], backend="linear", tolerance="1e-3")
