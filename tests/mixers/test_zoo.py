"""What holds for every mixer of the zoo, with the small options below on which each part shows at short lengths."""

import pytest
import torch

from longlens.mixers.base import create_mixer, list_mixers, mixer_class, mixer_config
from longlens.mixers.common import has_kernel
from longlens.options import option_names

WIDTH, LENGTH = 16, 27


@pytest.fixture
def build(small_options):
    def make(name, **options):
        config = mixer_config(name, **small_options(name, **options))
        torch.manual_seed(0)
        return config, config.build(WIDTH, max_length=40, dtype=torch.float64).eval()

    return make


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


def tolerance(config, layer) -> float:
    """An FFT spreads rounding errors over the whole sequence, and sorting tokens changes the order in which numbers are
    added. Nothing else may leak at all."""
    return 1e-10 if has_kernel(layer) or config.traits.cost == "L log L" else 0.0


@pytest.mark.parametrize(("name", "options"), sides())
def test_causal_layers_are_causal_and_others_see_both_sides(build, name, options):
    config, layer = build(name, **options)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    before, largest = layer(x), 0.0
    for t in range(1, LENGTH):
        changed = x.clone()
        changed[:, t:] = 3 * torch.randn_like(changed[:, t:])
        after = layer(changed)
        largest = max(largest, (after[:, :t] - before[:, :t]).abs().max().item())
        assert (after[:, t] - before[:, t]).abs().max() > 1e-6, "it sees its own token"
    if config.looks_ahead() is None:
        assert largest <= tolerance(config, layer)
    else:
        assert largest > 1e-6


@pytest.mark.parametrize(("name", "options"), sides())
def test_the_past_matters(build, name, options):
    _, layer = build(name, **options)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    changed = x.clone()
    changed[:, LENGTH - 3] += 1.0
    assert (layer(changed)[:, -1] - layer(x)[:, -1]).abs().max() > 1e-9


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "options"), sides())
def test_padding_changes_nothing(build, name, options, training):
    """Neither its length nor what is in it, be it not a number, for outputs and gradients."""
    _, layer = build(name, **options)
    layer.train(training)
    lengths = (LENGTH, 1, 13, 0)
    x = torch.randn(len(lengths), LENGTH, WIDTH, dtype=torch.float64)
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    together, ill = (layer(torch.where(mask[..., None], x, filling), mask=mask) for filling in (1e3, torch.nan))
    assert together.isfinite().all()
    assert torch.equal(ill[mask], together[mask])
    alone = torch.zeros_like(together)
    for row, length in enumerate(lengths):
        if length:
            alone[row, :length] = layer(x[row : row + 1, :length])[0]
    weight = torch.randn_like(together) * mask[..., None]
    torch.testing.assert_close(together * mask[..., None], alone, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad((y * weight).sum(), list(layer.parameters())) for y in (together, alone)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "options"), sides())
def test_step_by_step_is_the_whole(build, name, options):
    config, layer = build(name, **options)
    if not hasattr(layer, "step"):
        assert config.traits.state is None
        pytest.skip(f"{name} has no step")
    assert config.traits.state is not None or config.looks_ahead() is not None
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    if config.looks_ahead() is not None:
        with pytest.raises(ValueError, match="causal"):
            layer.step(x[:, 0])
        return
    state, outputs = None, []
    with torch.no_grad():
        for t in range(LENGTH):
            output, state = layer.step(x[:, t], state)
            outputs.append(output)
        torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x), rtol=0, atol=1e-8)
        again = [layer.step(x[:, 0], state)[0] for _ in range(2)]
        assert torch.equal(*again), "a step leaves the state that it is given as it is"


@pytest.mark.parametrize("name", list_mixers())
def test_bfloat16_autocast_is_finite(build, name):
    _, layer = build(name)
    layer = layer.float()
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.isfinite().all()
    output.float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", list_mixers())
def test_the_optimizer_and_fsdp_can_take_its_parameters(name):
    layer = create_mixer(name, 32, max_length=40)
    names = dict(layer.named_parameters())
    for parameter in names.values():
        assert parameter.ndim > 0
        assert not parameter.is_complex()
    for path, module in layer.named_modules():
        for special in getattr(module, "special_parameters", ()):
            assert f"{path}.{special}".removeprefix(".") in names


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_says_what_it_is(name):
    chosen = mixer_class(name)
    assert chosen.traits is not None
    assert chosen.summary
    assert not chosen.summary.endswith(".")
