"""Pathfinder and Path-X: do two markers sit on the same dashed curve? (Linsley et al. 2018; Tay et al. 2021)

The drawings are made here (``longlens.tasks.snakes``), hard set of the arena: curves of 14 paddles.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longlens.progress import progress
from longlens.tasks import snakes
from longlens.tasks.base import SPLITS, Spec, SplitName, register
from longlens.tasks.datasets import Images, Samples, as_shades
from longlens.tasks.generate import Block, GeneratedTask
from longlens.tasks.sources import ARENA
from longlens.tasks.store import Details, Writer
from longlens.tasks.stream import Stream

HARD = "curv_contour_length_14"  # the folder of the hard images in the arena's release


@register("pathfinder")
@dataclass(frozen=True, kw_only=True)
class Pathfinder(GeneratedTask):
    """Do two markers sit on the same curve?

    Args:
        sizes: images for training, validation and test; even numbers, half of each are positive.
        size: pixels on a side.
        contour: paddles of a long curve.
        distractors: short curves.
        release: the images of the arena's release, imported with --from and cut into splits by seed, instead of
            generated ones.
    """

    sizes: tuple[int, int, int] = (160_000, 20_000, 20_000)
    size: int = 32
    contour: int = 14
    distractors: int = 5
    release: bool = False

    style: ClassVar[snakes.Style] = snakes.PATHFINDER_32
    summary: ClassVar[str] = "are two markers on one curve? 32×32 pixels"
    block_size: ClassVar[int] = 1000
    together: ClassVar[int] = 2  # a positive and a negative

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(size % 2 for size in self.sizes):
            raise ValueError(f"sizes are {self.sizes}; they must be even, as half of the images are positive")
        self.drawn_style()
        if self.release:
            self.refuse_with_release("contour", "distractors")

    def drawn_style(self) -> snakes.Style:
        """That of the arena. In smaller pictures gaps are shorter, and the long curves begin nearer to each other."""
        scale = min(1.0, self.size / self.style.size)
        return replace(
            self.style,
            size=self.size,
            contour=self.contour,
            distractors=self.distractors,
            gap=tuple(scale * gap for gap in self.style.gap),
            seed_distance=scale * self.style.seed_distance,
        )

    @property
    def spec(self) -> Spec:
        return Spec("real", 1, self.size**2, self.head, 2, self.metric)

    def load(self, name: SplitName, epoch: int) -> Images:
        pixels, labels = (self.prepared.array(name, key) for key in ("values", "labels"))
        return Images(pixels.reshape(len(labels), -1), labels, as_shades)

    def recipe(self) -> dict[str, Any]:
        if not self.release:
            return super().recipe()
        return {"task": self.name, "version": 1, "release": self.size, "sizes": self.sizes, "seed": self.seed}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        return self._import(writer, source) if self.release else super().build(writer, source, workers)

    def _import(self, writer: Writer, source: Path | None) -> Details:
        folder = f"pathfinder{self.size}/{HARD}"
        if source is None:
            raise ValueError(
                f"the arena's images are in {ARENA}, folder {folder}: give it with --from, "
                "or leave out --release to generate images"
            )
        roots = [root for root in (source, source / HARD, source / folder, source / "lra_release" / folder)
                 if (root / "metadata").is_dir()]  # fmt: skip
        if not roots:
            raise ValueError(
                f"there is no folder {folder}/metadata in {source}: unpack the arena's lra_release.gz there"
            )
        samples = _list_release(roots[0])
        if len(samples) != sum(self.sizes):
            raise ValueError(
                f"{roots[0]} has {len(samples):,} images, and sizes ask for {sum(self.sizes):,}; the arena has 200,000"
            )
        order = Stream("pathfinder release", self.seed).permutation(len(samples))
        splits = np.repeat(SPLITS, self.sizes)
        with progress(f"importing {self.name}", len(samples), "images") as done:
            for place, (index, split) in enumerate(zip(order, splits, strict=True)):
                path, label = samples[index]
                writer.append(split, "values", _read_image(path, self.size).ravel())
                writer.append(split, "labels", np.array([label], dtype=np.uint8))
                done(place)
        return {"sizes": dict(zip(SPLITS, self.sizes, strict=True)), "source": str(source)}

    def block(self, index: int) -> Block:
        stream = Stream("pathfinder", self.version, self.seed, index)
        images, labels = snakes.draw(stream, self.block_size, self.drawn_style())
        return Block(images.ravel(), np.full(len(labels), self.size**2, dtype=np.int64), labels)

    def render(self, samples: Samples, row: int) -> str:
        return ("two curves", "one curve")[samples.targets[row]]

    def picture(self, samples: Samples, row: int) -> np.ndarray:
        return samples.inputs[row, :, 0].reshape(self.size, self.size)


@register("path-x")
@dataclass(frozen=True, kw_only=True)
class PathX(Pathfinder):
    size: int = 128
    distractors: int = snakes.PATH_X.distractors

    __doc__ = Pathfinder.__doc__
    style: ClassVar[snakes.Style] = snakes.PATH_X
    summary: ClassVar[str] = "are two markers on one curve? 128×128 pixels"
    block_size: ClassVar[int] = 200


def _list_release(root: Path) -> list[tuple[Path, int]]:
    """Images and labels of a folder of the release. Its metadata are text, a line for each image, label fourth."""
    samples = []
    for file in sorted((root / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem)):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            columns = line.split()
            if len(columns) < 4 or columns[3] not in ("0", "1"):
                raise ValueError(f"{file}, line {number}: the fourth column must be the label 0 or 1")
            path = root / columns[0] / columns[1]
            if not path.resolve().is_relative_to(root.resolve()):
                raise ValueError(f"{file}, line {number}: {columns[0]}/{columns[1]} points outside of {root}")
            samples.append((path, int(columns[3])))
    return samples


def _read_image(path: Path, size: int) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    if pixels.shape != (size, size):
        raise ValueError(f"{path} has {pixels.shape} pixels; it must have {(size, size)}")
    return pixels
