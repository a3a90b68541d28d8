"""S5 against the package ``s5-pytorch``, whose states are not in pairs: it is given all of them."""

import pytest
import torch
import torch.nn.functional as F

from longlens.mixers.s5 import S5

s5 = pytest.importorskip("s5", reason="the oracle 's5-pytorch' is not installed")


def oracle_parameters(layer):
    """Ours as those of the package, differentiably: each state followed by its conjugate."""
    eigenvalues, into, out = (torch.view_as_complex(p) for p in (layer.eigenvalues, layer.into, layer.out))
    into = torch.cat([into, into.conj()])
    sides = out.chunk(2 if layer.bidirectional else 1, dim=1)
    return {
        "seq.Lambda": torch.cat([eigenvalues, eigenvalues.conj()]),
        "seq.B": torch.view_as_real(into.resolve_conj()),
        "seq.C": torch.cat([part for side in sides for part in (side, side.conj())], dim=1),
        "seq.D": layer.skip,
        "seq.log_step": layer.log_dt.repeat(2),
    }


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [1, 23, 101])
def test_outputs_and_gradients(length, bidirectional, monkeypatch):
    monkeypatch.setattr(s5.s5_model, "as_complex", torch.view_as_complex)  # theirs rounds to single precision
    layer = S5(6, 16, blocks=2, bidirectional=bidirectional, dtype=torch.float64)
    oracle = s5.S5(6, state_width=16, block_count=2, bidir=bidirectional)
    x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    u = F.gelu(torch.func.functional_call(oracle, oracle_parameters(layer), (x,)))
    expected, actual = u * torch.sigmoid(layer.out_proj(u)), layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(actual)
    gradients = [torch.autograd.grad(y, [x, *layer.parameters()], weight) for y in (actual, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("size", "blocks"), [(16, 1), (16, 4), (24, 3)])
def test_the_same_start(size, blocks):
    """The package keeps both of a pair, sorted by their imaginary part."""
    oracle = s5.S5(6, state_width=size, block_count=blocks).seq.Lambda.detach().unflatten(0, (blocks, -1))
    half = torch.view_as_complex(S5(6, size, blocks=blocks).eigenvalues.detach()).unflatten(0, (blocks, -1))
    ours = torch.cat([half.conj().flip(1), half], dim=1)
    torch.testing.assert_close(ours, oracle, rtol=1e-5, atol=1e-5)
