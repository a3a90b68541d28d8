"""MNIST digits as sequences of 784 pixels: row by row (smnist), or in bit-reversed order (pmnist).

The permutation of pmnist sorts pixel numbers by their ten bits read backwards, as in the S4 and LSSL experiments. (Le
et al. 2015, who introduced the task, drew one at random.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.data.datasets import Images, Metric, Samples, as_shades
from longlens.data.sources import Remote, Source
from longlens.data.store import Details, Writer
from longlens.errors import BadInput
from longlens.options import Size
from longlens.tasks.base import Head, Spec, TrainTestTask, register

SIDE = 28
PREFIX = {"train": "train", "test": "t10k"}
_ADDRESSES = ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
_SHA256 = {
    "train": "edc0d1098aa497be14ace79ddd5171e5a3dcf9c4d196c015389203eb3ba1f59b",
    "test": "c3f9adf9c66efb572b1f9326c3a511b45910c7173b97be66ceceeeeaef6b802b",
}  # of the pixels and then the labels


@dataclass(frozen=True, kw_only=True)
class Mnist(TrainTestTask):
    """Digits, pixel by pixel.

    Args:
        valid_size: Training images held out for validation.
        seed: Seed that decides which images are held out.
    """

    valid_size: Size = 6_000

    origin: ClassVar[str] = "download, 12 MB"
    head: ClassVar[Head] = "classify"
    metric: ClassVar[Metric] = "accuracy"
    sizes: ClassVar[Mapping[str, int]] = {"train": 60_000, "test": 10_000}

    @property
    def spec(self) -> Spec:
        return Spec("real", 1, SIDE * SIDE, self.head, 10, self.metric)

    def order(self) -> np.ndarray | None:
        """(784,) which pixel comes when, if not row by row."""
        return None

    def stored(self, name: Literal["train", "test"]) -> Images:
        pixels, labels = (self.prepared.array(name, key) for key in ("values", "labels"))
        return Images(pixels, labels, as_shades, self.order())

    def store_name(self) -> str:
        return "mnist"

    def identity(self) -> dict[str, Any]:
        return {"data": "mnist", "version": 1}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        for split, count in self.sizes.items():
            images = self._read(source, f"{PREFIX[split]}-images-idx3-ubyte", (count, SIDE, SIDE))
            labels = self._read(source, f"{PREFIX[split]}-labels-idx1-ubyte", (count,))
            if labels.max() > 9:
                raise BadInput(f"the {split} labels of {source or 'MNIST'} must be 0 to 9, got {labels.max()}")
            if sha256(images.tobytes() + labels.tobytes()).hexdigest() != _SHA256[split]:
                raise BadInput(
                    f"the {split} images of {source or 'MNIST'} have the form of MNIST, but are not MNIST: a set of "
                    "your own is read by the task 'files'"
                )
            writer.append(split, "values", images.reshape(count, -1))
            writer.append(split, "labels", labels)
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
            raise BadInput(
                f"{name} in {source} says that it holds {said} bytes, and has {len(data) - header:,}; MNIST has {shape}"
            )
        return np.frombuffer(data, np.uint8, offset=header).reshape(shape)

    def render(self, samples: Samples, row: int) -> str:
        return f"digit {samples.targets[row]}"

    def picture(self, samples: Samples, row: int) -> np.ndarray:
        return samples.inputs[row, :, 0].reshape(SIDE, SIDE)


@register("smnist")
class SequentialMnist(Mnist):
    summary: ClassVar[str] = "digits, pixel by pixel"


@register("pmnist")
class PermutedMnist(Mnist):
    summary: ClassVar[str] = "digits, pixel by pixel in bit-reversed order"

    def order(self) -> np.ndarray:
        return bit_reversal(SIDE * SIDE)

    def picture(self, samples: Samples, row: int) -> np.ndarray:
        pixels = np.empty(SIDE * SIDE, dtype=np.float32)
        pixels[self.order()] = samples.inputs[row, :, 0]
        return pixels.reshape(SIDE, SIDE)


def bit_reversal(count: int) -> np.ndarray:
    """0 … count − 1, sorted by their bits read backwards: 0, 512, 256, 768, 128, … for 1024."""
    bits = (count - 1).bit_length()
    numbers = np.arange(count)
    reversed_bits = sum(((numbers >> bit) & 1) << (bits - 1 - bit) for bit in range(bits))
    return np.argsort(np.asarray(reversed_bits), kind="stable")
