"""What holds for every mixer of the zoo: the properties of ``longlens.testing``, and what each says of itself."""

import pytest

from longlens.mixers.registry import choose_mixer, find_mixer, list_mixers
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


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_says_what_it_is(name):
    chosen = find_mixer(name)
    assert chosen.name == choose_mixer(name).name == name
    assert chosen.traits is not None
    assert chosen.summary
    assert not chosen.summary.endswith(".")
    assert chosen.size_note is None or len(chosen.size_note) > 20
