"""Our gated state space with the weights of a GSS of the gated-state-spaces-pytorch package is that GSS."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.gss import GSS

package = pytest.importorskip(
    "gated_state_spaces_pytorch", reason="the oracle 'gated-state-spaces-pytorch' is not installed"
)

D = 12


def both():
    """Theirs, random, and ours with the same weights; and a function from the gradients of theirs to those of ours."""
    theirs = package.GSS(dim=D, dim_expansion_factor=2, dss_kernel_N=7, dss_kernel_H=3).double()
    for norm in (theirs.norm, theirs.dss.norm):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)

    def in_our_form(of):
        dss = theirs.dss
        return {
            "in_proj.weight": torch.cat([of(theirs.to_u[0].weight), of(theirs.to_v[0].weight)]),
            "norm.weight": of(dss.norm.weight),
            "norm.bias": of(dss.norm.bias),
            "real": of(dss.Lambda_real),
            "imag": of(dss.Lambda_imag),
            "c": torch.stack([of(dss.C_real), of(dss.C_imag)], dim=-1),
            "skip": of(dss.param_D),
            "context_proj.weight": of(theirs.to_gate.weight),
            "out_proj.weight": of(theirs.to_out.weight),
            "out_proj.bias": of(theirs.to_out.bias),
        }

    ours = GSS(D, expansion=2, reduction=4, state_size=7, dtype=torch.float64)
    ours.load_state_dict(in_our_form(lambda parameter: parameter.detach()))
    return theirs, ours, in_our_form


@pytest.mark.parametrize("length", [1, 23, 101])
def test_outputs_and_gradients(length):
    """Their layer has the norm and the residual of a block in it."""
    theirs, ours, in_our_form = both()
    x = torch.randn(2, length, D, dtype=torch.float64, requires_grad=True)
    expected = theirs(x)
    actual = x + ours(F.layer_norm(x, (D,), theirs.norm.weight, theirs.norm.bias))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    weight = torch.randn_like(expected)
    (expected_x,) = torch.autograd.grad(expected, x, weight, retain_graph=True)
    (actual_x,) = torch.autograd.grad(actual, x, weight, retain_graph=True)
    torch.testing.assert_close(actual_x, expected_x, rtol=1e-9, atol=1e-9)
    expected.backward(weight, retain_graph=True)
    gradients = in_our_form(lambda parameter: parameter.grad)
    theirs.zero_grad()
    actual.backward(weight)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9)


def test_steps():
    theirs, ours, _ = both()
    x = torch.randn(2, 23, D, dtype=torch.float64)
    expected, state = theirs(x) - x, None
    for t, token in enumerate(theirs.norm(x).unbind(1)):
        y, state = ours.step(token, state)
        torch.testing.assert_close(y, expected[:, t], rtol=0, atol=1e-10)
