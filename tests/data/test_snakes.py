import functools
import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest

from longlens.data import snakes
from longlens.data.datasets import Stream
from longlens.data.snakes import PATH_X, PATHFINDER_32, Layout, Style, draw, layout, paint

SMALL = Style(size=16, contour=6, distractors=2, distractor_length=2, distractor_tries=9, gap=(1.0,), seed_distance=4.0)
STYLES = pytest.mark.parametrize("style", [PATHFINDER_32, PATH_X, SMALL], ids=["32", "128", "16"])


@pytest.fixture(scope="module")
def many() -> tuple[np.ndarray, Layout]:
    plan = layout(Stream("many"), 8000)
    return paint(plan, PATHFINDER_32), plan


@functools.lru_cache
def plan_of(style: Style) -> Layout:
    return layout(Stream("plan"), 64, style)


def tips(plan: Layout, snake: int) -> tuple[np.ndarray, np.ndarray]:
    """The origin (N, 2) and the far end (N, 2) of a snake."""
    slots = np.flatnonzero(plan.snakes == snake)
    return plan.paddles[:2, :, slots[0]].T, plan.paddles[2:, :, slots[-1]].T


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N,) distances of segments (4, N), by a witness of its own: the minimum of a quadratic over the unit square.

    |(p + s u) − (q + t v)|² is convex, so alternating between the best s and the best t comes down to it.
    """
    (p, u), (q, v) = (np.stack([z[:2], z[2:] - z[:2]]) for z in (a, b))
    t = np.full(a.shape[1], 0.5)
    for _ in range(60):
        s = np.clip(((q + t * v - p) * u).sum(0) / (u * u).sum(0), 0, 1)
        t = np.clip(((p + s * u - q) * v).sum(0) / (v * v).sum(0), 0, 1)
    return np.sqrt(((p + s * u - q - t * v) ** 2).sum(0))


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether segments (4, …) cross: each has the ends of the other on both sides."""

    def side(line: np.ndarray, point: np.ndarray) -> np.ndarray:
        return (line[2] - line[0]) * (point[1] - line[1]) - (line[3] - line[1]) * (point[0] - line[0])

    return (side(a, b[:2]) * side(a, b[2:]) < 0) & (side(b, a[:2]) * side(b, a[2:]) < 0)


@pytest.mark.parametrize(
    ("style", "digest"),
    [
        (PATHFINDER_32, "2c3b3a8087dbc5a2aba7df882e394c2105bccb37780454645a09738b96228e9a"),
        (PATH_X, "aeda294e60b5790a008017365685d525e70484c35d6b76ee072bbd66d00536cf"),
    ],
    ids=["32", "128"],
)
def test_the_bytes_are_fixed(style, digest):
    """These digests are a promise: data sets made elsewhere, and by later versions, are the same."""
    images, labels = draw(Stream("promise", 1), 16, style)
    assert images.dtype == labels.dtype == np.uint8
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == digest


def test_directions_and_bends_do_not_depend_on_the_last_bit_of_a_cosine():
    exact = np.cos(2 * np.pi * np.arange(1024) / 1024) * 2**30
    away = np.abs(exact - np.floor(exact) - 0.5)  # from where rounding goes the other way
    assert away.min() > 1e-5
    np.testing.assert_allclose(snakes._COS**2 + snakes._SIN**2, 1, atol=4e-9)


@STYLES
def test_shapes_and_alternating_labels(style):
    images, labels = draw(Stream("shape"), 10, style)
    assert images.shape == (10, style.size, style.size)
    assert labels.tolist() == [1, 0] * 5


@pytest.mark.slow
@STYLES
def test_markers_are_on_the_ends_of_one_snake_if_and_only_if_the_label_is_1(style):
    plan = plan_of(style)
    origin, far = plan.markers
    at_origin = np.stack([(origin == tips(plan, snake)[0]).all(1) for snake in (0, 1)])
    at_end = np.stack([(far == tips(plan, snake)[1]).all(1) for snake in (0, 1)])
    assert (at_origin.sum(0) == 1).all()
    assert (at_end.sum(0) == 1).all()
    assert ((at_origin == at_end).all(0) == (plan.labels == 1)).all()
    assert (np.sqrt(((origin - far) ** 2).sum(1)) > 2 * style.marker_radius).all()
    assert at_origin[:, plan.labels == 1].any(1).all()  # either snake is marked now and then
    assert at_origin[:, plan.labels == 0].any(1).all()
    both = [tips(plan, snake)[0] for snake in (0, 1)]
    apart = np.sqrt(((both[0] - both[1]) ** 2).sum(1))
    assert np.abs(apart - style.seed_distance).max() < 1.5  # both are rounded to pixels


@STYLES
def test_snakes_are_chains_of_paddles_with_gaps_and_bends_as_promised(style):
    plan = plan_of(style)
    assert (np.bincount(plan.snakes)[:2] == style.contour).all()
    assert (np.bincount(plan.snakes)[2:] == style.distractor_length).all()
    assert len(np.bincount(plan.snakes)) == 2 + style.distractors
    for snake in range(2 + style.distractors):
        slots = np.flatnonzero(plan.snakes == snake)
        present = plan.present[:, slots]
        assert (present.all(1) == present.any(1)).all()  # a distractor is complete or absent
        paddles = plan.paddles[:, present.all(1)][:, :, slots]
        along = paddles[2:] - paddles[:2]
        np.testing.assert_allclose(np.sqrt((along**2).sum(0)), style.paddle_length, rtol=1e-8)
        cosine = (along[..., 1:] * along[..., :-1]).sum(0) / style.paddle_length**2
        bend = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
        assert (bend < style.max_bend + 15).all()  # rounding to pixels bends a little more
        between = paddles[:2, :, 1:] - paddles[2:, :, :-1]
        assert (np.sqrt((between**2).sum(0)) < max(style.gap) + 0.71).all()


@STYLES
def test_paddles_that_are_not_neighbors_keep_the_clearance(style):
    plan = plan_of(style)
    slots = len(plan.snakes)
    order = np.array([np.count_nonzero(plan.snakes[:slot] == plan.snakes[slot]) for slot in range(slots)])
    pairs = [
        (i, j)
        for i in range(slots)
        for j in range(i)
        if plan.snakes[i] != plan.snakes[j] or abs(order[i] - order[j]) != 1
    ]
    first, second = np.array(pairs).T
    both = (plan.present[:, first] & plan.present[:, second]).ravel()
    a, b = (plan.paddles[:, :, which].reshape(4, -1)[:, both] for which in (first, second))
    middle = (a[:2] + a[2:] - b[:2] - b[2:]) / 2
    near = (middle**2).sum(0) < (style.clearance + style.paddle_length + 1) ** 2
    least = distances(a[:, near], b[:, near]).min()
    assert style.clearance - 1e-9 <= least < style.clearance + 0.1
    assert not cross(a, b).any()


@STYLES
def test_the_two_curves_never_cross_not_even_in_a_gap(style):
    plan = plan_of(style)
    curves = []
    for snake in (0, 1):
        slots = np.flatnonzero(plan.snakes == snake)
        points = np.stack([plan.paddles[:2, :, slots], plan.paddles[2:, :, slots]], axis=-1).reshape(2, 64, -1)
        curves.append(np.concatenate([points[:, :, :-1], points[:, :, 1:]]))  # (4, 64, paddles and gaps)
    assert not cross(curves[0][:, :, :, None], curves[1][:, :, None, :]).any()


@STYLES
def test_different_snakes_share_no_pixel_and_nothing_is_on_the_padding(style):
    plan = plan_of(style)
    unmarked = replace(style, marker_contrast=0.0)
    first, second, others = (
        paint(replace(plan, present=plan.present & which), unmarked)
        for which in (plan.snakes == 0, plan.snakes == 1, plan.snakes > 1)
    )
    assert min(first.max(), second.max(), others.max()) > 100
    assert not ((first > 0) & (second > 0)).any()
    assert not ((np.maximum(first, second) > 0) & (others > 0)).any()
    edge = int(style.padding)
    whole = paint(plan, style)
    whole[:, edge:-edge, edge:-edge] = 0
    assert whole.max() == 0
    inside = plan.paddles[:, plan.present]
    assert inside.min() >= style.padding + style.thickness / 2
    assert inside.max() <= style.size - style.padding - style.thickness / 2
    assert plan.markers.min() >= style.padding + style.marker_radius
    assert plan.markers.max() <= style.size - style.padding - style.marker_radius


@pytest.mark.slow
def test_images_look_like_those_of_the_original(many):
    """Thirty images of the original generator have a mean of 19.0 and 16 % of lit pixels; the deviation is 2.2."""
    images, _ = many
    assert 17 < images.mean() < 21
    assert 0.13 < (images > 10).mean() < 0.17
    assert 1.5 < images.mean((1, 2)).std() < 3
    assert (images.reshape(len(images), -1).max(1) == 255).all()
    covered = (images > 10).mean(0)  # the curves go everywhere, though seldom to the corners
    assert covered[2:-2, 10:-10].min() > 0.1
    assert covered[10:-10, 2:-2].min() > 0.1
    # An upright paddle is one column of three pixels, as in the original: 137, 197, 155.
    paddles = np.array([8.5, 8.5, 8.5, 10.5]).reshape(4, 1, 1)
    one = Layout(paddles, np.array([0]), np.ones((1, 1), bool), np.full((2, 1, 2), 20.5), np.ones(1, np.uint8))
    image = paint(one, PATHFINDER_32)[0, :14, :14]
    assert image[8:11, 8].tolist() == [143, 191, 143]
    assert image.sum() == 143 + 191 + 143


@pytest.mark.slow
def test_no_two_images_are_the_same(many):
    images, _ = many
    assert len({image.tobytes() for image in images}) == len(images)
    assert draw(Stream("many", 1), 4)[0].tobytes() != draw(Stream("many", 2), 4)[0].tobytes()


def features(images: np.ndarray, plan: Layout, size: int = 32) -> np.ndarray:
    """(N, F) simple statistics: ink, lit pixels, variance, where the markers are, and what is around them."""
    flat = images.reshape(len(images), -1).astype(float)
    origin, far = plan.markers
    step = far - origin
    columns = [flat.mean(1), flat.var(1), (flat > 10).mean(1), (flat > 200).mean(1)]
    columns += [np.sqrt((step**2).sum(1)), np.abs(step).min(1), np.abs(step).max(1)]
    middle = (origin + far) / 2
    for point in (origin, far, middle):
        columns += [np.sqrt(((point - size / 2) ** 2).sum(1)), np.minimum(point, size - point).min(1)]
    columns += [np.sqrt(((origin + far - size) ** 2).sum(1)), ((origin - size / 2) * (far - size / 2)).sum(1)]
    framed = np.pad(images, ((0, 0), (8, 8), (8, 8))).astype(float)
    for point in (origin, far, middle):
        column, row = np.floor(point).astype(int).T
        for reach in (2, 4, 6):
            around = np.arange(8 - reach, 9 + reach)
            which = np.arange(len(images))[:, None, None]
            window = framed[which, (row[:, None] + around)[:, :, None], (column[:, None] + around)[:, None, :]]
            columns.append(window.mean((1, 2)))
    return np.stack(columns, axis=1)


def accuracy(x: np.ndarray, y: np.ndarray) -> float:
    """Of a logistic regression on standardized features and their squares, fit on one half, tested on the other."""
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    x = np.concatenate([np.ones((len(x), 1)), x, x * x - 1], axis=1)
    half = len(x) // 2
    weight = np.zeros(x.shape[1])
    for _ in range(8):  # Newton's method, with a little ridge
        p = 1 / (1 + np.exp(-np.clip(x[:half] @ weight, -30, 30)))
        hessian = (x[:half] * (p * (1 - p))[:, None]).T @ x[:half] + np.eye(x.shape[1])
        weight += np.linalg.solve(hessian, x[:half].T @ (y[:half] - p) - weight)
    return float(((x[half:] @ weight > 0) == y[half:]).mean())


def distance_gap(plan: Layout) -> float:
    """By how many pixels the markers of positives are farther apart than those of negatives, on average."""
    distance = np.sqrt(((plan.markers[0] - plan.markers[1]) ** 2).sum(1))
    return float(distance[plan.labels == 1].mean() - distance[plan.labels == 0].mean())


@pytest.mark.slow
def test_simple_statistics_do_not_tell_the_label(many):
    images, plan = many
    x = features(images, plan)
    assert abs(accuracy(x, plan.labels) - 0.5) < 0.02
    assert abs(distance_gap(plan)) < 0.05


@pytest.mark.slow
def test_the_regression_finds_a_bias_where_there_is_one(many, monkeypatch):
    images, plan = many
    positive = plan.labels[:, None, None] == 1
    brighter = np.where(positive, paint(plan, replace(PATHFINDER_32, contrast=1.52)), images)
    assert accuracy(features(brighter, plan), plan.labels) > 0.55
    pair = snakes._pair
    monkeypatch.setattr(snakes, "_pair", lambda stream, labels, bins: pair(stream, labels, np.zeros_like(bins)))
    naive = layout(Stream("naive"), 4000, replace(PATHFINDER_32, distractors=0))  # any positive with any negative
    assert abs(distance_gap(naive)) > 0.3


@pytest.mark.parametrize(
    ("style", "count", "sentence"),
    [
        (Style(size=12, contour=40), 2, "snakes of 40 paddles hardly fit into 12 × 12 pixels"),
        (Style(size=8), 2, "choose a larger size or a smaller contour"),
        (Style(), 3, "count must be an even number of at least 2, got 3"),
        (Style(), 0, "count must be an even number of at least 2, got 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(style, count, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        draw(Stream("impossible"), count, style)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"contour": 1}, "needs positive lengths and counts"),
        ({"max_bend": 200.0}, "max_bend up to 180"),
        ({"gap": ()}, "needs positive lengths and counts"),
        ({"clearance": 1.0}, "clearance must be above paddle_length / 2, where paddles cross, got 1"),
    ],
)
def test_a_style_that_makes_no_sense_is_refused(change, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        replace(PATHFINDER_32, **change)


def test_a_size_of_16_with_fewer_paddles():
    images, labels = draw(Stream("sixteen"), 4, Style(size=16, contour=6, distractors=2))
    assert images.shape == (4, 16, 16)
    assert labels.tolist() == [1, 0, 1, 0]


def test_no_distractors_by_option():
    plan = layout(Stream("few"), 4, replace(PATHFINDER_32, distractors=0))
    assert plan.present.shape == (4, 28)
    assert paint(plan, PATHFINDER_32).shape == (4, 32, 32)
