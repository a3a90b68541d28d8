"""Options: what each type admits, and the one form of sentence about what it does not."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from longlens.errors import BadInput
from longlens.options import (
    LARGEST,
    REQUIRED,
    Count,
    Even,
    Fraction,
    NonNegative,
    Odd,
    OneOrEven,
    Option,
    Options,
    Positive,
    Probability,
    Ratio,
    Seed,
    Several,
    Size,
    allowed,
    check_options,
    nearest,
    options_of,
    shorten,
    without_none,
)

INF = float("inf")
HUGE = [10**30, -(10**30), 10**5000, "1" * 5000, float("nan"), INF, -INF, "nan", "inf", 1e300, True]


@pytest.mark.parametrize(
    ("hint", "given", "wanted"),
    [
        (Count, 0, 0),
        (Size, 1, 1),
        (Size, "12", 12),
        (Size, 2000.0, 2000),
        (Size, LARGEST, LARGEST),
        (Several, 2, 2),
        (Even, 4, 4),
        (Odd, 1, 1),
        (Odd, "5", 5),
        (OneOrEven, 1, 1),
        (OneOrEven, 6, 6),
        (Seed, 2**63 - 1, 2**63 - 1),
        (Positive, "1e-3", 1e-3),
        (Positive, 1, 1.0),
        (NonNegative, 0, 0.0),
        (Probability, 0.999, 0.999),
        (Fraction, 0.5, 0.5),
        (Ratio, 1, 1.0),
        (Size | None, None, None),
        (Size | None, "none", None),
        (Size | None, "None", None),
        (Size | None, "3", 3),
        (Literal["gelu", "none"], "none", "none"),
        (bool, True, True),
        (bool, "false", False),
        (str, "", ""),
        (Path, "a/b", Path("a/b")),
        (Path, Path("a"), Path("a")),
        (str, Path("a"), "a"),
        (Path | None, "none", None),
        (tuple[Size, Size], [1, "2"], (1, 2)),
        (tuple[Size, ...], [], ()),
        (tuple[Size, ...], (3, 4.0), (3, 4)),
        (tuple[bool, ...], [True, False], (True, False)),
        (Size, np.int64(3), 3),
        (Positive, np.float32(0.5), 0.5),
        (tuple[Size, ...], [np.int32(7)], (7,)),
    ],
)
def test_a_value_gets_its_type(hint, given, wanted):
    found = Option("x", hint).check(given)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("hint", "given", "sentence"),
    [
        (Count, -1, "a whole number of at least 0, got -1"),
        (Size, 0, "a whole number of at least 1, got 0"),
        (Size, 2.5, "a whole number of at least 1, got 2.5"),
        (Size, "2.5", "a whole number of at least 1, got 2.5"),
        (Size, "", "a whole number of at least 1, got ''"),
        (Size, None, "a whole number of at least 1, got None"),
        (Size, "none", "a whole number of at least 1, got none"),
        (Size, [1], "a whole number of at least 1, got [1]"),
        (Several, 1, "a whole number of at least 2, got 1"),
        (Even, 3, "an even number of at least 2, got 3"),
        (Even, 0, "an even number of at least 2, got 0"),
        (Odd, 4, "an odd number of at least 1, got 4"),
        (OneOrEven, 3, "1 or an even number of at least 2, got 3"),
        (Seed, -1, "a whole number from 0 to 2^63 - 1, got -1"),
        (Seed, 2**63, f"a whole number from 0 to 2^63 - 1, got {2**63}, which is too large"),
        (Positive, 0, "a number above 0, got 0"),
        (Positive, "fast", "a number above 0, got fast"),
        (NonNegative, -0.1, "a number of at least 0, got -0.1"),
        (Probability, 1, "a number of at least 0 and below 1, got 1"),
        (Fraction, 0, "a number between 0 and 1, got 0"),
        (Ratio, 1.1, "a number above 0 and at most 1, got 1.1"),
        (Size | None, 0, "a whole number of at least 1 or none, got 0"),
        (Literal["a", "b"], "c", "a or b, got c"),
        (Literal["a", "b", "c"], "d", "one of a, b, c, got d"),
        (bool, "maybe", "true or false, got maybe"),
        (str, 3, "a text, got 3"),
        (Path, 3, "a path, got 3"),
        (Path, "", "a path, got ''"),
        (Path, "a\0b", "a path, got a\0b"),
        (tuple[Size, Size], [1], "2 values, each a whole number of at least 1, got [1]"),
        (tuple[Size, ...], ["1", "0"], "a list, each a whole number of at least 1, got 1 0"),
        (tuple[Size, ...], "12", "a list, each a whole number of at least 1, got 12"),
        (dict[str, int], 3, "a table, got 3"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(hint, given, sentence):
    with pytest.raises(BadInput) as caught:
        Option("x", hint).check(given)
    assert str(caught.value) == f"x must be {sentence}"


@pytest.mark.parametrize("hint", [Count, Size, Several, Even, Odd, OneOrEven, Seed, Size | None])
@pytest.mark.parametrize("given", HUGE, ids=shorten)
def test_no_whole_number_is_absurd(hint, given):
    with pytest.raises(BadInput, match=r"^x must be .*, got ") as caught:
        Option("x", hint).check(given)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hint", [Positive, NonNegative, Probability, Fraction, Ratio, Positive | None])
@pytest.mark.parametrize("given", [*HUGE, "-inf", 1e308, "1e999", False], ids=shorten)
def test_no_number_is_absurd(hint, given):
    with pytest.raises(BadInput, match=r"^x must be .*, got "):
        Option("x", hint).check(given)


@pytest.mark.parametrize("given", [10**30, "99999999999", INF, [1, 10**30]])
def test_what_is_too_large_is_said_to_be(given):
    hint = tuple[Size, ...] if isinstance(given, list) else Size
    with pytest.raises(BadInput, match=r"which is too large$"):
        Option("x", hint).check(given)


@pytest.mark.parametrize("hint", [tuple[Size, ...], tuple[Positive, Positive]])
def test_true_is_no_number_in_a_list_either(hint):
    with pytest.raises(BadInput, match=re.escape("got [True, 2]")):
        Option("x", hint).check([True, 2])


def test_deep_nesting_is_one_sentence():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadInput, match="x must be a list, each a whole number of at least 1, got a value that is too"):
        Option("x", tuple[Size, ...]).check(nested)


@pytest.mark.parametrize("value", ["a\nb", ["a", "b"] * 100, "x" * 1000, {"a": "\n"}, " ", "", None])
def test_a_shown_value_is_one_short_line(value):
    text = shorten(value)
    assert text.strip()
    assert "\n" not in text
    assert len(text) <= 80


def test_a_type_without_none():
    assert without_none(Size | None) == Size


def test_none_is_said_last():
    assert allowed(Size | None) == "a whole number of at least 1 or none"


def test_an_unknown_name_has_a_nearest_one():
    assert nearest("hedas", ["heads", "width"]) == "did you mean 'heads'?"
    assert nearest("zzz", ["heads", "width"]) == "choose from heads, width"
    assert nearest("zzz", []) == "there is none"


@dataclass(frozen=True, kw_only=True)
class Sizes(Options):
    """Two sizes.

    Args:
        width: Width of it,
            in channels.
        rate: Rate.
    """

    width: Size = 4
    rate: Positive | None = None


def test_the_options_of_a_class_are_its_fields():
    options = options_of(Sizes)
    assert [(option.name, option.default) for option in options.values()] == [("width", 4), ("rate", None)]
    assert options["width"].help == "Width of it, in channels."
    assert options["width"].hint == Size


def test_the_options_of_a_function_are_its_parameters():
    def draw(name: str, *, length: Size = 8, **more: int) -> None:
        """Draw.

        Args:
            name: Name of it.
            length: Length of it.
        """

    options = options_of(draw)
    assert list(options) == ["name", "length"]
    assert options["name"].default is REQUIRED
    assert options["name"].positional
    assert not options["length"].positional
    assert [option.help for option in options.values()] == ["Name of it.", "Length of it."]


def test_an_instance_is_checked_however_it_is_made():
    assert Sizes(width=8.0) == Sizes.make({"width": "8"}, "it") == Sizes(width=8)  # pyright: ignore[reportArgumentType]
    assert Sizes.make(Sizes(width=8).values(), "it") == Sizes(width=8)
    for make in (lambda: Sizes(width=0), lambda: Sizes.make({"width": 0}, "it")):
        with pytest.raises(BadInput, match="width must be a whole number of at least 1, got 0"):
            make()
    with pytest.raises(BadInput, match=r"it has no option 'widht'; did you mean 'width'?"):
        Sizes.make({"widht": 8}, "it")


def test_what_has_no_default_must_be_given():
    known = {"path": Option("path", Path), "seed": Option("seed", Seed, 0)}
    with pytest.raises(BadInput, match="task 'files' needs the option 'path'"):
        check_options(known, {"seed": 3}, "task 'files'")
    assert check_options(known, {"path": "a"}, "task 'files'") == {"path": Path("a")}


def test_bad_input_is_a_value_error():
    with pytest.raises(ValueError, match="x must be"):
        Option("x", Size).check(0)
