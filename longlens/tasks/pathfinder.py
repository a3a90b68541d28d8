"""Pathfinder and Path-X: do two markers sit on the same dashed curve? (Linsley et al. 2018; Tay et al. 2021)

The drawings are made here (``longlens.data.snakes``), hard set of the arena: curves of 14 paddles.
"""

import io
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from longlens.data import snakes
from longlens.data.datasets import SPLITS, Images, Samples, SplitName, Stream, as_shades
from longlens.data.generate import Shard
from longlens.data.paddles import PATH_X, PATHFINDER_32, Style
from longlens.data.sources import ARENA, Source
from longlens.data.store import Writer, cache_errors
from longlens.errors import BadInput
from longlens.options import Even, Is, shorten
from longlens.progress import progress
from longlens.tasks.base import ReleasedTask, Spec, register

CLASSES = ("two curves", "one curve")
HARD = "curv_contour_length_14"  # the folder of the hard images in the arena's release
LONGEST = 1 << 20  # bytes of an image of the release, far above that of any
MOST_METADATA = 1 << 24  # bytes of a file of metadata

Side = Annotated[int, Ge(4), Le(512), Is("a whole number from 4 to 512")]
Paddles = Annotated[int, Ge(2), Le(64), Is("a whole number from 2 to 64")]
Distractors = Annotated[int, Ge(0), Le(100), Is("a whole number from 0 to 100")]


@register("pathfinder")
@dataclass(frozen=True, kw_only=True)
class Pathfinder(ReleasedTask):
    """Do two markers sit on the same curve?

    Args:
        sizes: Images for training, validation and test: even numbers, as half of each are positive.
        size: Pixels on a side.
        contour: Paddles of a long curve.
        distractors: Number of short curves.
        release: Import the images of the arena's release with --from, cut into splits by seed, instead of generating
            images.
    """

    sizes: tuple[Even, Even, Even] = (160_000, 20_000, 20_000)
    size: Side = 32
    contour: Paddles = 14
    distractors: Distractors = 5

    style: ClassVar[Style] = PATHFINDER_32
    version: ClassVar[int] = 2  # 1 had curves that never cross
    summary: ClassVar[str] = "are two markers on one curve? 32×32 pixels"
    shard_size: ClassVar[int] = 1000
    together: ClassVar[int] = 2  # a positive and a negative
    generator_options: ClassVar[tuple[str, ...]] = ("contour", "distractors")

    def drawn_style(self) -> Style:
        """The arena's style. In smaller pictures the long curves begin nearer to each other."""
        distance = self.style.seed_distance * min(self.size, self.style.size) // self.style.size
        given = {"size": self.size, "contour": self.contour, "distractors": self.distractors}
        return replace(self.style, **given, seed_distance=distance)

    @property
    def spec(self) -> Spec:
        return Spec("real", 1, self.size**2, self.head, 2, self.metric, shape=(self.size, self.size))

    def load(self, name: SplitName, epoch: int) -> Images:
        pixels, labels = (self.prepared.array(name, key) for key in ("values", "labels"))
        return Images(pixels.reshape(len(labels), -1), labels, as_shades)

    def codec(self) -> dict[str, Any]:
        """The codec of pixels from 0 to 255, row by row."""
        return {"form": "real", "deviation": [255.0], "classes": list(CLASSES)}

    def identity(self) -> dict[str, Any]:
        if not self.release:
            return super().identity()
        return {"task": self.name, "version": 1, "release": self.size, "sizes": self.sizes, "seed": self.seed}

    def import_release(self, writer: Writer, source: Path) -> None:
        folder = f"pathfinder{self.size}/{HARD}"
        found, prefix = _open_release(source, folder)
        samples = _list_release(found, prefix)
        if len(samples) != sum(self.sizes):
            given = f"{len(samples):,} images" + ("" if samples else f", and no folder {folder}/metadata")
            wanted = f"and sizes ask for {sum(self.sizes):,}; the arena has 200,000, in {ARENA}"
            raise BadInput(f"{found.path} has {given}, {wanted}")
        order = Stream("pathfinder release", self.seed).permutation(len(samples))
        splits = np.repeat(SPLITS, self.sizes)
        labels = np.array(list(samples.values()), dtype=np.uint8)
        with cache_errors(), tempfile.TemporaryFile(dir=writer.folder) as pixels:  # they may not fit into memory
            self._read_images(found, prefix, list(samples), pixels)
            for index, split in zip(order.tolist(), splits.tolist(), strict=True):
                pixels.seek(index * self.size**2)
                values = np.frombuffer(pixels.read(self.size**2), np.uint8)
                writer.append(split, values=values, labels=labels[index : index + 1])

    def _read_images(self, source: Source, prefix: str, paths: list[str], pixels: Any) -> None:
        """Write the pixels of all images, in the order of ``paths``, in whichever order the source has them."""
        places = {path: place for place, path in enumerate(paths)}
        with progress(f"importing {self.name}", len(paths), "images") as done:
            for name, data in source.files(rf"{prefix}(?!metadata/).+\.png", limit=LONGEST):
                place = places.pop(name.rpartition(f"/{HARD}/")[2], None)
                if place is not None:
                    pixels.seek(place * self.size**2)
                    pixels.write(_decode(data, f"{name} in {source.path}", self.size).tobytes())
                    done(len(paths) - len(places))
        if places:
            raise BadInput(f"there is no image {next(iter(places))} in {source.path}, which its metadata list")

    def shard(self, index: int) -> Shard:
        stream = Stream("pathfinder", self.version, self.seed, index)
        images, labels = snakes.draw(stream, self.shard_size, self.drawn_style())
        return Shard(images.ravel(), np.full(len(labels), self.size**2, dtype=np.int64), labels)

    def render(self, samples: Samples, row: int) -> str:
        return CLASSES[samples.targets[row]]

    def picture(self, samples: Samples, row: int) -> np.ndarray:
        return samples.inputs[row, :, 0].reshape(self.size, self.size)


@register("path-x")
@dataclass(frozen=True, kw_only=True)
class PathX(Pathfinder):
    """Do two markers sit on the same curve of a large picture?"""

    size: Side = 128
    distractors: Distractors = PATH_X.distractors

    style: ClassVar[Style] = PATH_X
    summary: ClassVar[str] = "are two markers on one curve? 128×128 pixels"
    shard_size: ClassVar[int] = 600


def _open_release(source: Path, folder: str) -> tuple[Source, str]:
    """The folder of the images itself, if it is one, or the archive of the release and how paths begin there."""
    roots = (source, source / HARD, source / folder, source / "lra_release" / folder)
    for root in roots:
        if (root / "metadata").is_dir():
            return Source(root), ""
    return Source(source), rf"(.*/)?{folder}/"


def _list_release(source: Source, prefix: str) -> dict[str, int]:
    """The labels of the images, by their paths. The metadata are text, a line for each image, label fourth."""
    found = dict(source.files(rf"{prefix}metadata/[^/]+\.npy", limit=MOST_METADATA))
    samples = {}
    for name in sorted(found, key=lambda name: (len(PurePosixPath(name).stem), PurePosixPath(name).stem)):
        try:
            lines = found[name].decode().splitlines()
        except UnicodeDecodeError:
            raise BadInput(f"{name} in {source.path} is not text: the arena's metadata are") from None
        for number, line in enumerate(lines, start=1):
            place, columns = f"{name} in {source.path}, line {number}", line.split()
            if len(columns) < 4 or columns[3] not in ("0", "1"):
                raise BadInput(f"{place}: the fourth column must be the label 0 or 1, got {shorten(line)!r}")
            path = PurePosixPath(columns[0], columns[1])
            if path.is_absolute() or ".." in path.parts:
                raise BadInput(f"{place}: {path} points outside of {source.path}")
            samples[str(path)] = int(columns[3])
    return samples


def _decode(data: bytes, place: str, size: int) -> np.ndarray:
    """(size, size) bytes of gray."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
            if image.size == (size, size):
                return np.asarray(image.convert("L"))
            given = f"{image.width} × {image.height}"
    except Exception as error:  # Pillow raises nearly everything for a damaged or hostile file
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else shorten(str(error))
        raise BadInput(f"{place} cannot be read as an image: {reason}") from error
    raise BadInput(f"{place} must have {size} × {size} pixels, got {given}")
