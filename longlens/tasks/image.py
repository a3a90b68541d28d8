"""CIFAR-10 in gray, pixel by pixel: the arena's Image task.

Gray is ITU-R 601 luma as everybody's image library rounds it; then (x − 122.6) / 61.0, one real channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.tasks.base import Head, Metric, Spec, TrainTestTask, register
from longlens.tasks.datasets import Images, Samples
from longlens.tasks.sources import Remote, official
from longlens.tasks.store import Details, Writer

SIDE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARCHIVE = Remote(
    "cifar-10-binary.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
)
MEAN, DEVIATION = 122.6, 61.0
_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_IMAGES_A_FILE = 10_000
_SHA256 = {
    "train": "ba050e58bb874b081f77dab76537085cd66c7778dbfbc20c17ea7104cb8b50e5",
    "test": "b9698215d9a6d2228321c682cef103cb1a55961ab5f8a0144fba5ff31788d276",
}  # of the gray pixels and then the labels


@register("image")
@dataclass(frozen=True, kw_only=True)
class Image(TrainTestTask):
    """CIFAR-10 in gray, pixel by pixel.

    Args:
        valid_size: training images held out for validation.
        seed: which ones.
    """

    valid_size: int = 5_000

    summary: ClassVar[str] = "CIFAR-10 in gray, pixel by pixel"
    origin: ClassVar[str] = "download, 170 MB"
    head: ClassVar[Head] = "classify"
    metric: ClassVar[Metric] = "accuracy"
    sizes: ClassVar[Mapping[str, int]] = {"train": 50_000, "test": 10_000}

    @property
    def spec(self) -> Spec:
        return Spec("real", 1, SIDE * SIDE, self.head, 10, self.metric)

    def stored(self, name: Literal["train", "test"]) -> Images:
        pixels, labels = (self.prepared.array(name, key) for key in ("values", "labels"))
        return Images(pixels, labels, normalize)

    def recipe(self) -> dict[str, Any]:
        return {"data": "cifar-10", "version": 1, "gray": "ITU-R 601"}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        found = official(source, ARCHIVE)
        files = {Path(name).name: data for name, data in found.files(r"(.*/)?(data_batch_[1-5]|test_batch)\.bin")}
        for split, names in _FILES.items():
            digest = sha256()
            for name in names:
                if name not in files:
                    raise ValueError(
                        f"there is no file {name} in {found.path}: the binary CIFAR-10 is at {ARCHIVE.urls[0]}"
                    )
                pixels, labels = _parse(files[name], name)
                digest.update(pixels.tobytes() + labels.tobytes())
                writer.append(split, "values", pixels)
                writer.append(split, "labels", labels)
            if digest.hexdigest() != _SHA256[split]:
                raise ValueError(
                    f"the {split} images in {found.path} have the form of CIFAR-10, but are not CIFAR-10: a set of "
                    "your own is read by the task 'files'"
                )
        return {"sizes": dict(self.sizes), "source": str(source or ARCHIVE.urls[0])}

    def render(self, samples: Samples, row: int) -> str:
        return CLASSES[samples.targets[row]]

    def picture(self, samples: Samples, row: int) -> np.ndarray:
        return (samples.inputs[row, :, 0].reshape(SIDE, SIDE) * DEVIATION + MEAN) / 255


def normalize(pixels: np.ndarray) -> np.ndarray:
    """Bytes (B, L) to one channel (B, L, 1) around 0."""
    return ((pixels.astype(np.float32) - np.float32(MEAN)) / np.float32(DEVIATION))[..., None]


def gray(color: np.ndarray) -> np.ndarray:
    """(N, 3, L) bytes of red, green, blue to (N, L): 0.299 R + 0.587 G + 0.114 B in 16 fractional bits, rounded."""
    red, green, blue = (color[:, channel].astype(np.uint32) for channel in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)


def _parse(data: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A file of the binary version: for each image a byte of label and 3 × 1024 of color."""
    record = 1 + 3 * SIDE * SIDE
    if len(data) != _IMAGES_A_FILE * record:
        raise ValueError(f"{name} has {len(data):,} bytes; a file of CIFAR-10 has {_IMAGES_A_FILE * record:,}")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    labels = records[:, 0].copy()
    if labels.max() > 9:
        raise ValueError(f"{name} has a label {labels.max()}; the classes of CIFAR-10 go from 0 to 9")
    return gray(records[:, 1:].reshape(-1, 3, SIDE * SIDE)), labels
