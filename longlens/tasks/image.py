"""CIFAR-10 in gray, pixel by pixel: the arena's Image task.

Gray is ITU-R 601 luma as everybody's image library rounds it; then (x − 122.6) / 61.0, one real channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.data.datasets import Images, Metric, Samples
from longlens.data.sources import Remote, official
from longlens.data.store import Details, Writer
from longlens.errors import BadInput
from longlens.options import Size
from longlens.tasks.base import Head, Spec, TrainTestTask, register

SIDE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARCHIVE = Remote(
    "cifar-10-binary.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
)
MEAN, DEVIATION = 122.6, 61.0
_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_RECORD = 1 + 3 * SIDE * SIDE  # bytes of an image: a label and three colors
_FILE = 10_000 * _RECORD  # bytes of a file
_SHA256 = {
    "train": "ba050e58bb874b081f77dab76537085cd66c7778dbfbc20c17ea7104cb8b50e5",
    "test": "b9698215d9a6d2228321c682cef103cb1a55961ab5f8a0144fba5ff31788d276",
}  # of the gray pixels and then the labels


@register("image")
@dataclass(frozen=True, kw_only=True)
class Image(TrainTestTask):
    """CIFAR-10 in gray, pixel by pixel.

    Args:
        valid_size: Training images held out for validation.
        seed: Seed that decides which images are held out.
    """

    valid_size: Size = 5_000

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

    def identity(self) -> dict[str, Any]:
        return {"data": "cifar-10", "version": 1, "gray": "ITU-R 601"}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        found = official(source, ARCHIVE, self.import_command())
        pattern = r"(.*/)?(data_batch_[1-5]|test_batch)\.bin"
        files = {Path(name).name: data for name, data in found.files(pattern, limit=_FILE)}
        for split, names in _FILES.items():
            digest = sha256()
            for name in names:
                if name not in files:
                    raise BadInput(f"there is no file {name} in {found.path}: CIFAR-10 is at {ARCHIVE.urls[0]}")
                pixels, labels = _parse(files[name], name)
                digest.update(pixels.tobytes() + labels.tobytes())
                writer.append(split, "values", pixels)
                writer.append(split, "labels", labels)
            if digest.hexdigest() != _SHA256[split]:
                raise BadInput(
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
    """The gray pixels and the labels of a file of the binary version."""
    if len(data) != _FILE:
        raise BadInput(f"{name} must have the {_FILE:,} bytes of a file of CIFAR-10, got {len(data):,}")
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    labels = records[:, 0].copy()
    if labels.max() > 9:
        raise BadInput(f"{name}: the labels of CIFAR-10 must be 0 to 9, got {labels.max()}")
    return gray(records[:, 1:].reshape(-1, 3, SIDE * SIDE)), labels
