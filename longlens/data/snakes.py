"""Pathfinder images (Linsley et al. 2018, https://arxiv.org/abs/1805.08315): are two markers on the same dashed curve?

A drawing has two long snakes, chains of paddles (short strokes), that start near each other in the middle, and some
short ones that distract. One marker sits on the origin of a long snake, the other on the far end of the same snake
(label 1) or of the other one (label 0). Curves grow by the rules of the original generator, but never cross, which they
do in a third of its images of 32 × 32 pixels. All drawings of a pool grow at once, and every operation is exactly
rounded, so that the bytes are the same everywhere.

Positions are x and y in pixels; the pixel in row i and column j is the square from (j, i) to (j + 1, i + 1).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from longlens.data.datasets import Stream
from longlens.errors import BadInput
from longlens.options import Even, Option

_POOL = 1024  # drawings that grow together
_PROPOSALS = 4  # of each kind for a new paddle; the first that fits is taken
_PATIENCE = 6  # steps for each paddle of the long snakes before a drawing is given up
_FAR = -1e6  # where paddles are that do not exist (yet): in nobody's way
_CAP = 0.25  # pixels by which paint sticks out at each end of a paddle, as the original fills both end pixels of a line
_BINS = (32, 16, 8)  # to a side of the image: of the distance of the markers, and of each from the center
_TURN = 1024  # directions in a full turn; rounded, as the last bit of a cosine is not the same on all machines
_COS = np.array([round(math.cos(2 * math.pi * i / _TURN) * 2**30) for i in range(_TURN)]) * 2.0**-30
_SIN = np.roll(_COS, _TURN // 4)


@dataclass(frozen=True)
class Style:
    """How drawings look: lengths in pixels, contrasts as parts of white. The defaults are Pathfinder-32, hard."""

    size: int = 32
    contour: int = 14  # paddles of a long snake
    distractors: int = 5  # short snakes, at most: one that finds no room is left out, as in the original
    distractor_length: int = 4  # paddles of a short snake
    distractor_tries: int = 2  # before it is left out
    paddle_length: float = 2.0
    thickness: float = 0.5
    gap: tuple[float, ...] = (2.0,)  # between the paddles of a straight snake; each drawing picks one
    clearance: float = 2.0  # least distance between the center lines of paddles that are not neighbors in a snake
    max_bend: float = 90.0  # degrees; the angle between neighbors has a density ∝ cos²(90° · angle / max_bend)
    marker_radius: float = 1.5
    seed_distance: float = 7.0  # between the origins of the long snakes, up to rounding to pixels
    padding: float = 1.0  # a dark frame
    contrast: float = 1.5  # of long snakes, clipped at white: a stroke thinner than a pixel covers but a part of it
    distractor_contrast: float = 2.0
    marker_contrast: float = 1.0

    def __post_init__(self) -> None:
        lengths = (self.size, self.paddle_length, self.thickness, self.marker_radius, self.seed_distance, *self.gap)
        counts = (self.contour - 1, self.distractor_length, self.distractor_tries, self.distractors + 1, len(self.gap))
        if min(lengths) <= 0 or min(counts) < 1 or not 0 < self.max_bend <= 180:
            raise BadInput(f"a style needs positive lengths and counts, contour from 2, max_bend up to 180, got {self}")
        if self.clearance <= self.paddle_length / 2:
            raise BadInput(f"clearance must be above paddle_length / 2, where paddles cross, got {self.clearance:g}")

    @property
    def wall(self) -> float:
        """How far the ends of paddles stay from the edge, so that no paint (corners, blur) is on the padding."""
        return self.padding + 0.75 * self.thickness + _CAP + 0.21


PATHFINDER_32 = Style()
PATH_X = Style(
    size=128,
    distractors=16,  # as in the arena's image; its documentation says 8
    distractor_tries=6,
    paddle_length=5.0,
    thickness=1.5,
    gap=(4.0, 6.0),
    clearance=5.5,
    max_bend=50.0,
    marker_radius=3.0,
    seed_distance=20.0,
    contrast=0.9,
    distractor_contrast=0.9,
    marker_contrast=0.9,
)


@dataclass(frozen=True)
class Layout:
    """Where everything is in N drawings of up to P paddles."""

    paddles: np.ndarray  # (4, N, P): x, y of the start and x, y of the end, on the way from the origin of the snake
    snakes: np.ndarray  # (P,): the snake of each paddle, the long ones being 0 and 1; paddles of a snake are in order
    present: np.ndarray  # (N, P): false for distractors that were left out
    markers: np.ndarray  # (2, N, 2): x, y of the marker at an origin and x, y of the marker at a far end
    labels: np.ndarray  # (N,) uint8: 1 if both markers are on the same snake


def draw(stream: Stream, count: int, style: Style = PATHFINDER_32) -> tuple[np.ndarray, np.ndarray]:
    """(count, size, size) uint8 images and (count,) uint8 labels, alternating 1, 0, 1, 0 …"""
    plan = layout(stream, count, style)
    return paint(plan, style), plan.labels


def layout(stream: Stream, count: int, style: Style = PATHFINDER_32) -> Layout:
    """Grow drawings until there are enough, and pair positives with negatives whose markers are alike in position.

    Unpaired, the distance of the markers would tell something of the label: those of a negative are on two snakes.
    Large counts are cheaper for each image, as more drawings find a partner.
    """
    Option("count", Even).check(count)  # half of the images are positive
    pools, tried, tally = [], 0, np.zeros((2, 64 * 16 * 16), np.int64)
    while (found := 2 * int(tally.min(axis=0).sum())) < count:
        if tried >= 4096 and 1000 * found < tried:
            raise BadInput(
                f"two snakes of {style.contour} paddles hardly fit into {style.size} × {style.size} pixels "
                f"({tried} attempts gave {found} images): choose a larger size or a smaller contour"
            )
        drawings = min(_POOL, max(256, 8 * (count - found)))
        scene = _add_distractors(stream, style, _grow_long_snakes(stream, style, drawings))
        pools.append(_mark(stream, style, scene))
        np.add.at(tally, pools[-1][2:], 1)
        tried += drawings
    paddles, markers = (np.concatenate([pool[part] for pool in pools], axis=1) for part in (0, 1))
    labels, bins = (np.concatenate([pool[part] for pool in pools]) for part in (2, 3))
    chosen = _pair(stream, labels, bins)[:count]
    long, short = np.arange(2 * style.contour) % 2, np.arange(style.distractors).repeat(style.distractor_length) + 2
    paddles, snakes = paddles[:, chosen], np.concatenate([long, short])
    return Layout(paddles, snakes, paddles[0] > _FAR, markers[:, chosen], labels[chosen].astype(np.uint8))


@dataclass
class _Scene:
    """Unfinished drawings: their paddles (4, n, slots), and half the gap between them (n,)."""

    paddles: np.ndarray
    margin: np.ndarray

    def take(self, which: np.ndarray) -> "_Scene":
        return _Scene(self.paddles[:, which], self.margin[which])


def _grow_long_snakes(stream: Stream, style: Style, drawings: int) -> _Scene:
    """Two long snakes that grow by turns, paddle i of snake s in slot 2i + s; drawings that stay stuck are dropped."""
    total = 2 * style.contour
    gap = np.array(style.gap)[stream.integers(len(style.gap), drawings)]
    scene = _seed(stream, style, _Scene(np.full((4, drawings, total), _FAR), gap / 2))
    slot = np.full(len(scene.margin), 2)  # where each drawing goes on
    for _ in range(_PATIENCE * total):
        growing = np.flatnonzero(slot < total)
        if not len(growing):
            break
        part, at = scene.take(growing), slot[growing]
        found, paddle = _settle(style, part, at, _continue(stream, style, part, at - 2), neighbor=at - 2)
        scene.paddles[:, growing[found], at[found]] = paddle[:, found]
        slot[growing[found]] += 1
        stuck = growing[~found]
        slot[stuck] = np.maximum(2, slot[stuck] - 1 - stream.integers(style.contour // 2 + 1, len(stuck)))
        scene.paddles[:, stuck] = np.where(np.arange(total) < slot[stuck, None], scene.paddles[:, stuck], _FAR)
    return scene.take(slot == total)


def _seed(stream: Stream, style: Style, scene: _Scene) -> _Scene:
    """The first paddles of the long snakes: one near the middle, from which all sides are far, one near the first."""
    shape = (len(scene.margin), _PROPOSALS)
    spread = max(style.size / 2 - 2 * style.seed_distance, style.size / 16)
    origin = style.size / 2 + stream.uniform((2, shape[0], 1), -spread, spread).repeat(_PROPOSALS, axis=2)
    found = np.ones(shape[0], bool)
    for snake, around in enumerate((0.0, style.seed_distance)):
        proposals = _start(stream, style, origin + around * _directions(stream, shape))
        fits, scene.paddles[:, :, snake] = _settle(style, scene, np.full(shape[0], snake), proposals)
        found &= fits
    return scene.take(found)


def _add_distractors(stream: Stream, style: Style, scene: _Scene) -> _Scene:
    """Short snakes at random places, one after the other."""
    drawings, extra = len(scene.margin), style.distractors * style.distractor_length
    scene = _Scene(np.concatenate([scene.paddles, np.full((4, drawings, extra), _FAR)], axis=2), scene.margin)
    for first in range(2 * style.contour, 2 * style.contour + extra, style.distractor_length):
        slots, missing = slice(first, first + style.distractor_length), np.arange(drawings)
        for _ in range(style.distractor_tries):
            if not len(missing):
                break
            part = scene.take(missing)
            done = _grow_distractor(stream, style, part, first)
            scene.paddles[:, missing[done], slots] = part.paddles[:, done, slots]
            missing = missing[~done]
    return scene


def _grow_distractor(stream: Stream, style: Style, scene: _Scene, first: int) -> np.ndarray:
    """Put a short snake into the slots from ``first``; (n,) whether all of it fits."""
    shape = (2, len(scene.margin), _PROPOSALS)
    proposals, neighbor = _start(stream, style, stream.uniform(shape, style.wall, style.size - style.wall)), None
    done = np.ones(shape[1], bool)
    for i in range(first, first + style.distractor_length):
        slot = np.full(shape[1], i)
        fits, scene.paddles[:, :, i] = _settle(style, scene, slot, proposals, neighbor)
        done &= fits
        proposals, neighbor = _continue(stream, style, scene, slot), slot
    return done


def _start(stream: Stream, style: Style, origin: np.ndarray) -> np.ndarray:
    """First paddles (4, n, k) of snakes, from the pixels at (2, n, k) into random directions."""
    start = np.floor(origin) + 0.5
    return np.concatenate([start, start + style.paddle_length * _directions(stream, origin.shape[1:])])


def _continue(stream: Stream, style: Style, scene: _Scene, last: np.ndarray) -> np.ndarray:
    """Next paddles (4, n, k) of the snakes whose last paddles are in slots (n,).

    A snake bends in joints in the middle of its gaps. A paddle ends in the center of a pixel, as in the original: then
    an upright one lights a single column.
    """
    paddle = scene.paddles[:, np.arange(len(last)), last]
    heading = (paddle[2:] - paddle[:2]) / style.paddle_length
    joint = (paddle[2:] + scene.margin * heading)[:, :, None]
    bends, shape = _bends(style.max_bend), (len(last), _PROPOSALS)
    likely, possible = bends[stream.integers(len(bends), shape)], bends[-1] - stream.integers(2 * bends[-1] + 1, shape)
    bend = np.concatenate([likely, possible], axis=1)  # where no likely one fits, at a wall for instance, any will do
    cos, sin, (x, y) = _COS[bend], _SIN[bend], heading[:, :, None]
    turned = np.stack([x * cos - y * sin, x * sin + y * cos])
    end = np.floor(joint + (scene.margin + style.paddle_length)[:, None] * turned) + 0.5
    x, y = end - joint
    heading = np.stack([x, y]) / np.sqrt(x * x + y * y)
    return np.concatenate([end - style.paddle_length * heading, end])


def _directions(stream: Stream, shape: tuple[int, ...]) -> np.ndarray:
    """Random unit vectors (2, *shape)."""
    angle = stream.integers(_TURN, shape)
    return np.stack([_COS[angle], _SIN[angle]])


@functools.lru_cache
def _bends(max_bend: float) -> np.ndarray:
    """Angles in parts of a turn, in order, each as often as it is likely."""
    bends = np.arange(1 - (most := math.ceil(max_bend * _TURN / 360)), most)
    return bends.repeat([math.ceil(64 * math.cos(math.pi / 2 * bend / most) ** 2) for bend in bends.tolist()])


def _settle(
    style: Style, scene: _Scene, slot: np.ndarray, proposals: np.ndarray, neighbor: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The first of the proposed paddles (4, n, k) that fits into slots (n,): if there is one (n,), and it (4, n)."""
    start, end = proposals[:2], proposals[2:]
    ahead = end + (60.0 / style.max_bend) * (end - start)  # who cannot turn fast must not come near a wall head on
    total, disc = 2 * style.contour, max(style.wall, style.padding + style.marker_radius)  # markers need room as well
    room_at_start = np.where(slot < 2, disc, style.wall)[:, None]
    room_at_end = np.where((slot >= total - 2) & (slot < total), disc, style.wall)[:, None]
    fits = np.ones(proposals.shape[1:], bool)
    for points, room in ((start, room_at_start), (end, room_at_end), (ahead, style.wall)):
        inside = (points >= room) & (points <= style.size - room)
        fits &= inside[0] & inside[1]
    _exclude_collisions(style, fits, proposals, scene.paddles[:, :, : slot.max(initial=0)], neighbor)
    drawing, choice = np.arange(len(fits)), fits.argmax(axis=1)
    return fits[drawing, choice], proposals[:, drawing, choice]


def _exclude_collisions(
    style: Style, fits: np.ndarray, proposed: np.ndarray, present: np.ndarray, neighbor: np.ndarray | None
) -> None:
    """Make ``fits`` (n, k) false for paddles (4, n, k) too near to others (4, n, p) of the drawing, bar neighbors."""
    reach = style.paddle_length + style.clearance  # paddles whose middles are farther apart are never too near
    middle, middles = (proposed[:2] + proposed[2:]) / 2, (present[:2] + present[2:]) / 2
    low, high = middle.min(axis=2, keepdims=True) - reach, middle.max(axis=2, keepdims=True) + reach
    near = (middles > low) & (middles < high)
    near = near[0] & near[1]  # (n, p), to any of the k
    if neighbor is not None:
        near[np.arange(len(neighbor)), neighbor] = False
    drawing, other = np.nonzero(near)
    dx, dy = middle[:, drawing] - middles[:, drawing, other][:, :, None]
    pair, proposal = np.nonzero((dx * dx + dy * dy < reach * reach) & fits[drawing])
    drawing, other = drawing[pair], other[pair]
    a, b = proposed[:, drawing, proposal], present[:, drawing, other]
    # The distance of segments is that of an end from the other one, unless they cross: then this is at most half a
    # paddle, which is less than any clearance.
    ends = [_from_point(a, b[:2]), _from_point(a, b[2:]), _from_point(b, a[:2]), _from_point(b, a[2:])]
    bad = functools.reduce(np.minimum, ends) < style.clearance * style.clearance
    fits[drawing[bad], proposal[bad]] = False


def _from_point(segment: np.ndarray, point: np.ndarray) -> np.ndarray:
    """Squared distances (m,) of points (2, m) from segments (4, m)."""
    x, y = segment[2:] - segment[:2]
    px, py = point - segment[:2]
    along = np.clip((px * x + py * y) / (x * x + y * y), 0.0, 1.0)
    dx, dy = px - along * x, py - along * y
    return dx * dx + dy * dy


def _mark(stream: Stream, style: Style, scene: _Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where markers do not touch: paddles (4, n, P), markers (2, n, 2), labels (n,), and bins (n,) of marker positions.

    Markers of the same bin are about as far apart, and as far from the center of the image.
    """
    snake, label = stream.integers(2, (2, len(scene.margin)))
    drawing, last = np.arange(len(snake)), 2 * style.contour - 2 + np.where(label == 1, snake, 1 - snake)
    origin, far = scene.paddles[:2, drawing, snake], scene.paddles[2:, drawing, last]
    center, distance = style.size / 2, _length(far - origin)
    bins = np.zeros(len(snake), np.int64)
    for length, parts in zip((distance, _length(far - center), _length(origin - center)), _BINS, strict=True):
        bins = 16 * bins + np.floor(length * (parts / style.size)).astype(np.int64)
    apart = distance >= 2 * style.marker_radius + 1
    return scene.paddles[:, apart], np.stack([origin.T, far.T])[:, apart], label[apart], bins[apart]


def _length(vector: np.ndarray) -> np.ndarray:
    """(n,) of vectors (2, n)."""
    return np.sqrt(vector[0] * vector[0] + vector[1] * vector[1])


def _pair(stream: Stream, labels: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Drawings, by turns a positive and a negative from the same bin, the pairs in random order."""
    which, keys = [], []
    for label in (1, 0):
        sorted_by_bin = np.flatnonzero(labels == label)
        sorted_by_bin = sorted_by_bin[np.argsort(bins[sorted_by_bin], kind="stable")]
        own = bins[sorted_by_bin]
        rank = np.arange(len(own)) - np.searchsorted(own, own)  # within the bin
        which.append(sorted_by_bin)
        keys.append(own * len(labels) + rank)
    _, positive, negative = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    pairs = np.stack([which[0][positive], which[1][negative]], axis=1)
    return pairs[stream.permutation(len(pairs))].ravel()


def paint(plan: Layout, style: Style) -> np.ndarray:
    """(N, size, size) uint8 images; where strokes overlap, the brightest counts."""
    return np.concatenate([_paint(plan, style, slice(i, i + _POOL)) for i in range(0, len(plan.labels), _POOL)])


def _paint(plan: Layout, style: Style, which: slice) -> np.ndarray:
    half, thick = style.paddle_length / 2 + _CAP, style.thickness / 2
    reach = math.ceil(max(math.hypot(half + 0.5, thick + 0.5), style.marker_radius + 0.5) - 0.5)
    markers = plan.markers[:, which]
    canvas = np.zeros((markers.shape[1], style.size + 2 * reach, style.size + 2 * reach), np.uint8)
    for slot, snake in enumerate(plan.snakes):
        here = np.flatnonzero(plan.present[which, slot])
        paddle = plan.paddles[:, which, slot][:, here]
        dx, dy, pixels = _window(canvas, here, (paddle[:2] + paddle[2:]) / 2, reach)
        ux, uy = ((paddle[2:] - paddle[:2]) / style.paddle_length)[:, :, None, None]
        cover = _overlap(dx * ux + dy * uy, half) * _overlap(dy * ux - dx * uy, thick)
        _lighten(canvas, pixels, (style.contrast if snake < 2 else style.distractor_contrast) * cover)
    for marker in markers:
        dx, dy, pixels = _window(canvas, np.arange(len(marker)), marker.T, reach)
        cover = np.clip(style.marker_radius + 0.5 - np.sqrt(dx * dx + dy * dy), 0.0, 1.0)
        _lighten(canvas, pixels, style.marker_contrast * cover)
    return canvas[:, reach:-reach, reach:-reach]


def _window(
    canvas: np.ndarray, which: np.ndarray, center: np.ndarray, reach: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels around centers (2, m): offsets in x (m, 1, w) and in y (m, w, 1), and places in the canvas (m, w, w).

    The canvas is larger than the image by the reach on each side, so that a window never leaves it.
    """
    side, around = canvas.shape[1], np.arange(-reach, reach + 1)
    column, row = np.floor(center).astype(np.int64)[:, :, None] + around
    dx, dy = column + 0.5 - center[0][:, None], row + 0.5 - center[1][:, None]
    rows = which[:, None] * side + row + reach
    return dx[:, None, :], dy[:, :, None], rows[:, :, None] * side + (column + reach)[:, None, :]


def _overlap(offset: np.ndarray, half: float) -> np.ndarray:
    """How much of a pixel is in a stripe of width 2 · half, at an offset from the middle of the stripe."""
    return np.clip(half + 0.5 - np.abs(offset), 0.0, min(1.0, 2 * half))


def _lighten(canvas: np.ndarray, pixels: np.ndarray, light: np.ndarray) -> None:
    """Raise pixels, all of them different, to the light, of which 1 is white."""
    flat = canvas.reshape(-1)
    flat[pixels] = np.maximum(flat[pixels], np.floor(255 * np.minimum(light, 1.0) + 0.5).astype(np.uint8))
