"""Paddles, the strokes of Pathfinder's curves, and pictures of them, as the original generator draws them.

A paddle is a stamp: one of the few ways in which a stroke of one length meets the grid of pixels. So is its mask, the
stroke grown by a margin. Both are drawn larger and made small by Lanczos's filter, with its faint halo. Positions are
rows and columns, all numbers are integers or exactly rounded, and the bytes are the same everywhere.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

TOUCH = 459  # of 255: the least sum of two masks that touch
ONE = 2**20  # the weight of a step straight on


@dataclass(frozen=True)
class Style:
    """How drawings look: lengths in pixels, contrasts as parts of a marker's. The defaults are Pathfinder-32, hard."""

    size: int = 32
    contour: int = 14  # paddles of a long snake
    distractors: int = 5  # short snakes that are tried
    distractor_length: int = 4  # paddles of a short snake
    length: int = 2  # of a paddle
    thickness: float = 0.5
    margins: tuple[int, ...] = (1,)  # half a gap between paddles; each drawing has one of them
    continuity: float = 1.0  # bends are at most 90° / continuity
    seed_distance: int = 7  # between the origins of the long snakes
    padding: int = 1  # a frame that masks do not touch
    marker_radius: float = 1.5
    scale: int = 2  # how much larger strokes and markers are drawn
    contrast: float = 1.5  # of long snakes; the brightest pixel of an image becomes white
    distractor_contrast: float = 2.0
    cells: int = 8  # to a side of the image; the markers of a positive and of its negative are in the same


PATHFINDER_32 = Style()
PATH_X = Style(
    size=128,
    distractors=17,  # as the arena's image has them: 35 // (6 // 3), where its documentation says 35 // 4
    length=5,
    thickness=1.5,
    margins=(2, 3),
    continuity=1.8,
    seed_distance=20,
    marker_radius=3.0,
    contrast=0.9,
    distractor_contrast=0.9,
    cells=4,
)


@dataclass(frozen=True)
class Stamps:
    """All paddles of a style with one margin, in squares around the pixel from which they are drawn.

    A first paddle points into one of 360 directions, in degrees. A later one is drawn back from its end, to which a
    step leads from the pivot, the middle of the gap before it; directions from 360 on are those of the steps.
    """

    angles: np.ndarray  # (360 + J,): of the directions
    kinds: np.ndarray  # (360 + J,): number of the stamp, by direction
    images: np.ndarray  # (S, side, side) uint8
    masks: np.ndarray  # (S, side, side) uint8
    grown: np.ndarray  # (S, side', side') uint8: the largest mask within the margin, with a rim of zeros
    touching: np.ndarray  # (S, S, side", side") bool: whether two masks touch, by the way from the second to the first
    hard: np.ndarray  # (S, 2, 2): least and largest row and column of the part of a mask that can touch another
    heads: np.ndarray  # (360, 2, 2): from the first pixel of a first paddle to its last, and to its pivot
    steps: np.ndarray  # (J, 2): from a pivot to the end of the paddle
    turns: np.ndarray  # (360 + J, 2): from the pivot of a paddle to that of the next, by direction
    options: np.ndarray  # (360 + J, C): steps that are possible after a direction
    weights: np.ndarray  # (360 + J, C): and how likely they are: cos²(continuity · bend)


@functools.lru_cache
def make_stamps(style: Style, margin: int) -> Stamps:
    around, reach = style.length + margin, style.length + margin + math.ceil(style.thickness)
    degrees = [math.radians(degree) for degree in range(360)]
    arcs = [i / around for i in range(math.ceil(2 * math.pi * around))]  # a pixel apart
    steps = sorted({move(around, arc, math.floor) for arc in arcs})
    headings = [math.atan2(row, column) for row, column in steps]
    angles = np.array(degrees + headings)
    backward = [angle + math.pi for angle in headings]
    strokes = [move(style.length * style.scale, angle) for angle in degrees + backward]
    kinds = sorted(set(strokes))
    drawn = [_draw_stroke(style, margin, reach, kind) for kind in kinds]
    images, masks = (np.stack(part) for part in zip(*drawn, strict=True))
    hard = [np.argwhere(mask >= TOUCH - 255) - reach for mask in masks]
    weights = np.array([[_weight(style, then - now) for then in headings] for now in angles])
    options = np.argsort(weights == 0, axis=1, kind="stable")[:, : (weights > 0).sum(axis=1).max()]
    heads = [move(style.length, angle) for angle in degrees]
    back = [move(around, angle + math.pi) for angle in degrees]
    return Stamps(
        angles=angles,
        kinds=np.array([kinds.index(stroke) for stroke in strokes]),
        images=images,
        masks=masks,
        grown=np.stack([np.pad(grow(np.pad(mask, margin), margin), 1) for mask in masks]),
        touching=_find_touching(masks, hard),
        hard=np.stack([(pixels.min(axis=0), pixels.max(axis=0)) for pixels in hard]),
        heads=np.stack([heads, np.add(heads, back)], axis=1),
        steps=np.array(steps),
        turns=np.array([move(style.length + 2 * margin, angle) for angle in angles]),
        options=options,
        weights=np.take_along_axis(weights, options, axis=1),
    )


def move(distance: int, angle: float, rounded: Callable[[float], int] = math.ceil) -> tuple[int, int]:
    """A vector of whole pixels, mostly rounded up, as in the original. The last bits of a sine do not matter."""
    slack = -1e-9 if rounded is math.ceil else 1e-9
    return rounded(distance * math.sin(angle) + slack), rounded(distance * math.cos(angle) + slack)


def _weight(style: Style, turn: float) -> int:
    bend = abs(math.remainder(turn, 2 * math.pi)) * style.continuity
    return round(ONE * math.cos(min(bend, math.pi / 2)) ** 2)


def _draw_stroke(style: Style, margin: int, reach: int, end: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A stroke from the middle of a square to an end, drawn larger and made small, and its mask."""
    middle, width, (row, column) = reach * style.scale, round(style.thickness * style.scale), end
    rows, columns = np.mgrid[-middle : middle + 1, -middle : middle + 1]
    if width == 1:  # a pixel for each step along the longer side
        steps = max(abs(row), abs(column))
        line = {(_divide(row * i, steps), _divide(column * i, steps)) for i in range(steps + 1)}
        lit = np.isin(rows * 1000 + columns, [y * 1000 + x for y, x in line])
    else:
        along, across, square = rows * row + columns * column, rows * column - columns * row, row**2 + column**2
        lit = (along >= 0) & (along <= square) & (4 * across**2 <= width**2 * square)
    large = np.where(lit, 255, 0)
    return shrink(large, 2 * reach + 1), shrink(grow(large, margin * style.scale), 2 * reach + 1)


def _divide(a: int, b: int) -> int:
    """Rounded, halves away from zero."""
    return int(math.copysign((2 * abs(a) + b) // (2 * b), a))


def _find_touching(masks: np.ndarray, hard: list[np.ndarray]) -> np.ndarray:
    reach = 2 * max(int(abs(pixels).max()) for pixels in hard) + 1
    middle = masks.shape[1] // 2
    values = [mask[tuple((pixels + middle).T)].astype(np.int64) for mask, pixels in zip(masks, hard, strict=True)]
    found = np.zeros((len(masks), len(masks), 2 * reach + 1, 2 * reach + 1), bool)
    for i, own in enumerate(hard):
        for j, other in enumerate(hard):
            first, second = np.nonzero(values[i][:, None] + values[j] >= TOUCH)
            found[i, j][tuple((other[second] - own[first] + reach).T)] = True
    return found


def grow(picture: np.ndarray, radius: int) -> np.ndarray:
    """The largest value within a radius of each pixel of a square."""
    padded, side, around = np.pad(picture, radius), len(picture), range(-radius, radius + 1)
    disk = [(radius + y, radius + x) for y in around for x in around if y * y + x * x <= radius * radius]
    return np.max([padded[y : y + side, x : x + side] for y, x in disk], axis=0)


def shrink(large: np.ndarray, side: int) -> np.ndarray:
    """Make a square small by Lanczos's filter, in fixed point: columns, then rows, each rounded to 8 bits."""
    matrix = _lanczos(len(large), side)
    for _ in range(2):
        large = np.clip((large @ matrix.T + (1 << 21)) >> 22, 0, 255).T
    return large.astype(np.uint8)


@functools.lru_cache
def _lanczos(before: int, after: int) -> np.ndarray:
    """(after, before): weights in parts of 2²²."""
    scale, matrix = before / after, np.zeros((after, before), np.int64)
    for row in range(after):
        middle = (row + 0.5) * scale
        first, last = (min(max(0, int(middle + side * scale + 0.5)), before) for side in (-3, 3))
        weights = [_sinc(x) * _sinc(x / 3) for x in ((i + 0.5 - middle) / scale for i in range(first, last))]
        matrix[row, first:last] = [round(2**22 * weight / sum(weights)) for weight in weights]
    return matrix


def _sinc(x: float) -> float:
    return math.sin(math.pi * x) / (math.pi * x) if x else 1.0


@dataclass(frozen=True)
class Layout:
    """Where everything is in N drawings of one margin, of up to P paddles. Paddles of the long snakes 0 and 1 take
    turns, and those of short snakes follow, snake by snake."""

    margin: int
    pixels: np.ndarray  # (N, P, 2): from which paddles are drawn: an origin of a snake, then the ends of later paddles
    directions: np.ndarray  # (N, P): of the paddles, as in Stamps; -1 where there is none
    markers: np.ndarray  # (N, 2, 2): at an origin and at a far end
    labels: np.ndarray  # (N,) uint8: 1 if both markers are on the same snake


def paint(plan: Layout, style: Style) -> np.ndarray:
    """(N, size, size) uint8 images: of all strokes the brightest in each pixel, scaled so that some pixel is white."""
    stamps, marker = make_stamps(style, plan.margin), _draw_marker(style)
    reach = max(stamps.images.shape[1], len(marker)) // 2
    canvas = np.zeros((len(plan.labels), style.size + 2 * reach, style.size + 2 * reach), np.float32)
    for slot in range(plan.pixels.shape[1]):
        here = np.flatnonzero(plan.directions[:, slot] >= 0)
        contrast = style.contrast if slot < 2 * style.contour else style.distractor_contrast
        light = np.float32(contrast) * stamps.images[stamps.kinds[plan.directions[here, slot]]]
        _lighten(canvas, here, plan.pixels[here, slot] + reach, light)
    for place in plan.markers.swapaxes(0, 1):
        _lighten(canvas, np.arange(len(place)), place + reach, marker[None])
    images = canvas[:, reach:-reach, reach:-reach]
    scaled = images * (np.float32(255) / images.max(axis=(1, 2), keepdims=True))
    return np.floor(scaled + np.float32(0.5)).astype(np.uint8)


def _lighten(canvas: np.ndarray, rows: np.ndarray, middles: np.ndarray, light: np.ndarray) -> None:
    """Raise squares of drawings to the light."""
    around = np.arange(light.shape[1]) - light.shape[1] // 2
    where = rows[:, None, None], middles[:, 0, None, None] + around[:, None], middles[:, 1, None, None] + around
    canvas[where] = np.maximum(canvas[where], light)


@functools.lru_cache
def _draw_marker(style: Style) -> np.ndarray:
    reach, scale = math.ceil(style.marker_radius) + 3, style.scale
    rows, columns = np.mgrid[: (2 * reach + 1) * scale, : (2 * reach + 1) * scale] - reach * scale
    return shrink(np.where(rows**2 + columns**2 <= (style.marker_radius * scale) ** 2, 255, 0), 2 * reach + 1)
