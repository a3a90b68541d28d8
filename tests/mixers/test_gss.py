import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.gss import GSS, gss_reference


def layer(**options):
    return GSS(8, **({"state_size": 5, "expansion": 1.5} | options), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 23, 101])
def test_it_is_the_formula_with_its_gradients(length):
    model = layer()
    with torch.no_grad():
        model.norm.weight.normal_()
        model.norm.bias.normal_()
    x = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
    actual, expected = model(x), gss_reference(model, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    leaves, weight = [x, *model.parameters()], torch.randn_like(actual)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def test_a_hidden_token_in_the_middle_is_not_seen():
    """Not even as the bias of the norm, which it has in place of a 0."""
    model = layer()
    torch.nn.init.normal_(model.norm.bias)
    x, mask = torch.randn(1, 9, 8, dtype=torch.float64), torch.ones(1, 9, dtype=torch.bool)
    mask[:, 3] = False
    with torch.no_grad():
        state, outputs = None, []
        for t in range(9):
            y, following = model.step(x[:, t], state)
            # Hidden, it lets the state decay and adds nothing: the step of an input whose normalized value is 0.
            state = following if t != 3 else torch.exp(torch.complex(-model.real.exp(), model.imag.exp())) * state
            outputs.append(y)
        torch.testing.assert_close(model(x, mask=mask)[mask], torch.stack(outputs, dim=1)[mask], rtol=0, atol=1e-10)


def test_it_begins_stable():
    model = GSS(64)
    decay = torch.exp(-model.real.exp())
    assert decay.max() < 1
    kernel = model.kernel(5000)
    assert kernel.shape == (16, 5000)
    assert kernel[:, -10:].abs().max() < kernel.abs().max() / 10, "it decays"


def test_ratios_of_the_paper():
    """E = 1024, F = 4096, H = 256, N = 512 in its pseudocode: here all divided by 16."""
    model = GSS(64, expansion=4, reduction=4, state_size=32)
    assert model.in_proj.weight.shape == (256 + 16, 64)
    assert model.context_proj.weight.shape == (256, 16)
    assert model.out_proj.weight.shape == (64, 256)
    assert model.c.shape == (16, 32, 2)


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (6, {}, "reduction must divide the width of the layer, got reduction=4 and a width of 6"),
        (8, {"reduction": 0}, "reduction must be a whole number of at least 1, got 0"),
        (8, {"expansion": 0.0}, r"expansion must be a number above 0, got 0\.0"),
        (8, {"state_size": 0}, "state_size must be a whole number of at least 1, got 0"),
    ],
)
def test_errors(width, options, message):
    with pytest.raises(BadInput, match=message):
        GSS(width, **options)
