"""Images of ten classes as sequences of gray pixels.

- smnist, pmnist: MNIST digits row by row, or with pixel numbers sorted by their ten bits read backwards, as in the S4
  and LSSL experiments. (Le et al. 2015, who introduced the task, drew a permutation at random.)
- image: CIFAR-10, the arena's Image task. Gray is ITU-R 601 luma as everybody's image library rounds it; then
  (x − 122.6) / 61.0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.data.datasets import Images, Samples
from longlens.data.sources import Remote, Source, official
from longlens.data.store import Details, Writer
from longlens.errors import BadInput
from longlens.options import Size
from longlens.tasks.base import Spec, TrainTestTask, register

PREFIX = {"train": "train", "test": "t10k"}  # of the files of MNIST
_ADDRESSES = ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR = Remote(
    "cifar-10-binary.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
CIFAR_RECORD = 1 + 3 * 32 * 32  # bytes of an image: a label and three colors
CIFAR_FILE = 10_000 * CIFAR_RECORD  # bytes of a file


@dataclass(frozen=True, kw_only=True)
class ImageTask(TrainTestTask):
    """Images of ten classes, pixel by pixel.

    Args:
        size: Pixels of a side; a smaller image has the means of squares of pixels.
    """

    size: Size

    side: ClassVar[int]  # of the images that are stored
    data: ClassVar[str]  # the name of the set
    mean: ClassVar[float] = 0.0  # which pixels are freed of
    deviation: ClassVar[float] = 255.0
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    checksums: ClassVar[Mapping[str, str]]  # sha256 of the pixels and then the labels of each file

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side % self.size:
            allowed = ", ".join(str(size) for size in range(2, self.side + 1) if self.side % size == 0)
            raise BadInput(f"size must be one of {allowed}, got {self.size}")

    @property
    def order(self) -> np.ndarray | None:
        """(L,) which pixel comes when, if not row by row."""
        return None

    @property
    def spec(self) -> Spec:
        shape = (self.size, self.size) if self.order is None else None
        return Spec("real", 1, self.size**2, self.head, 10, self.metric, shape=shape)

    def stored(self, name: Literal["train", "test"]) -> Images:
        values, labels = self.prepared.array(name, "values"), self.prepared.array(name, "labels")
        return Images(values, labels, self.transform, self.order, self.side // self.size)

    def transform(self, pixels: np.ndarray) -> np.ndarray:
        """Bytes (B, L) to one channel (B, L, 1)."""
        return ((pixels.astype(np.float32) - np.float32(self.mean)) / np.float32(self.deviation))[..., None]

    def picture(self, samples: Samples, row: int) -> np.ndarray:
        """From 0 to 1."""
        pixels = np.empty(self.size**2, dtype=np.float32)
        pixels[slice(None) if self.order is None else self.order] = samples.inputs[row, :, 0]
        return (pixels.reshape(self.size, self.size) * self.deviation + self.mean) / 255

    def codec(self) -> dict[str, Any]:
        """The codec of pixels from 0 to 255, row by row."""
        order = None if self.order is None else self.order.tolist()
        scaling = {"mean": [self.mean], "deviation": [self.deviation]}
        return {"form": "real", **scaling, "order": order, "classes": list(self.classes)}

    def write(self, writer: Writer, split: str, files: Iterable[tuple[np.ndarray, np.ndarray]], place: object) -> None:
        """Store the pixels (N, L) and labels (N,) of a split, if they are those of the official set."""
        digest = sha256()
        for pixels, labels in files:
            if labels.max() > 9:
                raise BadInput(f"{place}: the labels of {self.data} must be 0 to 9, got {labels.max()}")
            digest.update(pixels.tobytes() + labels.tobytes())
            writer.append(split, values=pixels, labels=labels)
        if digest.hexdigest() != self.checksums[split]:
            given = f"the {split} images of {place} have the form of {self.data}, but are not {self.data}"
            raise BadInput(f"{given}: a set of your own is read by the task 'files'")


@dataclass(frozen=True, kw_only=True)
class Mnist(ImageTask):
    """Digits, pixel by pixel."""

    size: Size = 28
    valid_size: Size = 6_000

    origin: ClassVar[str] = "download, 12 MB"
    sizes: ClassVar[Mapping[str, int]] = {"train": 60_000, "test": 10_000}
    side: ClassVar[int] = 28
    data: ClassVar[str] = "MNIST"
    checksums: ClassVar[Mapping[str, str]] = {
        "train": "edc0d1098aa497be14ace79ddd5171e5a3dcf9c4d196c015389203eb3ba1f59b",
        "test": "c3f9adf9c66efb572b1f9326c3a511b45910c7173b97be66ceceeeeaef6b802b",
    }

    def store_name(self) -> str:
        return "mnist"

    def identity(self) -> dict[str, Any]:
        return {"data": "mnist", "version": 1}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        for split, count in self.sizes.items():
            images = self._read(source, f"{PREFIX[split]}-images-idx3-ubyte", (count, self.side, self.side))
            labels = self._read(source, f"{PREFIX[split]}-labels-idx1-ubyte", (count,))
            self.write(writer, split, [(images.reshape(count, -1), labels)], source or "MNIST")
        return {"sizes": dict(self.sizes), "source": str(source or _ADDRESSES[0])}

    def _read(self, source: Path | None, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An idx file, whose header must say what the file holds."""
        urls = tuple(f"{address}{name}.gz" for address in _ADDRESSES)
        if source is None:
            source = Remote(f"{name}.gz", urls, f"md5:{_MD5[name]}").fetch(self.import_command())
        header = 4 + 4 * len(shape)
        expected = header + int(np.prod(shape))
        data = Source(source, " or ".join(urls)).read(name, name.replace("-idx", ".idx"), limit=expected)
        if len(data) < header or data[:3] != b"\x00\x00\x08" or data[3] != len(shape):
            raise BadInput(f"{name} in {source} is not an idx file of bytes in {len(shape)} dimensions")
        said = tuple(np.frombuffer(data, ">u4", len(shape), offset=4).tolist())
        if said != shape or len(data) != expected:
            given = f"says that it holds {said} bytes, and has {len(data) - header:,}"
            raise BadInput(f"{name} in {source} {given}; MNIST has {shape}")
        return np.frombuffer(data, np.uint8, offset=header).reshape(shape)

    def render(self, samples: Samples, row: int) -> str:
        return f"digit {samples.targets[row]}"


@register("smnist")
class SequentialMnist(Mnist):
    summary: ClassVar[str] = "digits, pixel by pixel"


def bit_reversal(count: int) -> np.ndarray:
    """0 … count − 1, sorted by their bits read backwards: 0, 512, 256, 768, 128, … for 1024."""
    bits = (count - 1).bit_length()
    return np.array(sorted(range(count), key=lambda number: f"{number:0{bits}b}"[::-1]))


@register("pmnist")
class PermutedMnist(Mnist):
    summary: ClassVar[str] = "digits, pixel by pixel in bit-reversed order"

    @property
    def order(self) -> np.ndarray | None:
        return bit_reversal(self.size**2)


@register("image")
@dataclass(frozen=True, kw_only=True)
class Cifar(ImageTask):
    """CIFAR-10 in gray, pixel by pixel."""

    size: Size = 32
    valid_size: Size = 5_000

    summary: ClassVar[str] = "CIFAR-10 in gray, pixel by pixel"
    origin: ClassVar[str] = "download, 170 MB"
    sizes: ClassVar[Mapping[str, int]] = {"train": 50_000, "test": 10_000}
    side: ClassVar[int] = 32
    data: ClassVar[str] = "CIFAR-10"
    mean: ClassVar[float] = 122.6
    deviation: ClassVar[float] = 61.0
    classes: ClassVar[tuple[str, ...]] = CIFAR_CLASSES
    checksums: ClassVar[Mapping[str, str]] = {
        "train": "ba050e58bb874b081f77dab76537085cd66c7778dbfbc20c17ea7104cb8b50e5",
        "test": "b9698215d9a6d2228321c682cef103cb1a55961ab5f8a0144fba5ff31788d276",
    }

    def identity(self) -> dict[str, Any]:
        return {"data": "cifar-10", "version": 1, "gray": "ITU-R 601"}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        found = official(source, CIFAR, self.import_command())
        pattern = r"(.*/)?(data_batch_[1-5]|test_batch)\.bin"
        files = {Path(name).name: data for name, data in found.files(pattern, limit=CIFAR_FILE)}
        for name in (*CIFAR_FILES["train"], *CIFAR_FILES["test"]):
            if name not in files:
                raise BadInput(f"there is no file {name} in {found.path}: CIFAR-10 is at {CIFAR.urls[0]}")
            if len(files[name]) != CIFAR_FILE:
                given = f"{len(files[name]):,}"
                raise BadInput(f"{name} must have the {CIFAR_FILE:,} bytes of a file of CIFAR-10, got {given}")
        for split, names in CIFAR_FILES.items():
            self.write(writer, split, (_parse(files[name]) for name in names), found.path)
        return {"sizes": dict(self.sizes), "source": str(source or CIFAR.urls[0])}

    def render(self, samples: Samples, row: int) -> str:
        return CIFAR_CLASSES[samples.targets[row]]


def _parse(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The gray pixels and the labels of a file of the binary version."""
    records = np.frombuffer(data, np.uint8).reshape(-1, CIFAR_RECORD)
    return gray(records[:, 1:].reshape(len(records), 3, -1)), records[:, 0].copy()


def gray(color: np.ndarray) -> np.ndarray:
    """(N, 3, L) bytes of red, green, blue to (N, L): 0.299 R + 0.587 G + 0.114 B in 16 fractional bits, rounded."""
    red, green, blue = (color[:, channel].astype(np.uint32) for channel in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)
