"""Derivatives beyond the gradient are right, or refused: never silently 0."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from longlens import las_attention
from longlens.mixers.registry import create_mixer, list_mixers


@contextmanager
def may_refuse(*words: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # NotImplementedError is one, too
        if not any(said in str(error) for said in words):
            raise


def layer_and_input(name: str) -> tuple[torch.nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = create_mixer(name, 16, max_length=8, dtype=torch.float64)
    x, direction = torch.randn(2, 1, 8, 16, dtype=torch.float64)
    return layer, x, direction


@pytest.mark.zoo
@pytest.mark.parametrize("name", list_mixers())
def test_second_derivatives_are_right_or_refused(name):
    layer, x, direction = layer_and_input(name)

    def loss(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(loss(x), x)[0]

    with may_refuse("gradients of gradients", "derivative for", "no autograd formula"):
        _, found = torch.autograd.functional.hvp(loss, x, direction)
        ahead, behind = ((x + side * 1e-5 * direction).requires_grad_() for side in (1, -1))
        torch.testing.assert_close(found, (gradient(ahead) - gradient(behind)) / 2e-5, rtol=1e-6, atol=1e-6)


@pytest.mark.zoo
@pytest.mark.parametrize("name", list_mixers())
def test_derivatives_in_forward_mode_are_right_or_refused(name):
    layer, x, direction = layer_and_input(name)
    with may_refuse("forward mode", "forward AD", "setup_context"):
        _, found = torch.func.jvp(layer, (x,), (direction,))
        expected = (layer(x + 1e-6 * direction) - layer(x - 1e-6 * direction)) / 2e-6
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"is_causal": False}, {"backend": "linear"}, {}], ids=["both-sides", "linear", "steep decay"]
)
@pytest.mark.parametrize("transform", [torch.func.jacfwd, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]])
def test_our_operators_refuse_forward_mode(transform, options):
    x = torch.randn(1, 1, 1024, 1, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"forward mode .* are not available"):
        transform(lambda value: las_attention(x, x, value, decay=[0.2], **options))(x)
