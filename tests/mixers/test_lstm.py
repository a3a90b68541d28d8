"""LSTM against its gates, written out."""

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.lstm import LSTM, lstm_reference
from longlens.mixers.registry import create_mixer


@pytest.mark.parametrize("length", [1, 23, 101])
def test_equals_its_gates_with_its_gradients(length):
    layer = LSTM(6, 5, dtype=torch.float64)
    x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), lstm_reference(layer, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], weight) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_forget_gates_begin_open():
    torch.manual_seed(1)
    layer = LSTM(6, 5, forget_bias=2.0)
    torch.manual_seed(1)
    plain = LSTM(6, 5, forget_bias=None)
    total, usual = (
        torch.stack([one.lstm.get_parameter(name) for name in ("bias_ih_l0", "bias_hh_l0")]).sum(0)
        for one in (layer, plain)
    )
    assert total[5:10].tolist() == [2.0] * 5
    assert torch.equal(torch.cat([total[:5], total[10:]]), torch.cat([usual[:5], usual[10:]]))
    assert (usual[5:10].abs() < 1).all()


def test_what_is_in_the_padding_does_not_matter():
    """Not even a number that is none."""
    layer, mask = LSTM(6, 5), torch.tensor([[True, True, False]])
    x = torch.randn(1, 3, 6)
    filled = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(layer(filled, mask=mask)[:, :2], layer(x[:, :2]))
    assert layer(filled, mask=mask).isfinite().all()


def test_a_step_leaves_its_state_alone():
    layer, x = LSTM(6, 5), torch.randn(2, 6)
    _, state = layer.step(x)
    before = [part.clone() for part in state]
    layer.step(x, state)
    assert all(torch.equal(*parts) for parts in zip(state, before, strict=True))


def test_units_are_half_of_the_width():
    assert create_mixer("lstm", 64).hidden == 32
    assert create_mixer("lstm", 1).hidden == 1
    assert create_mixer("lstm", 64, hidden=64).hidden == 64


def test_wrong_options_are_refused():
    with pytest.raises(BadInput, match="hidden must be a whole number of at least 1 or none, got 0"):
        create_mixer("lstm", 16, hidden=0)
