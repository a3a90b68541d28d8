"""Linformer against the package linformer, with its weights."""

import pytest
import torch

from longlens.mixers.registry import create_mixer


@pytest.mark.parametrize("length", [101, 128])
def test_the_package_with_its_weights(length):
    linformer = pytest.importorskip("linformer", reason="the oracle 'linformer' is not installed")
    oracle = linformer.LinformerSelfAttention(32, 128, k=24, heads=4).double()
    layer = create_mixer("linformer", 32, heads=4, projected=24, share="headwise", max_length=128, dtype=torch.float64)
    theirs = [oracle.to_q.weight, oracle.to_k.weight, oracle.to_v.weight]
    with torch.no_grad():
        layer.in_proj.weight.copy_(torch.cat(theirs))
        layer.out_proj.weight.copy_(oracle.to_out.weight)
        layer.out_proj.bias.copy_(oracle.to_out.bias)
        layer.projections.copy_(torch.stack([oracle.proj_k.T, oracle.proj_v.T]))
    x = torch.randn(3, length, 32, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), oracle(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)

    grad = torch.randn_like(expected)
    ours = torch.autograd.grad(
        actual, (x, layer.in_proj.weight, layer.out_proj.weight, layer.out_proj.bias, layer.projections), grad
    )
    dx, *rest = torch.autograd.grad(
        expected, (x, *theirs, oracle.to_out.weight, oracle.to_out.bias, oracle.proj_k, oracle.proj_v), grad
    )
    wanted = dx, torch.cat(rest[:3]), *rest[3:5], torch.stack([rest[5].T, rest[6].T])
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
