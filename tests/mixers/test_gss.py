import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.gss import GSS


def layer(**options):
    return GSS(8, **({"state_size": 5, "expansion": 1.5} | options), dtype=torch.float64)


def by_definition(model, x):
    """(L, D) -> (L, D): the formulas of the module's docstring, with the state space as a recurrence."""
    first, second = model.in_proj.weight.split([12, 2])
    gate, u = F.gelu(x @ first.T), F.gelu(x @ second.T)
    u = (u - u.mean(-1, keepdim=True)) / (u.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    u = u * model.norm.weight + model.norm.bias
    poles = torch.complex(-model.real.exp(), model.imag.exp())
    weights = torch.view_as_complex(model.c) * (torch.exp(poles) - 1) / poles
    state, outputs = torch.zeros(2, 5, dtype=torch.complex128), []
    for v in u:
        state = torch.exp(poles) * state + v[:, None]
        outputs.append((weights * state).sum(1).real + model.skip * v)
    context = torch.stack(outputs) @ model.context_proj.weight.T
    return (context * gate) @ model.out_proj.weight.T + model.out_proj.bias


@pytest.mark.parametrize("length", [1, 23, 101])
def test_it_is_the_formula_with_its_gradients(length):
    model = layer()
    with torch.no_grad():
        model.norm.weight.normal_()
        model.norm.bias.normal_()
    x = torch.randn(1, length, 8, dtype=torch.float64, requires_grad=True)
    actual, expected = model(x)[0], by_definition(model, x[0])
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


def test_errors():
    with pytest.raises(ValueError, match="d_model must be a multiple of reduction, got d_model=6 and reduction=4"):
        GSS(6)
    with pytest.raises(ValueError, match=r"expansion must be above 0, got 0\.0"):
        GSS(8, expansion=0.0)
    with pytest.raises(ValueError, match="state_size must be at least 1, got 0"):
        GSS(8, state_size=0)
