"""No token, or no sequence: nothing comes out, with the right shape."""

import pytest
import torch

from longlens.mixers.base import list_mixers, mixer_class, mixer_config
from longlens.options import option_names

WIDTH = 16


def sides():
    """Every mixer, for one side and for both if it can be either."""
    found = []
    for name in list_mixers():
        if "bidirectional" in option_names(mixer_class(name)):
            found.append(pytest.param(name, {"bidirectional": False}, id=f"{name}-causal"))
            found.append(pytest.param(name, {"bidirectional": True}, id=f"{name}-both"))
        else:
            found.append(pytest.param(name, {}, id=name))
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)], ids=str)
@pytest.mark.parametrize(("name", "options"), sides())
def test_nothing_in_nothing_out(small_options, name, options, shape, masked):
    layer = mixer_config(name, **small_options(name, **options)).build(WIDTH, max_length=40)
    x = torch.randn(*shape, WIDTH, requires_grad=True)
    output = layer(x, mask=torch.ones(shape, dtype=torch.bool) if masked else None)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for parameter in layer.parameters():
        assert parameter.grad is None or not parameter.grad.any()
