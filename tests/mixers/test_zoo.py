"""What holds for every mixer of the zoo: the properties of ``longlens.testing``, and what each says of itself."""

import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.registry import choose_mixer, create_mixer, find_mixer, layer_is_causal, list_mixers
from longlens.testing import check_property, find_subject, sides
from longlens.testing.properties import PROPERTIES

pytestmark = pytest.mark.zoo

VARIANTS = [
    pytest.param(name, options, id="-".join([name, *("both" if side else "causal" for side in options.values())]))
    for name in list_mixers()
    for options in sides(name)
]
SMOOTH = [name for name in list_mixers() if {"side", "window"} <= set(find_mixer(name).options)]


def outcome(name, check, **options):
    found = check_property(find_subject(name, **options), check)
    assert found.passed is not False, f"{found.name}: {found.detail}\n{found.traceback}"
    return found


@pytest.mark.parametrize("check", PROPERTIES)
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_mixer_has_every_property(name, options, check):
    """It may not apply, but for those that are about all layers."""
    found = outcome(name, check, **options)
    if check not in ("causality", "both sides", "residual", "steps"):
        assert found.passed, found.detail


@pytest.mark.parametrize(
    ("name", "options"),
    [("local", {"neighbors": 1, "block_size": 4}), ("mega", {"rotary": True}), ("mega-chunk", {"chunk_size": 4})],
)
def test_empty_input_with_other_options(name, options):
    assert outcome(name, "empty input", **options).passed


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_mixer_is_causal_or_sees_both_sides(name, options):
    both = ("las-bidirectional", "s4-bidirectional", "s4-v2", "linformer", "reformer-arena")
    bidirectional = options.get("bidirectional", name in both)
    assert outcome(name, "causality", **options).passed is (None if bidirectional else True)
    assert outcome(name, "both sides", **options).passed is (True if bidirectional else None)


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("side", ["past", "centered"])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_centered_window_sees_both_sides(name, side, window):
    ahead = (side == "centered" and window > 1) or name == "las-bidirectional"
    found = [outcome(name, check, side=side, window=window).passed for check in ("causality", "both sides")]
    assert found == ([None, True] if ahead else [True, None])


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_what_is_no_tensor_of_floating_point_numbers_is_refused(name, options):
    layer = create_mixer(name, 16, **options)
    calls = [layer, layer.step] if hasattr(layer, "step") and layer_is_causal(layer) else [layer]
    for call in calls:
        with pytest.raises(TypeError, match="x must be a Tensor, got a NoneType"):
            call(None)
        with pytest.raises(TypeError, match=r"x must be a floating-point tensor, got torch\.int64"):
            call(torch.ones(2, 5, 16, dtype=torch.long))


@pytest.mark.parametrize("name", ["s4", "s4d", "dss", "dlr", "h3", "lssl", "lru", "s5"])
def test_only_the_first_step_computes_what_all_need(name):
    layer, x = create_mixer(name, 16), torch.randn(2, 16)
    _, state = layer.step(x)
    layer.constants = None
    _, following = layer.step(x, state)
    assert following[0] is state[0]


@pytest.mark.parametrize("name", ["lru", "s5", "lstm", "transformer", "las"])
def test_a_text_may_begin_with_nothing(name):
    layer, x = create_mixer(name, 16).eval(), torch.randn(2, 1, 16)
    first, state = layer.prefill(x[:, :0])
    assert first.shape == (2, 0, 16)
    torch.testing.assert_close(layer.step(x[:, 0], state)[0], layer(x)[:, 0])


@pytest.mark.parametrize("name", ["lru", "s5", "transformer"])
def test_only_a_causal_layer_begins_a_text(name):
    with pytest.raises(BadInput, match="prefill needs a causal layer: this one sees both sides"):
        create_mixer(name, 16, bidirectional=True).prefill(torch.randn(2, 5, 16))


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_says_what_it_is(name):
    chosen = find_mixer(name)
    assert chosen.name == choose_mixer(name).name == name
    assert chosen.traits is not None
    assert chosen.summary
    assert not chosen.summary.endswith(".")
    assert chosen.size_note is None or len(chosen.size_note) > 20
