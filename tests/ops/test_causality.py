"""What a query sees, by perturbation and by gradient: exactly."""

import pytest
import torch

from longlens import las_attention
from longlens.ops import las, linear

CAUSAL = {
    "plain": {},
    "las": {"decay": [0.0, 0.3], "smoothing": 5},
    "kernel": {"decay": [0.0, 0.3], "smoothing": [0.5, 0.25, 0.125, 0.125]},
    "steep": {"decay": [0.0, 50.0], "smoothing": 5},
    "chunks": {"decay": [0.0, 0.3], "smoothing": 5, "chunk_size": 7},
    "linear": {"decay": [0.0, 1.0], "smoothing": 5, "backend": "linear"},
    "padded": {"decay": [0.0, 0.3], "smoothing": 5, "attn_mask": torch.arange(24)[None, None, None] < 20},
}


def tokens(length=24):
    """One sequence whose tokens are query, key and value at once."""
    return torch.randn(1, 2, length, 8, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_changes_nothing(name, monkeypatch):
    monkeypatch.setattr(linear, "BLOCKS", (2, 2))
    monkeypatch.setattr(las, "fixed_windows", lambda rates, *_: [3 if rate == 1.0 else 24 for rate in rates])
    x = tokens()
    before = las_attention(x, x, x, **CAUSAL[name])
    for t in range(23):
        changed = x.detach().clone()
        changed[..., t + 1 :, :] = torch.randn_like(changed[..., t + 1 :, :]) * 10
        after = las_attention(changed, changed, changed, **CAUSAL[name])
        assert torch.equal(after[..., : t + 1, :], before[..., : t + 1, :])
        (gradient,) = torch.autograd.grad(before[..., t, :].sum(), x, retain_graph=True)
        assert torch.count_nonzero(gradient[..., t + 1 :, :]) == 0
        assert torch.count_nonzero(gradient[..., t, :]) > 0


@pytest.mark.parametrize("window", [3, 5, 7])
def test_centered_smoothing_leaks_half_a_window(window):
    x = tokens()
    output = las_attention(x, x, x, decay=[0.0, 0.3], smoothing=window, side="centered")
    reach = (window - 1) // 2
    for t in (0, 5, 23 - reach):
        (gradient,) = torch.autograd.grad(output[..., t, :].sum(), x, retain_graph=True)
        seen = gradient.abs().amax((0, 1, 3)) > 0
        assert seen[t + reach], "the leak that makes side='past' the default"
        assert not seen[t + reach + 1 :].any()


@pytest.mark.parametrize("side", ["past", "centered"])
def test_bidirectional_sees_both_sides(side):
    x = tokens()
    output = las_attention(x, x, x, decay=[0.0, 0.3], smoothing=3, side=side, is_causal=False)
    (gradient,) = torch.autograd.grad(output[..., 12, :].sum(), x)
    assert (gradient.abs().amax((0, 1, 3)) > 0).all()


def test_chunks_do_not_see_each_other():
    x = tokens()
    output = las_attention(x, x, x, decay=[0.0, 0.3], smoothing=5, chunk_size=8)
    (gradient,) = torch.autograd.grad(output[..., 15, :].sum(), x)
    seen = gradient.abs().amax((0, 1, 3)) > 0
    assert seen.tolist() == [8 <= t < 16 for t in range(24)]
