"""Curves in panels: any names, lengths and numbers of classes and channels."""

import numpy as np
import pytest
from PIL import Image

from longlens.errors import BadInput
from longlens.reports.curves import MOST_PANELS, draw_curves


def drawn(tmp_path, groups, channels=("channel 1",)):
    out = tmp_path / "new" / "curves.png"
    assert draw_curves(groups, channels, "a $title", out) == f"written to {out}"
    with Image.open(out) as picture:
        return picture.size


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$", r"$\frac{", "a\nb\x07", "名前🙂", "_", "x" * 500, ""])
def test_a_class_may_have_any_name(tmp_path, name):
    drawn(tmp_path, {name: [np.ones((5, 1))], "other": [np.zeros((1, 1))]})


def test_a_curve_may_be_short_long_or_large(tmp_path):
    lengths = (1, 2, 100_003)
    noise = np.random.default_rng(0)
    drawn(tmp_path, {"a": [noise.normal(size=(length, 1)) for length in lengths], "b": [np.full((3, 1), 3e38)]})


def test_classes_are_below_each_other_where_there_are_channels(tmp_path):
    groups = {name: [np.ones((5, 2))] for name in "abcd"}
    wide, tall = drawn(tmp_path, {name: [np.ones((5, 1))] for name in "abcd"}), drawn(tmp_path, groups, ("u", "v"))
    assert wide[0] > tall[0]  # three panels in a row
    assert wide[1] < tall[1]


def test_many_classes_are_not_all_drawn(tmp_path):
    groups = {str(number): [np.ones((5, 1))] for number in range(100)}
    few = dict(list(groups.items())[:MOST_PANELS])
    assert drawn(tmp_path, groups) == drawn(tmp_path, few)


def test_a_picture_must_end_as_one(tmp_path):
    with pytest.raises(BadInput, match=r"out must end in .png, .pdf or .svg"):
        draw_curves({"a": [np.ones((5, 1))]}, ["channel 1"], "title", tmp_path / "x.csv")
