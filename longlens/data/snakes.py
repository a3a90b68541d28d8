"""Pathfinder images (Linsley et al. 2018, https://arxiv.org/abs/1805.08315): are two markers on the same dashed curve?

A drawing has two long snakes, chains of paddles (short strokes), that start near each other in the middle, and some
short ones that distract. One marker sits on the origin of a long snake, the other on the far end of the same snake
(label 1) or of the other one (label 0). The law of the drawings is that of the original generator:

- A snake goes on from its pivot, the middle of a gap, to a pixel of the circle around it, with a probability
  ∝ cos²(continuity · bend) · (1 − the largest mask within the margin). Its paddle must not touch a mask or the frame.
- A paddle enters the mask when the next one of its snake is there. So the newest paddles of the two long snakes do not
  see each other, and the curves cross in a third of the images of 32 × 32 pixels.
- A drawing in which a long snake is stuck is dropped. A short snake that finds no room is left out.

What is ours: drawings grow together, and each positive has a negative that is alike in what is easily seen.
"""

import functools
import math

import numpy as np

from longlens.data.datasets import Stream
from longlens.data.paddles import ONE, PATHFINDER_32, Layout, Style, grow, make_stamps, move, paint
from longlens.errors import BadInput

_POOL = 4096  # drawings that grow together
_TRIES = 3  # of each new paddle
_SNAKE_TRIES = 5  # of each short snake
_FREE = 76  # of 255: the most of a mask where a snake can begin
_LEAST = 0.0001  # sum of the probabilities, before they are normalized, below which a snake is stuck
_GUESSES = 16  # pixels where a short snake may begin, before all are looked at
_ROUNDS = 20  # of pairing positives with negatives
_FAR = -(10**6)  # where paddles are that do not exist: in nobody's way


def draw(stream: Stream, count: int, style: Style = PATHFINDER_32) -> tuple[np.ndarray, np.ndarray]:
    """(count, size, size) uint8 images and (count,) uint8 labels, alternating 1, 0, 1, 0 …"""
    plans = layouts(stream, count, style)
    order = (2 * stream.permutation(count // 2)[:, None] + np.arange(2)).ravel()
    images = np.concatenate([paint(plan, style) for plan in plans])
    return images[order], np.concatenate([plan.labels for plan in plans])[order]


def layouts(stream: Stream, count: int, style: Style = PATHFINDER_32) -> list[Layout]:
    """Drawings, a positive and a negative by turns, as many of each margin."""
    if count < 2 or count % 2:
        raise BadInput(f"count must be an even number of at least 2, got {count}")
    if style.contour < 2 or style.distractors < 0 or not style.margins:
        raise BadInput(f"a style must have a contour of at least 2, distractors from 0 on and margins, got {style}")
    pairs = np.diff(np.arange(len(style.margins) + 1) * (count // 2) // len(style.margins)).tolist()
    return [_Grower(stream, style, m).layout(2 * n) for m, n in zip(style.margins, pairs, strict=True) if n]


class _Grower:
    """Grows drawings of one margin. Arrays are those of n drawings; paddles are pixels (n, p, 2) and stamps (n, p)."""

    def __init__(self, stream: Stream, style: Style, margin: int):
        self.stream = stream
        self.style = style
        self.margin = margin
        self.stamps = make_stamps(style, margin)
        self.border = len(self.stamps.masks[0]) + margin  # around an image, so that nothing leaves an array
        inner = np.zeros((max(style.size - 2 * style.padding, 0),) * 2, np.uint8)
        self.frame = np.pad(inner, style.padding, constant_values=255)
        self.grown_frame = np.pad(grow(self.frame, margin), self.border, constant_values=255)  # nothing ends outside
        self.option_steps = self.stamps.steps[self.stamps.options]
        reach = max(self.stamps.grown.shape[1], self.stamps.touching.shape[2]) // 2
        self.near = style.length + margin + reach  # farther away from a pivot, nothing is in the way
        self.cores = [self._find_core(mask) for mask in self.stamps.masks]
        self.has_core = np.array([len(core) > 0 for core in self.cores])
        most = max(map(len, self.cores))
        self.core_table = np.stack([np.resize(core, (most, 2)) for core in self.cores])  # some pixels several times
        self.seeds = self._find_seeds()

    def _find_core(self, mask: np.ndarray) -> np.ndarray:
        """(k, 2): where a mask is full, as seen from the pixel before the first, in a window of the original's size.
        Nothing, if it is outside of the image somewhere in the image: then the original finds no place anywhere."""
        core = np.argwhere(mask == 255) - len(mask) // 2 + 1
        core = core[(abs(core) <= self.style.length + self.margin).all(axis=1)]
        corners = ((core * signs >= 0).all(axis=1).any() for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)))
        return core if all(corners) else core[:0]

    def _find_seeds(self) -> list[tuple[int, np.ndarray]]:
        """The directions that a first paddle can have in the middle of the image, and its pixels (m, 2)."""
        size, far = self.style.size, 2 * self.style.seed_distance
        middle = np.zeros((1, size, size), bool)
        middle[:, far : size - far, far : size - far] = True
        free = [self.free(self.with_border(middle), core)[0] for core in self.cores]
        seeds = [(degree, np.argwhere(free[self.stamps.kinds[degree]])) for degree in range(360)]
        seeds = [(degree, pixels) for degree, pixels in seeds if len(pixels)]
        if not seeds:
            raise BadInput(f"size must leave room for two curves in the middle, got {size}: choose a larger one")
        return seeds

    def with_border(self, low: np.ndarray) -> np.ndarray:
        return np.pad(low, [(0, 0), (self.border, self.border), (self.border, self.border)], constant_values=True)

    def free(self, low: np.ndarray, core: np.ndarray) -> np.ndarray:
        """(n, size, size): whether all pixels of a core are low, in drawings with a border."""
        size = self.style.size
        parts = [low[:, y : y + size, x : x + size] for y, x in self.border + core]
        return functools.reduce(np.logical_and, parts) if parts else np.zeros((len(low), size, size), bool)

    def layout(self, count: int) -> Layout:
        """Grow long snakes until there are enough pairs of a positive and a negative, then the short ones of these."""
        style, pools, tried, wanted = self.style, [], 0, 1.3 * count
        chosen = np.empty((0, 2), np.int64)
        while len(chosen) < count:
            pools.append(self.long_snakes(_POOL))
            tried, found = tried + _POOL, sum(len(pixels) for pixels, *_ in pools)
            if tried >= 2**16 and found < tried / 2**14:
                raise BadInput(
                    f"two curves of {style.contour} paddles hardly fit into {style.size} × {style.size} pixels "
                    f"({tried:,} attempts gave {found}): choose a larger size or a smaller contour"
                )
            if found >= wanted:
                pools = [tuple(np.concatenate(part) for part in zip(*pools, strict=True))]
                chosen = self.pair(pools[0][0], pools[0][2])
                wanted = found + max(1, count - len(chosen))
        (pixels, directions, _), (drawing, option) = pools[0], chosen[:count].T
        pixels, directions, rows = pixels[drawing], directions[drawing], np.arange(count)
        markers = np.stack([pixels[rows, option // 2], pixels[rows, 2 * style.contour - 2 + option % 2]], axis=1)
        pixels, directions = self.short_snakes(pixels, directions)
        return Layout(self.margin, pixels, directions, markers, (option // 2 == option % 2).astype(np.uint8))

    def long_snakes(self, drawings: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pixels (n, 2 · contour, 2), directions and ink of those drawings in which both long snakes are whole."""
        stream, style, stamps = self.stream, self.style, self.stamps
        pixels = np.zeros((drawings, 2 * style.contour, 2), np.int64)
        directions = np.zeros((drawings, 2 * style.contour), np.int64)
        seeds = [self.seeds[number] for number in stream.integers(len(self.seeds), drawings)]
        directions[:, 0] = [direction for direction, _ in seeds]
        luck = stream.uniform((drawings,)).tolist()
        pixels[:, 0] = [places[int(part * len(places))] for (_, places), part in zip(seeds, luck, strict=True)]
        ring = np.array([move(style.seed_distance, math.radians(degree), round) for degree in range(360)])
        pixels[:, 1] = pixels[:, 0] + ring[stream.integers(360, drawings)]
        directions[:, 1] = stream.integers(360, drawings)
        begin = self.begins(pixels[:, :2], directions[:, :2]).all(axis=1)
        pixels, directions = pixels[begin], directions[begin]
        pivots = pixels[:, :2] + stamps.heads[directions[:, :2], 1]
        for slot in range(2, 2 * style.contour):
            seen = pixels[:, : slot - 2], stamps.kinds[directions[:, : slot - 2]]
            fits, *found = self.extend(pivots[:, slot % 2], directions[:, slot - 2], *seen)
            pixels, directions, pivots = pixels[fits], directions[fits], pivots[fits]
            pixels[:, slot], directions[:, slot], pivots[:, slot % 2] = found
        plan = Layout(self.margin, pixels, directions, pixels[:, [0, 0]], np.zeros(len(pixels), np.uint8))
        return pixels, directions, paint(plan, style).sum(axis=(1, 2), dtype=np.int64)

    def begins(self, pixels: np.ndarray, directions: np.ndarray) -> np.ndarray:
        """Whether first paddles end in the image, and have their pivots there."""
        ends = pixels[..., None, :] + self.stamps.heads[directions]
        return np.all((ends >= 0) & (ends < self.style.size), axis=(-1, -2))

    def extend(
        self, pivot: np.ndarray, direction: np.ndarray, pixels: np.ndarray, kinds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Whether snakes go on (n,) among the paddles they see; of those that do, the ends, directions and pivots."""
        stamps = self.stamps
        pivot, options = pivot + stamps.turns[direction], stamps.options[direction]
        ends = pivot[:, None] + self.option_steps[direction]
        row, other = np.nonzero(abs(pixels - pivot[:, None]).max(axis=2) < self.near)
        pixels, kinds = pixels[row, other], kinds[row, other]  # (m, 2), (m,): those that may be in the way
        weights = (255 - self.blocked(ends, row, pixels, kinds).astype(np.int64)) * stamps.weights[direction]
        sums = weights.cumsum(axis=1)
        choice, left = np.full(len(pivot), -1), np.flatnonzero(sums[:, -1] >= _LEAST * 255 * ONE)
        for _ in range(_TRIES):
            aim, tried = self.stream.uniform((len(left),)) * sums[left, -1], np.zeros(len(pivot), np.int64)
            tried[left] = (sums[left] > aim[:, None]).argmax(axis=1)
            fits = np.zeros(len(pivot), bool)
            fits[left] = True
            which = np.flatnonzero(fits[row])
            kind, end = stamps.kinds[360 + options[left, tried[left]]], ends[left, tried[left]]
            fits[left] = self.inside_frame(end, kind)
            new = stamps.kinds[360 + options[row[which], tried[row[which]]]]
            way = ends[row[which], tried[row[which]]] - pixels[which]
            fits[row[which][_look_up(stamps.touching, (new, kinds[which]), way)]] = False
            choice[fits] = tried[fits]
            left = left[~fits[left]]
        fits = choice >= 0
        row, choice = np.flatnonzero(fits), choice[fits]
        return fits, ends[row, choice], 360 + options[row, choice], pivot[row]

    def blocked(self, ends: np.ndarray, row: np.ndarray, pixels: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """(n, c) uint8: the largest mask within the margin of pixels (n, c, 2): of paddles (m,) of drawings ``row``."""
        found = self.grown_frame[ends[..., 0] + self.border, ends[..., 1] + self.border]
        if len(row):
            masks = _look_up(self.stamps.grown, (kinds[:, None],), ends[row] - pixels[:, None])
            first = np.flatnonzero(np.diff(row, prepend=-1))  # of the paddles of a drawing
            found[row[first]] = np.maximum(found[row[first]], np.maximum.reduceat(masks, first, axis=0))
        return found

    def inside_frame(self, ends: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """(n,): whether the masks of paddles do not touch the frame."""
        low, high = ends + self.stamps.hard[kinds, 0], ends + self.stamps.hard[kinds, 1]
        return np.all((low >= self.style.padding) & (high < self.style.size - self.style.padding), axis=1)

    def pair(self, pixels: np.ndarray, ink: np.ndarray) -> np.ndarray:
        """(m, 2) drawings, and the marks of each, 2 · origin + end: by turns a positive and a negative that are alike
        in the places of their markers, in their ink, and in the number of paddles around the origin. Otherwise these
        would tell something of the label."""
        size, cells, drawings = self.style.size, self.style.cells, len(pixels)
        left, pairs = np.arange(drawings), []
        ink = ink.argsort(kind="stable").argsort() * (cells - 2) // drawings
        for _ in range(_ROUNDS):
            option = self.stream.integers(4, len(left))
            origin, end = pixels[left, option // 2], pixels[left, 2 * self.style.contour - 2 + option % 2]
            near = (abs(pixels[left] - origin[:, None]) < size / 5).all(axis=2).sum(axis=1) // 4
            alike = (*(end * cells // size).T, *(origin * 8 // size).T, ink[left], np.minimum(near, 15))
            bins = functools.reduce(lambda number, part: 16 * number + part, alike)
            partners = match(bins, option // 2 == option % 2)
            pairs.append(np.stack([left[partners], option[partners]], axis=-1))
            left = np.delete(left, partners)
        together = np.concatenate(pairs)
        return together[self.stream.permutation(len(together))].reshape(-1, 2)

    def short_snakes(self, pixels: np.ndarray, directions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pixels (n, P, 2) and directions of all paddles, those of the short snakes among them."""
        style, drawings = self.style, len(pixels)
        long, length, forgotten = 2 * style.contour, style.distractor_length, 2 * style.contour - 2
        extra = style.distractors * length
        pixels = np.concatenate([pixels, np.full((drawings, extra, 2), _FAR)], axis=1)
        directions = np.concatenate([directions, np.full((drawings, extra), -1)], axis=1)
        # The original forgets the last paddle of the first snake.
        hidden, pixels[:, forgotten] = pixels[:, forgotten].copy(), _FAR
        low = np.repeat(self.with_border(self.frame[None] <= _FREE), drawings, axis=0)
        self.take_room(low, np.arange(drawings), pixels[:, :long], directions[:, :long])
        for first in range(long, long + extra, length):
            missing, own = np.arange(drawings), slice(first, first + length)
            seen = pixels[:, :first], self.stamps.kinds[directions[:, :first]]
            for _ in range(_SNAKE_TRIES):
                done, *found = self.short_snake(missing, low, *seen)
                pixels[done, own], directions[done, own] = found
                missing = np.setdiff1d(missing, done, assume_unique=True)
            self.take_room(low, np.arange(drawings), pixels[:, own], directions[:, own])
        pixels[:, forgotten] = hidden
        return pixels, directions

    def take_room(self, low: np.ndarray, rows: np.ndarray, pixels: np.ndarray, directions: np.ndarray) -> None:
        """Note in drawings where the masks of paddles are."""
        masks, size = self.stamps.masks[self.stamps.kinds[directions]] > _FREE, self.style.size
        row, paddle, y, x = np.nonzero(masks)
        y, x = y + pixels[row, paddle, 0] - masks.shape[2] // 2, x + pixels[row, paddle, 1] - masks.shape[2] // 2
        inside = (y >= 0) & (y < size) & (x >= 0) & (x < size)
        low[rows[row[inside]], y[inside] + self.border, x[inside] + self.border] = False

    def short_snake(
        self, rows: np.ndarray, low: np.ndarray, pixels: np.ndarray, kinds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Those of the drawings in which there is room for one, and its pixels (m, length, 2) and directions."""
        rows, begin, direction = self.find_room(rows, low)
        pivot = begin + self.stamps.heads[direction, 1]
        own, directions = begin[:, None], direction[:, None]
        for _ in range(self.style.distractor_length - 1):
            seen = np.concatenate([pixels[rows], own[:, :-1]], axis=1)
            seen_kinds = np.concatenate([kinds[rows], self.stamps.kinds[directions[:, :-1]]], axis=1)
            fits, end, direction, pivot = self.extend(pivot, direction, seen, seen_kinds)
            rows = rows[fits]
            own = np.concatenate([own[fits], end[:, None]], axis=1)
            directions = np.concatenate([directions[fits], direction[:, None]], axis=1)
        return rows, own, directions

    def find_room(self, rows: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Those of the drawings in which a snake can begin, its first pixel and its direction: a random one, and for it
        a random pixel at which the core of the mask is free."""
        size, direction = self.style.size, self.stream.integers(360, len(rows))
        kinds, luck = self.stamps.kinds[direction], self.stream.uniform((len(rows),))
        pixels = np.full((len(rows), 2), _FAR)
        guesses = np.stack(np.divmod(self.stream.integers(size**2, (len(rows), _GUESSES)), size), axis=-1)
        y, x = np.moveaxis(guesses[:, :, None] + self.core_table[kinds, None] + self.border, -1, 0)
        free = np.all(low[rows[:, None, None], y, x], axis=2) & self.has_core[kinds, None]
        hit = np.flatnonzero(np.any(free, axis=1))
        pixels[hit] = guesses[hit, free[hit].argmax(axis=1)]
        missed = ~np.any(free, axis=1) & self.has_core[kinds]
        for kind in np.unique(kinds[missed]):
            own = np.flatnonzero(missed & (kinds == kind))
            free = self.free(low[rows[own]], self.cores[kind]).reshape(len(own), size**2)
            place = (free.cumsum(axis=1) > (luck[own] * free.sum(axis=1))[:, None]).argmax(axis=1)
            pixels[own] = np.where(np.any(free, axis=1)[:, None], np.stack(np.divmod(place, size), axis=1), _FAR)
        found = self.begins(pixels, direction)
        return rows[found], pixels[found], direction[found]


def _look_up(table: np.ndarray, kinds: tuple[np.ndarray, ...], offsets: np.ndarray) -> np.ndarray:
    """Values of squares (…, side, side) at offsets (…, 2) from their middles; those beyond are on the rim."""
    reach = table.shape[-1] // 2
    offsets = np.minimum(np.maximum(offsets, -reach), reach) + reach
    return table[(*kinds, offsets[..., 0], offsets[..., 1])]


def match(bins: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(m, 2): positives and as many negatives, each of the bin of its partner."""
    which, keys = [], []
    for label in (True, False):
        own = np.flatnonzero(labels == label)
        own = own[np.argsort(bins[own], kind="stable")]
        rank = np.arange(len(own)) - np.searchsorted(bins[own], bins[own])  # within the bin
        which.append(own)
        keys.append(bins[own] * len(labels) + rank)
    _, positive, negative = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return np.stack([which[0][positive], which[1][negative]], axis=1)
